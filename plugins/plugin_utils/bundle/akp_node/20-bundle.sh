# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Bundle
bundle=       # a private copy of the bundle, so that what was checked is what is used
kind=         # Bundle, or Delta, which leads from generation $base to another
base=
mode=
node=
generation=
digest=

# Copy the bundle and verify it: manifest digest, every listed file, apiVersion, mode, node.
# After this only files in $bundle are read, and only those the manifest lists.
open_bundle() {
    dir=$1
    if [ "$dir" = - ]; then
        dir=$work/stdin
        unpack "$dir"
    fi
    [ -d "$dir" ] || die 2 "no such bundle directory: $dir"
    [ -f "$dir/manifest.json" ] || die 2 "$dir: no manifest.json"
    need sha256sum coreutils
    bundle=$work/bundle
    manifest=$dir/manifest.json
    digest='' api='' kind='' base='' mode='' node='' generation='' names='' sums='' listed='' blind=1
    manifest_values "$work/manifest" >"$work/values" || die 3 "$manifest cannot be read (is ${TMPDIR:-/tmp} full?)"
    # shellcheck source=/dev/null
    . "$work/values"
    set --
    missing=
    for name in $names; do
        if [ -f "$dir/$name" ]; then set -- "$@" "$dir/$name"; else missing=${missing:-$name}; fi
    done
    cp "$manifest" "$@" "$bundle/" || die 3 "$dir: a file cannot be copied (is ${TMPDIR:-/tmp} full?)"
    # shellcheck disable=SC2086
    actual=$(cd "$bundle" && sha256sum ../manifest $names 2>/dev/null) || :
    manifest=$bundle/manifest.json
    [ -n "$actual" ] || die 3 "the digests cannot be computed (sha256sum failed)"

    is_hex64 "$digest" || die 2 "manifest.json: no digest"
    case $actual in "$digest  ../manifest"*) ;; *) die 2 "manifest.json: the digest does not match, the file was changed" ;; esac
    [ "$api" = akp/v1 ] || die 2 "manifest.json: apiVersion \"$api\" is not known, this program reads akp/v1"
    case $kind in
        Bundle) ;;
        Delta) is_hex64 "$base" || die 2 "manifest.json: base is not 64 hex digits" ;;
        *) die 2 "manifest.json: kind \"$kind\" is not known, this program reads Bundle and Delta" ;;
    esac
    case $mode in
        iptables | ipvs | nftables) ;;
        *) die 2 "manifest.json: mode \"$mode\" is not known" ;;
    esac
    [ -z "$want_node" ] || [ "$node" = "$want_node" ] || die 2 "the bundle is for node \"$node\", this is \"$want_node\""
    is_hex64 "$generation" || die 2 "manifest.json: generation is not 64 hex digits"
    [ -n "$listed" ] || die 2 "manifest.json: the list of files is not one \"name\": \"sha256\" a line"
    [ -z "$missing" ] || die 2 "$missing: listed in the manifest but not there"
    if [ "$actual" != "$digest  ../manifest$sums" ]; then
        bad=$(printf '%s\n' "$actual" | awk -v sums="$sums" 'NR > 1 && !index(sums, $1 "  " $2) { print $2; exit }')
        die 2 "${bad:-a file of the bundle}: the digest does not match the manifest, the file was changed"
    fi
    for name in iptables.rules ip6tables.rules sysctls.conf nfacct.rules conntrack.udp nftables.nft ipset.rules ipvs.rules ip.batch ipvs.conf health.conf; do
        [ ! -e "$dir/$name" ] || [ -e "$bundle/$name" ] || die 2 "$name: not listed in the manifest"
    done
    check_release "$dir"
}

# Unpack the bundle on stdin: gzip, and in it for each file a line "== NAME LINES" and then that many
# lines; "==" alone is the end. Names are plain, so nothing can land anywhere else; and there is an end to what is read,
# whatever it was packed into.
unpack() {
    need gzip gzip
    mkdir "$1"
    case $MAX_BUNDLE in '' | *[!0-9]* | ??????*) die 2 "AKP_MAX_BUNDLE is a number of megabytes, not \"$MAX_BUNDLE\"" ;; esac
    # A line without end would take an awk forever; folded, it is one too many, and refused for that.
    if has fold; then lines='fold -b -w 4000000'; else lines='cat'; fi
    why=$(gzip -dc 2>/dev/null | head -c "${MAX_BUNDLE}000000" | $lines | awk -v dir="$1" -v limit="${MAX_BUNDLE}000000" '
        { bytes += length($0) + 1 }
        left > 0 { print > file; if (!--left) close(file); next }
        ended { trouble = 1; exit }
        /^==$/ { ended = 1; next }
        !/^== [A-Za-z0-9_][A-Za-z0-9._-]* [0-9]+$/ || seen[$2]++ || ++files > 64 || length($2) > 64 { trouble = 1; exit }
        { file = dir "/" $2; left = $3 + 0; printf "" > file; if (!left) close(file) }
        END {
            if (bytes + 0 >= limit + 0) print "is larger than " limit / 1000000 " MB (AKP_MAX_BUNDLE on the node)"
            else if (trouble || left > 0 || !ended) print "is no bundle, or was cut short"
        }') || die 3 "what came on stdin could not be unpacked (is ${TMPDIR:-/tmp} full?)"
    [ -z "$why" ] || die 2 "what came on stdin $why"
}

# The values of $manifest as assignments for the shell: nothing passes that a shell could take for more than text.
# $names are the files, $sums what sha256sum prints for them. What the digest is taken of goes to the file $1.
# An awk that sees a null byte in a line says so: then the guard sees every byte, and $blind is empty.
manifest_values() {
    awk -v text="$1" '
        BEGIN {
            probe = text ".null"
            printf "a%cb\n", 0 > probe
            close(probe)
            if ((getline line < probe) > 0 && line ~ /[^ -~]b/) print "blind="
        }
        BEGIN { want["digest"] = "digest"; want["apiVersion"] = "api"; n = split("kind base mode node generation", w, " "); for (i = 1; i <= n; i++) want[w[i]] = w[i] }
        !/^  "digest": / { print > text }
        /^  "[A-Za-z]+": "[^"\\]*",?$/ {
            split($0, part, "\"")
            if (!(part[2] in want)) next
            gsub(/[^A-Za-z0-9 ._:\/-]/, "?", part[4])
            print want[part[2]] "=\047" part[4] "\047"
            delete want[part[2]]
        }
        /^  "files": \{/ { inside = 1; listed = !/\}/; next }
        inside && /^  \}/ { inside = 0; next }
        inside {
            split($0, part, "\"")
            if ($0 !~ /^    "[A-Za-z0-9_][A-Za-z0-9._-]*": "[0-9a-f]+",?$/ || length(part[4]) != 64 || part[2] ~ /^manifest(\.json)?$/ || seen[part[2]]++) bad = 1
            names = names " " part[2]
            sums = sums "\n" part[4] "  " part[2]
        }
        END { if (listed && !inside && !bad) print "listed=1\nnames=\047" names "\047\nsums=\047" sums "\047" }' "$manifest"
}

# The string value of a top-level key in the manifest $1.
value_in() {
    while IFS= read -r line; do
        case $line in '  "'"$2"'": "'*) ;; *) continue ;; esac
        line=${line#*\": \"}
        line=${line%,}
        line=${line%\"}
        case $line in *[\"\\]*) ;; *) printf '%s' "$line" ;; esac
        return 0
    done <"$1"
}

is_hex64() {
    case $1 in *[!0-9a-f]*) return 1 ;; esac
    [ ${#1} -eq 64 ]
}

# "sha256 name" for each file listed in the manifest; fails on anything that is not a plain name.
manifest_files() {
    awk '
        /^  "files": \{$/ { inside = 1; next }
        inside && /^  \}/ { inside = 0; done = 1; next }
        inside {
            if ($0 !~ /^    "[A-Za-z0-9_][A-Za-z0-9._-]*": "[0-9a-f]+",?$/) exit 1
            split($0, part, "\"")
            if (length(part[4]) != 64 || part[2] == "manifest.json" || seen[part[2]]++) exit 1
            print part[4], part[2]
        }
        END { if (!done) exit 1 }
    ' "$manifest"
}

# The iptables file of a family, in $file; empty when the bundle has none (or an empty one).
rules_file() {
    case $1 in 4) file=$bundle/iptables.rules ;; 6) file=$bundle/ip6tables.rules ;; esac
    [ -s "$file" ] || file=
}

# ---------------------------------------------------------------- Guard
# A bundle may only do what kube-proxy does, whoever made or signed it: every line must fit one
# of the shapes below. Names, addresses and ports vary, nothing else does.

# Check all files of the bundle; end with 2, naming file, line and reason.
guard() {
    # For some awks a line ends there, for the tool that reads it next it may not.
    if [ -n "$blind" ]; then
        { cat "$bundle"/*.* >"$work/bytes" && tr -c -d '\000' <"$work/bytes" >"$work/nulls"; } || die 3 "the bundle cannot be looked at (is ${TMPDIR:-/tmp} full?)"
        [ ! -s "$work/nulls" ] || die 2 "a file of the bundle has a byte that is no text"
    fi
    "${mode}_guard"
    guard_lines services.jsonl '!/^\{.*\}$/ { refuse("not a line of JSON") }'
    guard_lines sysctls.conf '
        BEGIN { n = split(ENVIRON["SYSCTLS"], a, " "); for (i = 1; i <= n; i++) ok[a[i]] = 1 }
        /^#/ || /^$/ { next }
        !/^[a-z0-9_.]+ = [0-9]+$/ { refuse("not a line \"name = integer\": " $0) }
        !($1 in ok) { refuse("sysctl " $1 " is not one this program sets") }'
    guard_lines nfacct.rules '
        BEGIN { n = split(ENVIRON["COUNTERS"], a, " "); for (i = 1; i <= n; i++) ok[a[i]] = 1 }
        /^#/ || /^$/ { next }
        !($0 in ok) { refuse("counter \"" $0 "\" is not one this program makes") }'
    guard_lines conntrack.udp '
        /^#/ || /^$/ { next }
        /^ipv4 ([0-9.]+|\*) [0-9]+ (-|[0-9.]+:[0-9]+(,[0-9.]+:[0-9]+)*)$/ { next }
        /^ipv6 ([0-9a-f:.]+|\*) [0-9]+ (-|\[[0-9a-f:.]+\]:[0-9]+(,\[[0-9a-f:.]+\]:[0-9]+)*)$/ { next }
        { refuse("not a line \"family frontend port replies\": " $0) }'
    guard_health
}

# Run an awk program over a bundle file; its refuse() ends the run.
guard_lines() {
    [ -s "$bundle/$1" ] || return 0
    why=$(awk '
        function refuse(text) { if (!refused++) printf "line %d: %s\n", FNR, text; exit }
        /[^ -~]/ { refuse("a character that is not printable ASCII") }
        '"$2" "$bundle/$1") || die 2 "$1: cannot be checked"
    [ -z "$why" ] || die 2 "$1 $why"
}

# Check an iptables file ($2) of a family ($1): tables, chains, order, jumps, the shape of every rule.
guard_iptables() {
    [ -e "$bundle/$2" ] || return 0
    case $1 in
        4) a='[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+' host="$a\\/32" to="$a" loop='127\.0\.0\.0\/8'
           mask='255\.255\.255\.255' unreach=icmp-port-unreachable ;;
        6) a='[0-9a-f:.]+' host="$a\\/128" to="\\[$a\\]" loop='::1\/128'
           mask='ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff' unreach=icmp6-port-unreachable ;;
    esac
    net="$a\\/[0-9]+" port='[1-9][0-9]*' p='(tcp|udp|sctp)' dev='[A-Za-z0-9_.-]+\+?' bit='0x[1248]0*'
    svc="KUBE-SVC-$HASH" svl="KUBE-SVL-$HASH" ext="KUBE-EXT-$HASH" fw="KUBE-FW-$HASH" sep="KUBE-SEP-$HASH"
    no="(DROP|REJECT --reject-with $unreach)"
    low=${AKP_ACCEPT_PORTS:-1024-65535}

    guard_lines "$2" "$AWK_OWNED"'
    # Does rule r (without "-A CHAIN ", its comment match replaced by @) belong in this chain?
    function fits(t, c, r,   k) {
        k = substr(c, 1, 9)
        if (t == "nat") {
            if (k == "KUBE-SEP-") return \
                r ~ /^-s '"$host"' (@ )?-j KUBE-MARK-MASQ$/ || \
                r ~ /^-p '"$p"' (@ )?(-m recent --set --name '"$sep"' --mask '"$mask"' --rsource )?-m '"$p"' -j DNAT --to-destination '"$to:$port"'$/
            if (k == "KUBE-SVC-" || k == "KUBE-SVL-") return \
                r ~ /^(@ )?(-m statistic --mode random --probability 0\.[0-9]+ )?-j '"$sep"'$/ || \
                r ~ /^(! -s '"$net"' )?-d '"$host"' (! -i '"$dev"' )?-p '"$p"' @ -m '"$p"' --dport '"$port"' -j KUBE-MARK-MASQ$/ || \
                r ~ /^(@ )?-m recent --rcheck --seconds [0-9]+ --reap --name '"$sep"' --mask '"$mask"' --rsource -j '"$sep"'$/
            if (k == "KUBE-EXT-") return \
                r ~ /^@ -j KUBE-MARK-MASQ$/ || \
                r ~ /^-j ('"$svc|$svl"')$/ || \
                r ~ /^(-s '"$net"'|-i '"$dev"') @ -j '"$svc"'$/ || \
                r ~ /^@ -m addrtype --src-type LOCAL -j (KUBE-MARK-MASQ|'"$svc"')$/
            if (k == "KUBE-FW-" substr(c, 9, 1)) return \
                r ~ /^-s '"$net"' @ -j '"$ext"'$/ || \
                r == "@"
            if (c == "KUBE-SERVICES") return \
                r ~ /^-d '"$host"' -p '"$p"' @ -m '"$p"' --dport '"$port"' -j ('"$svc|$svl|$ext|$fw"')$/ || \
                r ~ /^(! -d '"$loop"' )?@ -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS$/ || \
                r ~ /^-d '"$host"' @ -j KUBE-NODEPORTS$/
            if (c == "KUBE-NODEPORTS") return \
                r ~ /^(-d '"$loop"' )?-p '"$p"' @ -m '"$p"' --dport '"$port"' (-m nfacct --nfacct-name localhost_nps_accepted_pkts )?-j '"$ext"'$/
            if (c == "KUBE-POSTROUTING") return \
                r ~ /^-m mark ! --mark '"$bit\\/$bit"' -j RETURN$/ || \
                r ~ /^-j MARK --set-xmark '"$bit"'\/0x0$/ || \
                r == "@ -j MASQUERADE --random-fully"
            if (c == "KUBE-MARK-MASQ") return \
                r ~ /^-j MARK --set-xmark '"$bit\\/$bit"'$/
        }
        if (t == "filter") {
            if (c == "KUBE-SERVICES") return \
                r ~ /^-d '"$host"' -p '"$p"' @ -m '"$p"' --dport '"$port"' -j '"$no"'$/
            if (c == "KUBE-EXTERNAL-SERVICES") return \
                r ~ /^-d '"$host"' -p '"$p"' @ -m '"$p"' --dport '"$port"' -j '"$no"'$/ || \
                r ~ /^-p '"$p"' @ -m addrtype --dst-type LOCAL -m '"$p"' --dport '"$port"' -j '"$no"'$/
            if (c == "KUBE-PROXY-FIREWALL") return \
                r ~ /^-d '"$host"' -p '"$p"' @ -m '"$p"' --dport '"$port"' -j DROP$/
            if (c == "KUBE-NODEPORTS") return \
                r ~ /^-p tcp @ -m tcp --dport '"$port"' -j ACCEPT$/ && comment ~ / health check node port$/ && acceptable(r)
            if (c == "KUBE-FIREWALL") return \
                r == "! -s 127.0.0.0/8 -d 127.0.0.0/8 @ -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
            if (c == "KUBE-FORWARD") return \
                r ~ /^-m conntrack --ctstate INVALID (-m nfacct --nfacct-name ct_state_invalid_dropped_pkts )?-j DROP$/ || \
                r ~ /^@ -m mark --mark '"$bit\\/$bit"' -j ACCEPT$/ && comment == "kubernetes forwarding rules" || \
                r == "@ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT" && comment == "kubernetes forwarding conntrack rule"
        }
        if (c == "KUBE-PROXY-GENERATION") return r == "@" && comment == "'"$generation"'"
        return 0
    }
    # An ACCEPT for a health check port must not open a system port.
    function acceptable(r,   n) {
        match(r, /--dport [0-9]+/)
        n = substr(r, RSTART + 8, RLENGTH - 8) + 0
        return n >= LOW + 0 && n <= HIGH + 0
    }
    # Say as exactly as possible what is wrong with a rule that fits no shape.
    function reason(c, r,   i, n, w, target) {
        n = split(r, w, " ")
        for (i = 1; i <= n; i++) {
            if (w[i] == "-j" || w[i] == "-g") target = w[i + 1]
            if (w[i] ~ /^-/ && !(w[i] in OPTION)) return "option " w[i] " is not one kube-proxy uses"
            if (w[i] == "-m" && !(w[i + 1] in MATCH)) return "match " w[i + 1] " is not one kube-proxy uses"
        }
        if (target == "ACCEPT") return "ACCEPT only in the forms kube-proxy uses, for ports " LOW "-" HIGH ": " $0
        if (target ~ /^KUBE-/ && !((t, target) in declared)) return "jump to " target ", which this file does not declare"
        if (target != "" && target !~ /^KUBE-/ && !(target in TARGET)) return "target " target " is not allowed"
        if (c == "KUBE-PROXY-GENERATION") return "the marker is not the generation of the manifest"
        return "not a rule that belongs in " c ": " $0
    }
    BEGIN {
        split("'"$low"'", range, "-"); LOW = range[1]; HIGH = range[2]
        DELTA = "'"$kind"'" == "Delta"
        n = split("-s -d -i -p -m -j --comment --dport --ctstate --nfacct-name --mark --dst-type --src-type --mode --probability --rcheck --seconds --reap --name --set --mask --rsource --reject-with --set-xmark --random-fully --to-destination", w, " ")
        for (i = 1; i <= n; i++) OPTION[w[i]] = 1
        n = split("comment tcp udp sctp conntrack nfacct mark addrtype statistic recent", w, " ")
        for (i = 1; i <= n; i++) MATCH[w[i]] = 1
        n = split("DROP REJECT RETURN MARK MASQUERADE DNAT ACCEPT", w, " ")
        for (i = 1; i <= n; i++) TARGET[w[i]] = 1
    }
    /^-A / {
        if (t == "") refuse("a rule outside a table")
        c = $2
        if (c != chain) {
            if (!((t, c) in declared)) refuse(is_owned(t, c) ? "chain " c " is not declared in table " t : "chain " c " in table " t " is not ours")
            if ((t, c) in filled) refuse("the rules of chain " c " do not stand together")
            filled[t, c] = 1
            chain = c
        }
        if ($0 ~ /[@$`\047]/ || index($0, "\\")) refuse("a character no rule has: one of @ $ ` \047 \\")
        r = substr($0, length(c) + 5)
        comment = ""
        if (match(r, /-m comment --comment ("[^"]*"|[A-Za-z0-9_-]+)/)) {
            comment = substr(r, RSTART + 21, RLENGTH - 21)
            gsub(/"/, "", comment)
            if (length(comment) > 255) refuse("a comment of more than 255 characters")
            r = substr(r, 1, RSTART - 1) "@" substr(r, RSTART + RLENGTH)
        }
        if (!fits(t, c, r)) refuse(reason(c, r))
        # What a delta jumps to may be there already.
        if (match(r, /-j KUBE-[A-Z0-9-]+$/) && !((t, substr(r, RSTART + 3)) in declared)) if (!DELTA || !is_owned(t, substr(r, RSTART + 3))) refuse(reason(c, r))
        next
    }
    /^:/ {
        if (t == "") refuse("a chain outside a table")
        c = substr($1, 2)
        if (!is_owned(t, c)) refuse("chain " c " in table " t " is not ours")
        # It is loaded as it stands, and kubelet may have filled that chain.
        if (DELTA && c == "KUBE-FIREWALL") refuse("a delta does not write KUBE-FIREWALL")
        if ($0 != ":" c " - [0:0]") refuse("not a line \":CHAIN - [0:0]\": " $0)
        if ((t, c) in declared) refuse("chain " c " is declared twice")
        declared[t, c] = 1
        next
    }
    /^#/ || /^$/ { next }
    DELTA && /^-X / {
        if (NF != 2 || !((t, $2) in declared) || (t, $2) in filled) refuse("not a chain that this file empties: " $0)
        next
    }
    /^-I / {
        if (!(("'"$mode"'", t, $0) in JUMP_OF)) refuse("not a jump rule of kube-proxy in table " t ": " $0)
        n = split($0, w, " ")
        if (!((t, w[n]) in declared)) refuse("jump to " w[n] ", which this file does not declare")
        if ((t, $0) in jumped) refuse("a jump rule twice: " $0)
        jumped[t, $0] = 1
        next
    }
    /^\*(mangle|filter|nat)$/ {
        if (t != "") refuse("table " t " has no COMMIT")
        t = substr($0, 2); chain = ""
        if (t in table) refuse("table " t " appears twice")
        table[t] = 1
        next
    }
    /^\*/ { refuse("table " substr($0, 2) " is not ours") }
    /^COMMIT$/ {
        if (t == "") refuse("COMMIT outside a table")
        t = ""
        next
    }
    { refuse("not a line of a restore file: " $0) }
    END { if (t != "") refuse("table " t " has no COMMIT") }'
}

