# Turn what nftables-diff.awk, which stands before, says is to be done, and the wanted facts (pass 3), into transactions in the directory out:
#   stage.*   chains that nothing leads to yet, and their sets, if there are many
#   switch    what changes what happens to packets, markers included
#   unstage   takes back what was staged
#   drop      chains that the switch emptied: up to Linux 6.1 a chain counts as used while the element that led to it is being deleted
#   witness   FAMILY NAME of a chain that is there once the switch is: the marker, or, if that was there before, a chain for that
function emit(text) {
    if (!staged) { print text > SWITCH; return }
    if (++lines > CHUNK) { close(STAGE); STAGE = sprintf("%s/stage.%04d", out, ++chunk); lines = 1 }
    print text > STAGE
}
BEGIN { STAGE = out "/stage.0000"; SWITCH = out "/switch"; DROP = out "/drop"; UNSTAGE = out "/unstage"; printf "" > SWITCH }
!planned++ {
    plan()
    for (i in todo) if (split(i, part, SUBSEP) && part[1] == "anew") print "delete table " part[2] " kube-proxy" > SWITCH
    for (i = 1; i <= nless; i++) print less[i] > SWITCH
}
{
    what = need[$1, $2, $3]
    staged = fresh > 300 && what == "new" && (index($3, "/") || $2 != "chain" && ("table", $1) in todo)
    if (("anew", $1) in todo) what = "new"; else if ($4 == "E") next
    text = $2 " " $1 " kube-proxy " $3
}
$3 ~ /^gen-/ && proof == "" && tasks {
    proof = $1 " " witness
    print "add chain " $1 " kube-proxy " witness > SWITCH
    print "delete chain " $1 " kube-proxy " witness > DROP
}
what == "" { next }
$4 == "R" { emit("add rule " $1 " kube-proxy " $3 " " $5); next }
$4 == "E" { emit("add element " $1 " kube-proxy " $3 " { " $5 " }"); next }
what == "set" { emit("flush " text); next }
$2 == "table" { emit("add table " $1 " kube-proxy " $5); next }
{
    emit("add " text ($5 == "" ? "" : " " $5))
    if (staged && !(("table", $1) in todo)) { made[++nmade] = text; how[nmade] = "add " text " " $5 ($2 == "chain" ? "\nflush " text : "") }
}
END {
    staged = 0
    for (i = 1; i <= nmore; i++) emit(more[i])
    for (i = 1; i <= ngone; i++) if (gone[i] ~ /^chain/ && gone[i] !~ / gen-/) { emit("flush " gone[i]); print "delete " gone[i] > DROP }
    for (i = 1; i <= ngone; i++) if (gone[i] !~ /^chain/ || gone[i] ~ / gen-/) emit("delete " gone[i])
    for (i in todo) {
        split(i, part, SUBSEP)
        if (part[1] == "leave") emit("delete table " part[2] " kube-proxy")
        if (part[1] == "table") print "add table " part[2] " kube-proxy\ndelete table " part[2] " kube-proxy" > UNSTAGE
    }
    # Made and flushed first, as not all of it may have been loaded.
    for (i = 1; i <= nmade; i++) print how[i] > UNSTAGE
    for (i = 1; i <= nmade; i++) print "delete " made[i] > UNSTAGE
    print proof > (out "/witness")
}
