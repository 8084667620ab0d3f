# Restore input that removes our chains and jumps: pass=2 is what iptables-save printed, and pass=1 the same before. A chain that a
# foreign rule leads to is emptied, and told in the file kept. KUBE-FIREWALL and its jumps become what pass=0 says (before/firewall.N);
# its rules stay while kubelet is here, or if it is not known what was there before us. Before many chains, iptables-nft lists the
# table: otherwise it looks up each of them in a sorted list.
function table_end(   i, c, rule) {
    if (n + jumps + (t == "filter" && had) == 0) return
    print "*" t (nft && n > 1000 ? "\n-S" : "")
    for (i = 1; i <= n; i++) print ":" chain[i] " - [0:0]"
    if (t == "filter") {
        if (!keep) printf "%s", text
        for (rule in stay) if (!(rule in there)) print "-I" rule
    }
    for (i = 1; i <= jumps; i++) print "-D" jump[i]
    for (i = 1; i <= n; i++) { c = chain[i]; if (!((t, c) in held) && !(c == "KUBE-FIREWALL" && had)) print "-X " c }
    print "COMMIT"
}
pass == 0 { had = 1; if (/^-I /) stay[substr($0, 3)]; else text = text $0 "\n" }
pass == 1 && /^:KUBE-(KUBELET-CANARY|IPTABLES-HINT) / { kubelet = 1 }
pass < 2 { next }
/^\*/ { t = substr($1, 2); n = jumps = 0; keep = kubelet || !known }
/^:/ {
    c = substr($1, 2)
    if (is_owned(t, c) && !(c == "KUBE-FIREWALL" && keep)) { chain[++n] = c; mine[t, c] }
}
/^-A / && !((t, $2) in mine) && match($0, / -[jg] KUBE-[A-Z0-9-]+/) {
    c = substr($0, RSTART + 4, RLENGTH - 4)
    rule = substr($0, 3)
    if (!((t, c) in mine) && !(had && t == "filter" && c == "KUBE-FIREWALL" && is_jump(t, $0))) next
    if (!is_jump(t, $0)) { if (!((t, c) in held)) print t, c, $0 > kept; held[t, c] }
    else if (rule in stay && !(rule in there)) there[rule]
    else jump[++jumps] = rule
}
/^COMMIT/ { table_end() }
