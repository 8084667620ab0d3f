# Does a bundle change endpoints only? Operands: what=KIND FILE ...; first files of the bundle, then those of the record in order (taken is
# empty for the snapshot). Prints the first reason why not, or nothing. Lines that only take away need no permission: they
# deny service, as a writer of EndpointSlices can.
#   dispatch, commands   restore input of family, or nft commands: every rule and element they add must be allowed
#   allow                +LINE, -LINE: what an approver allowed
#   servers              input of ipvsadm: each virtual server must be one of the record; virtual: -A, -D make the record
#   come, had            iptables files of ipvs mode, of the bundle and of the record: they may differ by the marker, and by the rule
#                        of KUBE-POSTROUTING that is there while any Service has endpoints
function need(line, text) { if (!(line in wanted)) { wanted[line] = 1; key[++n] = line; said[n] = text } }
function tell(why) { if (told == "") told = why }
# The start or end of a table, a marker, a question: nothing that a packet notices.
function frame() { return /^(#|COMMIT$|\*|$)/ || /^-C / || /^(:|-[AFX] )KUBE-PROXY-GEN-[0-9A-F]+( |$)/ }
FNR == 1 { table = ""; file = FILENAME; sub(/.*\//, "", file) }
/^\*/ && what != "allow" { table = substr($0, 2) }
what == "dispatch" && !frame() {
    chain = /^:/ ? substr($1, 2) : $2
    ours = chain ~ /^KUBE-(SERVICES|EXTERNAL-SERVICES)$/ || table == "nat" && chain ~ /^KUBE-(EXT-.*|NODEPORTS)$/
    # A whole bundle declares firewall chains, which another file fills; a delta removes chains of Services that have no endpoints left.
    if ($0 == ":" chain " - [0:0]") { if (!ours && !(kind == "Bundle" && chain ~ /^KUBE-FW-/)) tell(file " empties " chain) }
    else if ($1 ~ /^-[FX]$/ && NF == 2) { if (!ours && chain !~ /^KUBE-(SVC|SVL|SEP)-/) tell(file " removes " chain) }
    else if ($1 != "-D" || !ours) { line = $0; sub(/^-I /, "-A ", line); need(family " " table " " line, $0) }
}
what == "commands" && !/^(#|$)/ {
    if ($4 != "kube-proxy") tell(file ": " $0)
    else if ($2 == "chain" && NF == 5 && $1 ~ /^(add|flush|delete)$/ && $5 ~ /^(external|gen)-/) next
    else if ($1 ~ /^(delete|flush)$/ && $2 ~ /^(element|set|map)$/ && $5 ~ /^(service|no-endpoint)-(ips|nodeports|services)$/) next
    else need($0, $0)
}
what == "allow" { line = substr($0, 2); if (line in wanted) allowed[line] = /^\+/ }
what == "servers" && NF && !/^#/ { need("server " $2 " " $3, "real servers of " $2 " " $3) }
what == "virtual" && /^-[AD] / { line = "server " $2 " " $3; if (line in wanted) allowed[line] = $1 == "-A" }
what ~ /^(come|had)$/ && !(frame() && !/^\*/) && !/^-A KUBE-POSTROUTING .* -m set --match-set KUBE-(6-)?LOOP-BACK dst,dst,src -j MASQUERADE$/ {
    if (/^:KUBE-POSTROUTING /) { post[what, file] = "" ; if (what == "come") rewritten[file] = 1 }
    else if (/^-A KUBE-POSTROUTING /) post[what, file] = post[what, file] "\n" $0
    else if (what == "come" && kind == "Bundle") come[file, ++count[file]] = $0
    else if (what == "come" && !frame()) tell(file ": " $0)
    else if (what == "had" && kind == "Bundle" && taken != "" && !frame()) tell(file " was changed by a delta, and a whole bundle is compared with the last whole one")
    else if (what == "had" && kind == "Bundle" && taken == "" && come[file, ++had[file]] != $0) tell(file " has another line than: " $0)
}
END {
    for (i = 1; i <= n; i++) if (!allowed[key[i]]) { tell("not approved: " said[i]); break }
    for (file in count) if (count[file] != had[file]) tell(file " has more or fewer lines than the applied one")
    for (file in rewritten) if (post["come", file] != post["had", file]) tell(file " has other rules in KUBE-POSTROUTING")
    if (told != "") print told
}
