# The files of a family as one restore text, in file out, with one transaction per table. First come the files of deltas, in order; then, after
# whole=1, those of the bundle they began with, once for each table t. The last text of a chain counts; a chain that a delta
# removed is left out. Chains that deltas touched are declared first, and their rules stand at the end.
function table_begin(   i) {
    open = t; to = out
    print "*" t > to
    for (i = 1; i <= n; i++) if (of[i] == t && (t, chain[i]) in count) print ":" chain[i] " - [0:0]" > to
}
function table_end(   i, j, key) {
    if (!open) return
    for (i = 1; i <= n; i++) {
        key = of[i] SUBSEP chain[i]
        if (of[i] != open || !(key in count)) continue
        print "# changed since" > to
        for (j = 1; j <= count[key]; j++) print rule[key, j] > to
    }
    print "COMMIT" > to
}
!whole {
    if (/^\*/) t = substr($1, 2)
    else if (/^-A /) rule[t, $2, ++count[t, $2]] = $0
    else if (/^:/ || /^-X /) {
        c = /^:/ ? substr($1, 2) : $2
        if (!((t, c) in touched)) { touched[t, c]; chain[++n] = c; of[n] = t }
        if (/^:/) count[t, c] = 0; else delete count[t, c]
    }
    next
}
/^\*/ { inside = $0 == "*" t; if (inside && (open != t || to != out)) { table_end(); table_begin() } next }
!inside || /^COMMIT/ { next }
n && /^[:-]/ { c = /^:/ ? substr($1, 2) : $2; if ((t, c) in touched) next }
{ print > to }
END { table_end() }
