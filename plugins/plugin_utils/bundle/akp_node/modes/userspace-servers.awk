# What has to be said to HAProxy so that it has the servers of the second file in place of those of the first: "-PROXY ENDPOINT" and
# "+PROXY ENDPOINT". Exit 1 if something else differs: then only a reload will do.
/^ *description / || /^#/ { next }
/^listen / { block = $2 }
$1 == "server" && block != "" {
    if (pass == "old") had[block " " $3]
    else if ((block " " $3) in had) delete had[block " " $3]
    else print "+" block " " $3
    next
}
pass == "old" { line[++n] = $0; next }
line[++m] != $0 { bad = 1 }
END {
    for (key in had) print "-" key
    exit bad || n != m
}
