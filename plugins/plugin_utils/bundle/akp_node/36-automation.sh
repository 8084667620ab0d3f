# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Automation
# The signer called automation is no approver. Its signature alone is enough for a change of endpoints: what is
# served, under which addresses and ports, stays what an approver signed. That is looked up in two places, in what
# the bundle says of itself (services.jsonl) and in what its rules do: every destination that they know must be one
# that the applied bundle serves, and a rule that packets meet whatever their destination must be one that it has.

# Is the bundle that was opened such a change? Otherwise refuse (2).
automation_suffices() {
    [ -n "$r_generation" ] || die 2 "a first bundle needs an approver: the release is signed by automation alone"
    settle
    recorded_bundle
    old=$recorded
    [ -n "$old" ] || die 2 "the applied bundle is not kept here any more: a release that is signed by automation alone is not enough"
    settled=
    [ "$r_mode" = "$mode" ] || beyond_endpoints "the mode is another"
    for name in sysctls.conf nfacct.rules; do
        [ ! -e "$bundle/$name" ] || cmp -s "$bundle/$name" "$old/$name" || beyond_endpoints "$name is another"
    done
    if [ "$kind" = Delta ]; then
        [ "$base" = "$r_generation" ] || return 0    # it will not be taken anyway
        why=$(frontends_of_diff "$bundle/services.jsonl.diff")
    else
        [ -f "$bundle/services.jsonl" ] || beyond_endpoints "it does not say what it serves"
        why=$(awk "$AWK_FRONTEND"'
            pass == 1 { old[frontend($0)] = 1; next }
            { f = frontend($0); if (!(f in old)) { print "it serves " f; exit } seen[f] = 1 }
            END { for (f in old) if (!(f in seen)) { print "it no longer serves " f; exit } }' \
            pass=1 "$old/services.jsonl" pass=2 "$bundle/services.jsonl")
    fi
    [ -z "$why" ] || beyond_endpoints "$why"
    why=$(foreign_destination "$old")
    [ -z "$why" ] || beyond_endpoints "$why"
}

beyond_endpoints() { die 2 "the release is signed by automation alone, which may change endpoints only: $1; an approver has to sign it"; }

# awk: a line of services.jsonl without its endpoints, which come last.
AWK_FRONTEND='
function frontend(line,   i) {
    i = index(line, ",\"endpoints\":["); if (i) line = substr(line, 1, i - 1) "}"
    i = index(line, ",\"localEndpoints\":["); if (i) line = substr(line, 1, i - 1) "}"
    return line
}
'

# Lines that go and lines that come name the same frontends.
frontends_of_diff() {
    [ -s "$1" ] || return 0
    awk "$AWK_FRONTEND"'
        { f = frontend(substr($0, 2)) }
        /^-/ { gone[f] = 1 }
        /^\+/ { come[f] = 1 }
        END {
            for (f in come) if (!(f in gone)) { print "it serves " f; exit }
            for (f in gone) if (!(f in come)) { print "it no longer serves " f; exit }
        }' "$1"
}

# The first thing in the rules of $bundle that claims what the bundle $1, with its services.jsonl, does not serve, in words.
# Chains that belong to a Service are met by its packets only, so what counts are the chains, maps and sets that all meet.
foreign_destination() {
    applied=$1
    set -- "$applied/services.jsonl"
    for name in iptables.rules ip6tables.rules nftables.nft ipvs.rules; do
        [ ! -s "$applied/$name" ] || set -- "$@" "$applied/$name"
    done
    set -- "$@" new=1
    for name in iptables.rules ip6tables.rules nftables.nft ipvs.rules ipset.rules ip.batch; do
        [ ! -s "$bundle/$name" ] || set -- "$@" "$bundle/$name"
    done
    awk -v mode="$mode" '
        function text(line, key,   i) {
            i = index(line, "\"" key "\":\""); if (!i) return ""
            line = substr(line, i + length(key) + 4)
            return substr(line, 1, index(line, "\"") - 1)
        }
        function list(line, key,   i) {
            i = index(line, "\"" key "\":["); if (!i) return ""
            line = substr(line, i + length(key) + 4)
            line = substr(line, 1, index(line, "]") - 1)
            gsub(/[",]/, " ", line)
            return line
        }
        function number(line, key) { return match(line, "\"" key "\":[0-9]+") ? substr(line, RSTART + length(key) + 3, RLENGTH - length(key) - 3) : "" }
        function allow(address, proto, port) { ok[address " " proto " " port] = 1; address_ok[address] = 1 }
        function need(address, proto, port) {
            if (found || (address " " proto " " port) in ok) return
            # In ipvs mode node ports are virtual servers of the addresses of the node.
            if (file == "ipvs.rules" && ("* " proto " " port) in ok && address in served) return
            found = 1
            print "its rules know the destination " (address == "*" ? "node port" : address) " " port (port ~ /^[0-9]/ ? " " proto : "") ", which the applied bundle does not serve"
        }
        function need_address(address) { if (!(address in address_ok)) need(address, "", "any port") }
        function need_line() {
            if (found || (file " " table $0) in had) return
            found = 1
            print "the applied bundle does not have this for all packets: " $0
        }
        # address, proto and port of a virtual server like "-t [::1]:80"
        function server(option, where) {
            proto = option == "-t" ? "tcp" : option == "-u" ? "udp" : "sctp"
            port = where; sub(/.*:/, "", port)
            address = substr(where, 1, length(where) - length(port) - 1); gsub(/[][]/, "", address)
        }
        FNR == 1 { file = FILENAME; sub(/.*\//, "", file); table = "" }
        file == "services.jsonl" {
            proto = text($0, "protocol")
            where = text($0, "clusterIP")
            port = where; sub(/.*:/, "", port)
            address = substr(where, 1, length(where) - length(port) - 1); gsub(/[][]/, "", address)
            allow(address, proto, port)
            n = split(list($0, "externalIPs") " " list($0, "loadBalancerIPs"), ips, " ")
            for (i = 1; i <= n; i++) allow(ips[i], proto, port)
            if (number($0, "nodePort") != "") allow("*", proto, number($0, "nodePort"))
            if (number($0, "healthCheckNodePort") != "") allow("*", "tcp", number($0, "healthCheckNodePort"))
            next
        }
        /^\*/ { table = $1 " " }
        !new && file == "ipvs.rules" { if ($1 == "-A") { server($2, $3); served[address] = 1 } next }
        !new { had[file " " table $0] = 1; next }
        found { next }
        file ~ /tables\.rules$/ {
            if ($1 != "-A" && $1 != "-I" || $2 == "KUBE-PROXY-GENERATION") next
            rule = $0 " "
            gsub(/"[^"]*"/, "", rule)
            port = proto = ""
            address = "*"
            if (match(rule, / --dport [0-9]+ /)) port = substr(rule, RSTART + 9, RLENGTH - 10)
            if (match(rule, / -p [a-z]+ /)) proto = substr(rule, RSTART + 4, RLENGTH - 5)
            if (match(rule, / -d [0-9a-f.:]+\/(32|128) /)) { address = substr(rule, RSTART + 4, RLENGTH - 5); sub(/\/.*/, "", address) }
            plain = port != "" && rule !~ /\\/ && rule !~ / ! (-d|-p|--dport|--dst-type) /
            if (plain && (address != "*" || $2 == "KUBE-NODEPORTS" || rule ~ / --dst-type LOCAL /)) need(address, proto, port)
            # In ipvs mode the guard knows each rule that there can be.
            else if ($2 !~ /^KUBE-(SVC|SVL|SEP|EXT|FW)-/ && mode != "ipvs") need_line()
            next
        }
        file == "nftables.nft" {
            if ($1 != "add" || $2 == "table") next
            if ($2 != "element") { if ($5 !~ /\// || / hook /) need_line() }
            else if ($5 ~ /^(service-ips|no-endpoint-services|firewall-ips)$/) need($7, $9, $11)
            else if ($5 ~ /^(service-nodeports|no-endpoint-nodeports)$/) need("*", $7, $9)
            else if ($5 == "cluster-ips") need_address($7)
            else if ($5 != "hairpin-connections") need_line()
            next
        }
        file == "ipvs.rules" && $1 == "-A" {
            server($2, $3)
            need(address, proto, port)
            next
        }
        file == "ipset.rules" && $1 == "add" && $2 !~ /LOOP-BACK/ {
            n = split($3, part, ",")
            if (n > 1) { split(part[2], word, ":"); need($2 ~ /NODE-PORT/ ? "*" : part[1], word[1], word[2]) }
            else if ($2 ~ /NODE-PORT/) need("*", $2 ~ /-UDP$/ ? "udp" : "tcp", $3)
            else need_address($3)
            next
        }
        file == "ip.batch" {
            for (i = 1; i < NF; i++) if ($i == "add") { address = $(i + 1); sub(/\/.*/, "", address); if (address ~ /[.:]/) need_address(address) }
        }' "$@"
}

