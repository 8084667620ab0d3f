# A file of HAProxy (pass file) with the servers that the file before takes out (PROXY ENDPOINT -) and puts in (PROXY ENDPOINT +). That
# file is sorted: servers stay in the order of bytes, as in a whole bundle.
pass != "file" {
    one[$1, ++count[$1]] = $2
    sign[$1, $2] = $3
    next
}
# Print what comes before endpoint `before`, or all that is left of it.
function come(before,   name, next_one) {
    while (at[block] < count[block]) {
        next_one = name = one[block, at[block] + 1]
        if (before != "" && next_one "" >= before "") return
        at[block]++
        gsub(/[][]/, "", name)
        if (sign[block, next_one] == "+") print "    server " name " " next_one
    }
}
FNR == 1 { block = "" }
!/^ / { if (block in count) come(""); block = "" }
/^listen / { block = $2 }
block in count && $1 == "server" {
    come($3)
    if (sign[block, $3] == "-") next
    sign[block, $3] = "="
}
{ print }
END { if (block in count) come("") }
