# Print "COUNT DST DPORT REPLY-SRC REPLY-SPORT" for the UDP flows of a conntrack listing (pass flows) that the frontends of family fam in
# the files before disown: lines of conntrack.udp, where a - takes one back and a + adds it.
pass != "flows" {
    text = $0
    if (sub(/^-/, "", text)) delete lines[text]; else { sub(/^\+/, "", text); lines[text] = 1 }
    next
}
FNR == 1 {
    for (text in lines) {
        split(text, word, " ")
        if (word[1] != fam || word[2] == "*" && word[4] == "-") continue
        front[word[2], word[3]] = 1
        n = split(word[4], reply, ","); any = word[4] ~ /^[*]/
        for (i = 1; i <= n; i++) good[word[2], word[3], reply[i]] = 1
    }
}
$1 == "udp" {
    n = 0
    for (i = 2; i <= NF; i++) if ($i ~ /^(src|dst|sport|dport)=/) v[++n] = substr($i, index($i, "=") + 1)
    if (n < 8) next
    from = (any ? "*" : fam == "ipv6" ? "[" v[5] "]" : v[5]) ":" v[7]
    if ((v[2], v[4]) in front && !((v[2], v[4], from) in good) || ("*", v[4]) in front && !(("*", v[4], from) in good)) stale[v[2] " " v[4] " " v[5] " " v[7]]++
}
END { for (key in stale) print stale[key], key }
