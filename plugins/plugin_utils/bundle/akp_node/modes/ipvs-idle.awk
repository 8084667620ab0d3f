# Real servers that leave: pass=leaving lines "OPTION SERVER REAL TOLD", pass=look what ipvsadm -Ln prints. At the end idle has a line
# "-d ..." for each that can go, and those that wait for the end of their TCP connections are printed. Ends with 3, and prints the
# reason, if one still gets new connections.
function refuse(code, text) { print text; failed = code; exit code }
pass == "leaving" { leaves[$1 " " $2, $3]; next }
pass == "look" {
    if ($1 != "->") server = $1 == "TCP" ? "-t " $2 : ""
    else if ((server, $2) in leaves) { weight[server, $2] = $4; busy[server, $2] = $5 + $6 }
    next
}
END {
    if (failed) exit failed
    for (key in leaves) {
        split(key, part, SUBSEP)
        if (part[1] in gone || part[1] ~ /^-t / && !(key in weight)) continue
        if (weight[key] > 0) refuse(3, "real server " part[2] " of " part[1] " still gets connections")
        if (busy[key]) drains = drains part[1] " " part[2] " 1\n"
        else idle = idle "-d " part[1] " -r " part[2] "\n"
    }
    printf "%s", drains
}
