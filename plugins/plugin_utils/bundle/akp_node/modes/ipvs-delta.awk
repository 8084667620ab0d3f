# Splits a delta into the files of a plan, and prints the real servers that leave, as ipvs-idle, which stands before, does for those
# that leave already. Operands after its own: pass=known ipvs-1-frontends.rules of the record, pass=delta the files of the delta.
# Ends with 9 if a line names a virtual server that is not ours, with 3 if a set is made anew.
function put(file, line) { print line > (out "/" file) }
function later(what, line) { rest[what] = rest[what] line "\n" }
pass == "known" {
    if ($1 == "-A") known[$2 " " $3] = 1
    else if ($1 == "-D") delete known[$2 " " $3]
    next
}
$1 == "create" || $1 == "destroy" { refuse(3, "set " $2 " is made in another way, which takes a whole bundle") }
# Endpoints go with those that come, in one call of a tool; frontends go at the end.
$1 == "del" && $2 ~ /LOOP-BACK$/ { later("sets", $0) }
$1 == "del" && $2 !~ /LOOP-BACK$/ { put("sets.del", $0) }
$1 == "add" { put("sets.add", $0) }
$1 == "addr" { put("addresses." $2, $0) }
$1 == "timeouts" { put("timeouts", $2 " " $3 " " $4) }
/^-/ {
    server = $2 " " $3
    if ($1 == "-A") known[server] = 1
    else if (!(server in known)) refuse(9, substr(FILENAME, match(FILENAME, /[^\/]*$/)) " line " FNR ": virtual server " server " is not one of the approved ones")
    if ($1 == "-a" && (server, $5) in leaves) { delete leaves[server, $5]; sub(/^-a/, "-e") }
    if ($1 == "-D") { gone[server] = 1; put("servers.del", $0) }
    else if ($1 != "-d") put("servers.add", $0)
    else if (server in gone) next
    # It gets no new TCP connections, and the next run deletes it if it is idle then.
    else if ($2 == "-t") { later("servers", "-e " server " -r " $5 " -m -w 0"); drains = drains server " " $5 " 1\n" }
    else later("servers", $0)
}
END {
    printf "%s", rest["sets"] > (out "/sets.add")
    printf "%s", rest["servers"] idle > (out "/servers.add")
}
