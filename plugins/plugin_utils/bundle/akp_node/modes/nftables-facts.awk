# A listing of nft as facts, in the form that nftables-replay.awk describes. What changes by itself is left out: sessions in
# affinity sets, the size that the kernel gives them, counters.
function elements(text,   n, i, part) {
    inside = !sub(/ *\}$/, "", text)
    if (name ~ /^affinity-/) return
    n = split(text, part, ",")
    for (i = 1; i <= n; i++) {
        gsub(/^[ \t]+|[ \t]+$/, "", part[i])
        if (part[i] != "") print family, kind, name, "E", part[i]
    }
}
BEGIN { OFS = "\t" }
inside { elements($0); next }
/^table / { family = $2; table = ""; next }
/^\}$/ { print family, "table", "kube-proxy", "H", table; next }
/^\t(comment "|flags )/ { table = table substr($0, 2) ";"; next }
/^\t[a-z]+ .*\{$/ { kind = $1; name = $2; head = ""; next }
/^\t\}$/ { print family, kind, name, "H", head; next }
/^\t\telements = \{/ { sub(/^\t\telements = \{/, ""); elements($0); next }
/^\t\t/ {
    sub(/^\t\t/, "")
    if (kind == "chain" && !/^type .* hook / && !/^comment "/) print family, kind, name, "R", $0
    else if (!/^size / && !/^packets /) head = head $0 ";"
}
