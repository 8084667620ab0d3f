# iptables-guard.awk (before guard.awk) - tables and chains of restore files.
# A line of a restore file stands in a table of ours that has an end, each table once. CHAIN["4/nat/KUBE-X "] is the file that declared the
# chain last, FULL once it has rules: they stand together. A plan and a replay read files chain by chain, and rely on that. Whether a
# jump leads somewhere the kernel judges.
function restore(   op, c) {
    op = substr($0, 1, 2)
    if (t != "" && $0 == "COMMIT") t = ""
    else if (/^(#|$)/ && !/[^ -~]/) return
    else if (op ~ /^[*]/) {
        if (t != "") refuse("table " t " has no COMMIT")
        t = substr($0, 2); chain = "-"; here = fam "/" t "/"; top = ROOT[fam "/" FILENAME "/" t]
        if (!((FILENAME, t) in HAS)) refuse("table " t " is not ours")
        if (ONCE[FILENAME, t]++) refuse("table " t " appears twice")
    } else if (t == "") refuse("a line outside a table: " $0)
    else if (!fits(top, $0 "\n")) refuse(reason())
    else if (op == "-A" && $2 !~ /^(PREROUTING|OUTPUT)$/) {
        if (substr($0, 4, length(chain)) != chain) {
            chain = substr($0, 4, index(substr($0, 4), " "))
            if ((c = CHAIN[here chain]) == "") refuse("chain " chain "is not declared in table " t)
            if (c == FULL) refuse("the rules of chain " chain "do not stand together")
            CHAIN[here chain] = FULL
        }
    } else if (op ~ /^:/) {
        c = here substr($0, 2, index($0, " ") - 1)
        if (CHAIN[c] == FILENAME || CHAIN[c] == FULL) refuse("chain " substr($1, 2) " is declared twice")
        CHAIN[c] = FILENAME
    } else if (op == "-X" && $2 !~ /^KUBE-PROXY-GEN-/) {
        if (!((c = here $2 " ") in CHAIN) || CHAIN[c] == FULL) refuse("not a chain that this bundle empties: " $0)
    } else if (ONCE[here $0]++) refuse("a line twice: " $0)
}
