# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Automation
# The signer called automation is no approver. Its signature alone is enough for a change of endpoints: what is
# served, under which addresses and ports, stays what an approver signed. That is looked up in two places, in what
# the bundle says of itself (services.jsonl) and in what its rules do: every destination that they know must be one
# that the applied bundle serves.

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
    why=$(foreign_destination "$old/services.jsonl")
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

# The first destination in the rules of $bundle that no line of the services.jsonl $1 allows, in words.
foreign_destination() {
    set -- "$1"
    for name in iptables.rules ip6tables.rules nftables.nft ipvs.rules ipset.rules ip.batch; do
        [ ! -s "$bundle/$name" ] || set -- "$@" "$bundle/$name"
    done
    [ $# -gt 1 ] || return 0
    awk '
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
        function allow(address, port) { ok[address " " port] = 1; address_ok[address] = 1 }
        function need(address, port) {
            if (found || (address " " port) in ok) return
            # In ipvs mode node ports are virtual servers of the addresses of the node.
            if (file == "ipvs.rules" && ("* " port) in ok) return
            found = 1
            print "its rules know the destination " (address == "*" ? "node port" : address) " " port ", which the applied bundle does not serve"
        }
        FNR == 1 { file = FILENAME; sub(/.*\//, "", file) }
        file == "services.jsonl" {
            where = text($0, "clusterIP")
            port = where; sub(/.*:/, "", port)
            address = substr(where, 1, length(where) - length(port) - 1); gsub(/[][]/, "", address)
            allow(address, port)
            n = split(list($0, "externalIPs") " " list($0, "loadBalancerIPs"), ips, " ")
            for (i = 1; i <= n; i++) allow(ips[i], port)
            if (number($0, "nodePort") != "") allow("*", number($0, "nodePort"))
            if (number($0, "healthCheckNodePort") != "") allow("*", number($0, "healthCheckNodePort"))
            next
        }
        found { next }
        file ~ /tables\.rules$/ {
            if (!match($0, / --dport [0-9]+/)) next
            port = substr($0, RSTART + 9, RLENGTH - 9)
            address = "*"
            if (match($0, / -d [0-9a-f.:]+\/(32|128) /)) { address = substr($0, RSTART + 4, RLENGTH - 5); sub(/\/.*/, "", address) }
            need(address, port)
            next
        }
        file == "nftables.nft" && $1 " " $2 == "add element" {
            if ($5 ~ /^(service-ips|no-endpoint-services|firewall-ips)$/) need($7, $11)
            else if ($5 ~ /^(service-nodeports|no-endpoint-nodeports)$/) need("*", $9)
            else if ($5 == "cluster-ips" && !($7 in address_ok)) need($7, "any port")
            next
        }
        file == "ipvs.rules" && $1 == "-A" {
            port = $3; sub(/.*:/, "", port)
            address = substr($3, 1, length($3) - length(port) - 1); gsub(/[][]/, "", address)
            need(address, port)
            next
        }
        file == "ipset.rules" && $1 == "add" && $2 !~ /LOOP-BACK/ {
            n = split($3, part, ",")
            if (n > 1) { port = part[2]; sub(/.*:/, "", port); need($2 ~ /NODE-PORT/ ? "*" : part[1], port) }
            else if ($2 ~ /NODE-PORT/) need("*", $3)
            else if (!($3 in address_ok)) need($3, "any port")
            next
        }
        file == "ip.batch" {
            for (i = 1; i < NF; i++) if ($i == "add") { address = $(i + 1); sub(/\/.*/, "", address); if (address ~ /[.:]/ && !(address in address_ok)) need(address, "any port") }
        }' "$@"
}

