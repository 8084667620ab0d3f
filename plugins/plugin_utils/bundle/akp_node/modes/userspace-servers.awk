# What HAProxy has to be told, a command a line, so that it has the servers of the second file in place of those of the first. Exit 1
# if something else differs: then only a reload will do. A server that still has connections stays, without getting new ones.
/^ *description / || /^#/ { next }
/^listen / { block = $2 }
$1 == "server" && block != "" {
    if (pass == "old") had[block "/" $2] = $3
    else {
        have[block "/" $2]
        if (!((block "/" $2) in had)) {
            print "add server " block "/" $2 " " $3 " " check
            print "enable health " block "/" $2
            print "enable server " block "/" $2
        } else if (had[block "/" $2] != $3) bad = 1
    }
    next
}
$1 == "default-server" { check = $0; sub(/^ *default-server /, "", check) }
pass == "old" { line[++n] = $0; next }
line[++m] != $0 { bad = 1 }
END {
    for (key in had) if (!(key in have)) { print "disable server " key; print "del server " key }
    exit bad || n != m
}
