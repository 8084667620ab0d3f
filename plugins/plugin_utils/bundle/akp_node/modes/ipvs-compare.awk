# Compares the kernel with what is wanted, lines of ipvs-replay. Operands: pass=now `ipvsadm -L --timeout`, pass=conf ipvs.conf,
# pass=have FILES, pass=want FILES, pass=gone lines "-D OPTION SERVER" of virtual servers that go.
# Writes what comes to out/sets.add, servers.add, addresses.add and timeouts; what goes to out/sets.del, sets.destroy and addresses.del;
# out/leaving, real servers that leave a virtual server that stays: "OPTION SERVER REAL TOLD", TOLD is 1 if it has weight 0 already;
# out/detail, every difference; out/numbers, for the answer. A set that was made in another way is built aside as KUBE-AKP-N and swapped in.
function kind_of(group) { return group ~ /^-/ ? "server" : group ~ /^KUBE-/ ? "set" : "device" }
function tell(what, name, text, quiet) { count[what]++; if (!quiet) print "{\"kind\": " quote(what) member("table", TABLE[k]) ", \"name\": " quote(name) member("value", text) "}" > (out "/detail") }
function put(step, line) { print line > (out "/" FILE[k] "." step) }
BEGIN {
    TABLE["set"] = "ipset"; ITEM["set"] = "entry"; FILE["set"] = "sets"
    TABLE["server"] = "ipvs"; ITEM["server"] = "endpoint"; FILE["server"] = "servers"
    TABLE["device"] = "address"; ITEM["device"] = "address"; FILE["device"] = "addresses"
}
pass == "now" { if (match($0, /[0-9]+ [0-9]+ [0-9]+$/)) split(substr($0, RSTART), now, " "); next }
pass == "conf" {
    if (!/^timeouts /) next
    split($0, t, " ")
    differ = 0
    for (i = 1; i <= 3; i++) if (t[i + 1] > 0 && t[i + 1] != now[i]) differ = 1
    k = "server"
    if (differ) { print substr($0, 10) > (out "/timeouts"); tell("timeouts", "", substr($0, 10)) }
    next
}
{ if ($1 != group) { group = $1; k = kind_of($1) } }
pass == "gone" { tell("extra-server", substr($0, 4), ""); next }
$1 ~ /^KUBE-AKP-/ { if (pass == "have" && $2 == "") put("add", "destroy " $1); next }
pass == "have" { if ($2 == "") have[$1] = $3; else item[$1, $2] = $3; next }

$2 == "" {
    want[$1] = 1
    if (!($1 in have)) {
        tell("missing-" k, $1, $3)
        put("add", k == "server" ? "-A " $1 " " $3 : k == "set" ? "create " $1 " " $3 : "link add " $1 " type dummy")
    } else if (have[$1] != $3) {
        tell("changed-" k, $1, have[$1])
        if (k == "set") aside[$1] = "KUBE-AKP-" ++n
        put("add", k == "server" ? "-E " $1 " " $3 : "create " aside[$1] " " $3)
    }
    next
}
{
    known = ($1, $2) in item
    other = known && item[$1, $2] != $3
    if (!known) tell("missing-" ITEM[k], $1, $2, !($1 in have))
    else if (other) tell("changed-" ITEM[k], $1, $2 " " item[$1, $2])
    if ($1 in aside) put("add", "add " aside[$1] " " $2)
    else if (!known || other) put("add", k == "server" ? (known ? "-e " : "-a ") $1 " -r " $2 " " $3 : k == "set" ? "add " $1 " " $2 : "addr add " $2 " dev " $1)
    delete item[$1, $2]
}

END {
    for (key in item) {
        split(key, part, SUBSEP)
        group = part[1]; name = part[2]; k = kind_of(group)
        told = k == "server" && item[key] ~ /-w 0$/
        if (!told && (k != "server" || group in want)) tell("extra-" ITEM[k], group, name, !(group in want))
        if (!(group in want)) continue
        if (group in aside) put("add", "add " aside[group] " " name)
        if (k == "server") print group " " name " " told > (out "/leaving")
        else put("del", k == "set" ? "del " group " " name : "addr del " name " dev " group)
    }
    k = "set"
    for (set in aside) put("add", "swap " set " " aside[set] "\ndestroy " aside[set])
    for (group in have) if (!(group in want)) {
        k = kind_of(group)
        if (k == "device") put("del", "link del " group)
        if (k == "set") { put("destroy", "destroy " group); tell("extra-set", group, "") }
    }
    n = split("missing-set changed-set extra-set missing-entry extra-entry missing-server changed-server extra-server missing-endpoint changed-endpoint extra-endpoint missing-address extra-address", what, " ")
    for (i = 1; i <= n; i++) printf "%d ", count[what[i]] > (out "/numbers")
    print "" > (out "/numbers")
}
