# The way from what the kernel has (iptables-have.awk) to a text that is wanted: that of a bundle, or an earlier iptables-save. Chain by
# chain, as text, since bundles are written as iptables-save prints. firewall=keep: kubelet fills KUBE-FIREWALL, and only that it is
# there is ours. quick=1: differences are not named. Writes into the directory out:
#   stage            chains that nothing leads to yet, cut between Services into transactions of about chunk lines (nft flavour)
#   switch           one transaction per table: everything else
#   names, rest      its end, if nat is new in the legacy flavour: iptables-legacy takes names faster in order
#   detail, counts   differences as JSON, numbers; kept: chains that should go, but a foreign rule leads to them
# iptables-nft looks up every chain that a transaction names in a sorted list; a listing at the top has it read a large table once.
function put(line) {
    if (!open++) print "*" table (flavour == "nft" && chains[table] > 1000 ? "\n-S" : "") > SWITCH
    print line > (!sorted ? SWITCH : line ~ /^:/ ? out "/names" : REST)
}
function waits(c) { return flavour == "nft" && table == "nat" && (is_service(c) || c == "KUBE-MARK-MASQ") }
function stage(line) { if (!staged++) print "*nat" > STAGE; print line > STAGE }
function cut() { if (staged) print "COMMIT" > STAGE; staged = 0 }
# All wanted rules of a chain that is there are in W[1..wn].
function finish(   i) {
    if (how == "compare") {
        done[table, last]
        for (i = 1; i <= wn && W[i] == K[table, last, i]; i++) continue
        if (i <= wn || wn != count[table, last]) rewrite(last)
    }
    wn = 0; how = last = ""
}
function rewrite(c,   i, n, m, left) {
    changed++; m = count[table, c]
    put(":" c " - [0:0]"); for (i = 1; i <= wn; i++) put(W[i])
    for (i = 1; i <= m && !quick; i++) left[K[table, c, i]]++
    for (i = 1; i <= wn && !quick; i++) if (left[W[i]]-- <= 0) { tell("missing-rule", c, W[i]); n++ }
    for (i = m; i > 0 && !quick; i--) if (left[K[table, c, i]]-- > 0) { tell("extra-rule", c, K[table, c, i]); n++ }
    if (!n) tell("order", c, "")
}
function missing(rule) { wished[table, rule]; if ((table, rule) in jumps) return 0; moved++; tell("missing-jump", "", rule); return 1 }
function kept(c) { return firewall == "keep" && table == "filter" && c == "KUBE-FIREWALL" }
function table_end(   i, n, part, gone, g) {
    finish()
    for (i in jumps) {
        split(i, part, SUBSEP)
        if (part[1] != table || part[2] ~ /-j KUBE-FIREWALL$/ && kept("KUBE-FIREWALL") && !((table, "KUBE-FIREWALL") in want)) continue
        for (n = jumps[i] - (i in wished); n > 0; n--) { moved++; put("-D" substr(part[2], 3)); tell("extra-jump", "", part[2]) }
    }
    if (inserts != "") put(substr(inserts, 2))
    for (i = 1; i <= chains[table]; i++) {
        key = table SUBSEP (c = actual[table, i])
        if (key in want) { same++; if (count[key] && !(key in done) && !kept(c)) rewrite(c) }
        if (key in want || kept(c)) continue
        if (!(key in foreign)) { removed++; gone[++g] = c; tell("stale-chain", c, "") }
        else print table, c, foreign[key] > (out "/kept")
        if (count[key] || !(key in foreign)) put(":" c " - [0:0]")
    }
    for (i = 1; i <= g; i++) put("-X " gone[i])
    if (open) print "COMMIT" > (sorted ? REST : SWITCH)
    open = sorted = 0; inserts = ""; ended[table]
}
BEGIN { STAGE = out "/stage"; SWITCH = out "/switch"; REST = out "/rest" }
/^\*/ { sorted = flavour != "nft" && table == "nat" && !(table in used) }
/^:/ && !(key in want) {
    want[key]
    if (!(key in count)) { added++; tell("missing-chain", c, ""); if (waits(c)) stage($1 " - [0:0]"); else put($1 " - [0:0]") }
}
/^-A / {
    if ($2 != last) {
        finish(); last = $2; key = table SUBSEP last
        how = !(key in want) ? "jump" : key in count ? "compare" : waits(last) ? "stage" : "put"
    }
    if (how == "compare") W[++wn] = $0
    else if (how == "stage") stage($0); else if (how == "put") put($0)
    else if (!is_jump(table, $0) || !missing($0)) next
    else if (/ -j KUBE-NODEPORT-(CONTAINER|HOST)$/) inserts = inserts "\n" $0    # of mode userspace: after all other rules
    else inserts = "\n-I" substr($0, 3) inserts
}
/^-I / && missing("-A" substr($0, 3)) { inserts = inserts "\n" $0 }
/^#/ { finish(); if (staged >= chunk) cut() }
/^COMMIT/ { table_end() }
END {
    cut()
    for (i = split("mangle filter nat", name, " "); i; i--) if (!((table = name[i]) in ended)) table_end()
    text = "%s: {\"added\": %d, \"changed\": %d, \"removed\": %d, \"same\": %d, \"jumps\": %d}\n"
    printf text, quote(family), added, changed, removed, same - changed, moved > (out "/counts")
}
