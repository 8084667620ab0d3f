# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Automation
# The signer called automation is no approver. Its signature alone is enough for a change of endpoints: what is
# served, under which addresses and ports, stays what an approver signed. That is looked up in two places, in what
# the bundle says of itself (services.jsonl) and in what its rules do: every destination that they know must be one
# that the applied bundle serves, and a rule that packets meet whatever their destination must be one that it has.

# Is the bundle that was opened such a change? Otherwise refuse (2).
automation_suffices() {
    [ -n "$r_generation" ] || die 2 "a first bundle needs an approver: the release is signed by automation alone"
    automated=$r_generation
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
    else
        [ -f "$bundle/services.jsonl" ] || beyond_endpoints "it does not say what it serves"
    fi
    for ask in foreign_frontend foreign_health_check foreign_destination; do
        why=$("$ask" "$old") || die 3 "what changes cannot be told from endpoints (is ${TMPDIR:-/tmp} full?)"
        [ -z "$why" ] || beyond_endpoints "$why"
    done
}

automated=    # the generation on which automation's signature was found to be enough
# Another run may have been first. Asked under the lock.
automation_still_suffices() { [ -z "$automated" ] || [ "$automated" = "$r_generation" ] || automation_suffices; }

beyond_endpoints() { die 2 "the release is signed by automation alone, which may change endpoints only: $1; an approver has to sign it"; }

# awk: a line of services.jsonl without its endpoints, which come last.
AWK_FRONTEND='
function frontend(line,   i) {
    i = index(line, ",\"endpoints\":["); if (i) line = substr(line, 1, i - 1) "}"
    i = index(line, ",\"localEndpoints\":["); if (i) line = substr(line, 1, i - 1) "}"
    return line
}
'

# The first service port that comes or goes with the bundle, in words. $1 is the applied one.
foreign_frontend() {
    change=$bundle/services.jsonl
    if [ "$kind" = Delta ]; then change=$bundle/services.jsonl.diff; fi
    [ "$kind" != Delta ] || [ -e "$change" ] || return 0
    awk -v kind="$kind" "$AWK_FRONTEND"'
        function tell(text) { print text; told = 1; exit }
        pass == 1 { line[$0] = 1; f = frontend($0); old[f] = 1; next }
        kind == "Delta" && /^-/ {
            # One that was made up could be given any endpoints, and count as served from then on.
            if (!(substr($0, 2) in line)) tell("the applied bundle does not serve " substr($0, 2) ", which would go")
            gone[frontend(substr($0, 2))] = 1
            next
        }
        { f = frontend(kind == "Delta" ? substr($0, 2) : $0); come[f] = 1; if (!(f in old)) tell("it serves " f) }
        END {
            if (told) exit
            if (kind == "Delta") for (f in come) if (!(f in gone)) tell("it serves " f " a second time")
            if (kind != "Delta") for (f in old) gone[f] = 1
            for (f in gone) if (!(f in come)) tell("it no longer serves " f)
        }' pass=1 "$1/services.jsonl" pass=2 "$change"
}

# The first difference in where health checks are answered and for whom; how many endpoints there are, and whether the Node
# is to stay, may change.
foreign_health_check() {
    [ "$kind" != Delta ] || [ -e "$bundle/health.conf" ] || return 0
    set -- "$1/health.conf" "$bundle/health.conf"
    [ -e "$1" ] || set -- /dev/null "$2"
    [ -e "$2" ] || set -- "$1" /dev/null
    awk '
        /^#/ || /^eligible / { next }
        /^check / { sub(/ [0-9]+$/, "") }
        pass == 1 { old[$0] = 1; next }
        !($0 in old) { print "the applied bundle has no health check: " $0; told = 1; exit }
        { seen[$0] = 1 }
        END { if (!told) for (text in old) if (!(text in seen)) { print "it lacks the health check: " text; exit } }' \
        pass=1 "$1" pass=2 "$2"
}

# The first thing in the rules of $bundle that claims what the bundle $1, with its services.jsonl, does not serve, or that all
# packets meet in the one and not in the other, in words. Chains that belong to a Service are met by its packets only.
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
    awk -v mode="$mode" -v kind="$kind" "$AWK_FRONTEND"'
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
            if (!new || found || (address " " proto " " port) in ok) return
            # In ipvs mode node ports are virtual servers of the addresses of the node.
            if (file == "ipvs.rules" && ("* " proto " " port) in ok && address in served) return
            found = 1
            print "its rules know the destination " (address == "*" ? "node port" : address) " " port (port ~ /^[0-9]/ ? " " proto : "") ", which the applied bundle does not serve"
        }
        function need_address(address) { if (!(address in address_ok)) need(address, "", "any port") }
        # A line for all packets, of the chain or set that $1 names.
        function common(name,   key) {
            key = file " " table $0
            if (!new) { had[key] = file " " table name; return }
            kept[key] = 1
            if (found || key in had) return
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
            # What stands behind the endpoints nobody approved.
            $0 = frontend($0)
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
        found { next }
        file ~ /tables\.rules$/ {
            if (/^\*/) table = $1 " "
            # A delta writes whole chains.
            if (new && /^:/) rewritten[file " " table substr($1, 2)] = 1
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
            # In ipvs mode the guard knows each rule that there can be; which of them there are depends on endpoints.
            else if ($2 !~ /^KUBE-(SVC|SVL|SEP|EXT|FW)-/ && mode != "ipvs") common($2)
            next
        }
        file == "nftables.nft" {
            if ($4 != "kube-proxy" || $1 != "add" && $1 != "delete" && $1 != "flush") next
            table = $3 " "
            if ($1 != "add") { if (new) rewritten[file " " table ($2 == "table" ? "" : $5)] = 1 }
            else if ($2 == "table") next
            else if ($2 != "element") { if ($5 !~ /\// || / hook /) common($5) }
            else if ($5 ~ /^(service-ips|no-endpoint-services|firewall-ips)$/) need($7, $9, $11)
            else if ($5 ~ /^(service-nodeports|no-endpoint-nodeports)$/) need("*", $7, $9)
            else if ($5 == "cluster-ips") need_address($7)
            else if ($5 != "hairpin-connections") common($5)
            next
        }
        file == "ipvs.rules" && $1 == "-A" {
            server($2, $3)
            if (new) need(address, proto, port); else served[address] = 1
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
        }
        END {
            if (found) exit
            for (key in had) {
                split(key, word, " ")
                of_table = word[1] " " word[2] " "
                if (key in kept || kind == "Delta" && !(had[key] in rewritten) && !(of_table in rewritten)) continue
                print "it lacks what the applied bundle has for all packets: " substr(key, length(of_table) + 1)
                exit
            }
        }' "$@"
}
