# What iptables-save printed, up to wanted=1: of each table our chains (actual) with their rules (K, count), the jumps to them, and the
# last foreign rule that leads to a chain. iptables-owned.awk stands before.
# A difference, as JSON in the file detail; not if quick is set.
function tell(kind, c, rule) {
    kind = "{\"family\": \"" family "\", \"kind\": \"" kind "\""
    if (!quick) print kind member("table", table) member("chain", c) member("rule", rule) "}" > (out "/detail")
}
/^\*/ { table = substr($1, 2) }
index($0, "--nfacct-name  ") { sub(/--nfacct-name  /, "--nfacct-name ") }
/^:/ { c = substr($1, 2); if (!is_owned(table, c)) next; key = table SUBSEP c }
!wanted && /^:/ { count[key] = 0; actual[table, ++chains[table]] = c; used[table] }
!wanted && /^-A / {
    if ((table, $2) in count) K[table, $2, ++count[table, $2]] = $0
    else if (!match($0, / -[jg] KUBE-[A-Z0-9-]+/)) next
    else if (is_jump(table, $0)) { jumps[table, $0]++; used[table] }
    else foreign[table, substr($0, RSTART + 4, RLENGTH - 4)] = $0
}
!wanted { next }
