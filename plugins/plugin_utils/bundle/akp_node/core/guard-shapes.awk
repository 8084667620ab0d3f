# guard-shapes.awk (after guard-types.awk) - the tables of shapes/*.txt as trees: text, hole, text, hole, ... to an end. A state is the
# number of the edge that leads to it. Each step down a tree goes on in the line, so the time grows with the length of the line alone.
function root(name) { if (!(name in ROOT)) ROOT[name] = ++edges; return ROOT[name] }
# Add a line to the tree of state s; (a|b) is either, "X , ..." and "X,..." are lists. What comes to its end has met `must`.
function plant(s, line, must,   a, b, i, n, e, alt, type) {
    if ((a = index(line, "("))) {
        for (i = split(substr(line, a + 1, (b = index(line, ")")) - a - 1), alt, "|"); i; i--) plant(s, substr(line, 1, a - 1) alt[i] substr(line, b + 1), must)
        return
    }
    if (match(line, /KUBE-6-[A-Z-]+/) && RLENGTH > 31) line = substr(line, 1, RSTART + 30) substr(line, RSTART + RLENGTH)
    if (index(line, "...") && (match(line, /[^ ]+,[.][.][.]$/) || match(line, /[^{ ][^{]* , [.][.][.]/))) {
        a = RSTART; b = RSTART + RLENGTH; type = ++lists "L"
        SEPARATOR[type] = line ~ / , / ? " , " : ","
        plant(root(type), substr(line, a, b - a - length(SEPARATOR[type]) - 3), "")
        line = substr(line, 1, a - 1) "<" type ">" substr(line, b)
    }
    for (line = line "\n"; line != ""; line = substr(line, b + 1)) {
        if ((a = index(line, "<"))) b = index(line, ">")
        else a = (b = length(line)) + 1
        type = substr(line, a + 1, b - a - 1)
        if (!(s in STOP) || STOP[s] == "\n") STOP[s] = substr(line, 1, TYPE[s] in SEPARATOR ? 2 : 1)
        if (!(e = EDGE[s, substr(line, 1, a - 1), type])) {
            e = EDGE[s, substr(line, 1, a - 1), type] = ++edges
            TEXT[e] = substr(line, 1, a - 1); TYPE[e] = type; NEXT[e] = CHILD[s]; CHILD[s] = e
        }
        s = e
    }
    if (must != "") MUST[s] = must
}
# Does text lead from state s to an end? A line ends with a newline, which no hole holds. Edges that were used lately are tried first.
function fits(s, text,   e, before, n, i, w, type) {
    for (e = CHILD[s]; e; e = NEXT[before = e]) {
        w = TEXT[e]; n++
        if (substr(text, 1, length(w)) != w) continue
        if ((type = TYPE[e]) == "") { if (e in MUST) MET[MUST[e]] = 1; return 1 }
        w = substr(text, length(w) + 1)
        if (!(i = index(w, STOP[e]))) i = length(w)
        if (!is(type, substr(w, 1, i - 1)) || !fits(e, substr(w, i))) continue
        if (n > 2) { NEXT[before] = NEXT[e]; NEXT[e] = CHILD[s]; CHILD[s] = e }
        return 1
    }
    return 0
}
# The tables in the words of family f: each of these words, in IPv4 and in IPv6.
function translate(f,   i, n, w, text) {
    text = "<I> " (kind == "Delta" ? "C C" : "I I") " <GEN13> " short(gen) " " short(gen) " <GEN> " gen " " gen
    if (kind == "Delta") text = text " <BASE13> " short(base) " " short(base) " <BASE> " base " " base
    n = split(text " <F> ip ip6 <4> 4 6 <32> 32 128 <INET> inet inet6 <TYPE> ipv4_addr ipv6_addr <LOOPNET> 127.0.0.0/8 ::1/128 <LOOP> 127.0.0.0/8 ::1 <ICMP> icmp icmp6 <ONES> 255.255.255.255 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff KUBE-<6-> KUBE- KUBE-6- <DEST: <DEST>:< [<DEST>]:< <VIP: <VIP>:< [<VIP>]:< <ADDR: <ADDR>:< [<ADDR>]:<", w, " ")
    text = ENVIRON["SHAPES"]; gsub(/<T>/, "<F> kube-proxy", text); gsub(/<C>/, "-m comment --comment \"<COMMENT>\"", text)
    for (i = 1; i <= n; i += 3) gsub(w[i], w[i + f / 2 - 1], text)
    return text
}
# Plant what file `name` may hold in family f; false if it may not be there. Without a name: refuse a bundle that lacks a file or a line.
function tables(f, name,   i, j, k, n, m, row, w, on, file, found, table, line, must) {
    if (!(f in TABLES)) TABLES[f] = translate(f)
    n = split(TABLES[f], row, "\n")
    for (i = 1; i <= n; i++) {
        if ((line = row[i]) ~ /^== /) {
            m = split(line, w, " ")
            for (j = 2 + (on = k = 0); j <= m; j++) {
                if (w[j] ~ /:$/) k = w[j] == "both:" || w[j] == (kind == "Delta" ? "delta:" : "whole:")
                else if (sub(/^!/, "", w[j]) && k && name == "" && !(w[j] in LISTED)) lacks(w[j], "not in the bundle")
                if (k && (name == "" || w[j] == name)) { on = 1; file = w[j] }
            }
            found += on; table[m = 1] = ""
        } else if (!on || line ~ /^(#.*)?$/) continue
        else if (gsub(/^[*][(]?|[)]$/, "", line) && row[i] ~ /^[*]/) for (k = m = split(line, table, "|"); k; k--) HAS[name, table[k]] = 1
        else for (k = 1; k <= m; k++) {
            line = row[i]
            must = sub(/^!/, "", line) ? f "/" table[k] "/" line : ""
            if (name == "" && must != "" && (f in SEEN) && !(must in MET)) lacks(file, "no line: " line)
            for (j = split(index(line, "<P>") ? "tcp udp sctp" : "-", w, " "); j && name != ""; j--) {
                file = line
                gsub(/<P>/, w[j], file)
                plant(root(f "/" name "/" table[k]), file, must)
            }
        }
    }
    return found
}
