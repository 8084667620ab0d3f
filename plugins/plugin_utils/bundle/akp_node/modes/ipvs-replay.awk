# What files lead to, one after the other: those of a bundle and its deltas, or what ipset save, ipvsadm -Sn and ip -o addr print.
# Prints GROUP, ITEM and TEXT with tabs between: a set and its entries, a virtual server and its real servers, the device and its
# addresses. ITEM is empty in the first line of a group. Ends with 9 if a real server has no virtual server.
function open(group, text) { if (!(group in head)) order[++n] = group; head[group] = text }
function come(group, name, text) {
    if (!((group, name) in at)) { at[group, name] = ++count[group]; item[group, count[group]] = name }
    value[group, name] = text
}
function go(group, name) {
    if (!((group, name) in at)) return
    delete item[group, at[group, name]]
    delete at[group, name]
}
function shut(group,   i) {
    for (i = 1; i <= count[group]; i++) if ((group, i) in item) go(group, item[group, i])
    count[group] = 0
    delete head[group]
}
$1 == "add" || $1 == "del" {
    if ($2 != set) { set = $2; mine = our_set(set) }
    if (!mine) next
    if ($1 == "add") come(set, $3, ""); else go(set, $3)
    next
}
$1 == "create" && our_set($2) {
    text = $3
    for (i = 4; i <= NF; i++) if ($i == "hashsize" || $i == "bucketsize" || $i == "initval") i++; else text = text " " $i
    open($2, text)
}
/^-/ && ($2 == "-t" || $2 == "-u" || $2 == "--sctp-service") {
    group = $2 " " $3
    if ($1 == "-a" || $1 == "-d") {
        if (!(group in head)) { print substr(FILENAME, match(FILENAME, /[^\/]*$/)) " line " FNR ": there is no virtual server " group > "/dev/stderr"; stray = 9; exit }
        if ($1 == "-a") come(group, $5, substr($0, length(group) + length($5) + 9)); else go(group, $5)
    } else if ($1 == "-D") shut(group)
    else open(group, substr($0, length(group) + 5))
    next
}
$1 == "link" { open("kube-ipvs0", "dummy") }
$1 == "addr" { if ($2 == "add") come("kube-ipvs0", $3, ""); else go("kube-ipvs0", $3) }
($3 == "inet" || $3 == "inet6") && $4 !~ /^fe[89ab].:/ { come("kube-ipvs0", $4, "") }
END {
    if (stray) exit stray
    for (k = 1; k <= n; k++) if ((group = order[k]) in head) {
        print group "\t\t" head[group]
        for (i = 1; i <= count[group]; i++) if ((group, i) in item) print group "\t" item[group, i] "\t" value[group, item[group, i]]
        delete head[group]
    }
}
