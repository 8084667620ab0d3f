# Compare facts: what is there (pass 1) with what is wanted (pass 2). plan() says what is to be done, for nftables-write.awk; plan.ip and
# plan.ip6 have counts and details of what differs, without the markers.
#   need[FAMILY, KIND, NAME]    "new": make it, "set": write the rules of a chain anew, "alter": change a set
#   gone, less, more            objects that go, elements that go and come: commands or the end of one, numbered from 1
#   todo[WHAT, FAMILY]          "table": make the table, "anew": make it anew, "leave": remove it
# Note a difference: how it is counted, told and done; a rule or element that it is about.
function note(sort, kind, what, text) {
    if (what != "" && !(("anew", f) in todo)) {
        tasks++
        if (what == "gone") gone[++ngone] = type " " f " kube-proxy " name; else need[f, type, name] = what
        if (what == "new" && type == "chain") fresh++
        if (what == "new" && name ~ /^gen-/) proof = f " " name
    }
    if (name ~ /^gen-/) return
    if (sort != "") sum[sort, f]++
    if (kind != "") print "{\"family\": " quote(IPV[f]) member("kind", kind) member("table", "kube-proxy") member("chain", name) member("rule", text) "}" > DETAIL[f]
}
function load(text,   part) { key = text; split(text, part, SUBSEP); f = part[1]; type = part[2]; name = part[3]; element = part[4] }
# Name the rules that differ in a chain.
function explain(   i, n, m, a, b, left, told) {
    n = split(rules[1, key], a, "\n")
    m = split(rules[2, key], b, "\n")
    for (i = 2; i <= n; i++) left[a[i]]++
    for (i = 2; i <= m; i++) if (left[b[i]] > 0) left[b[i]]--; else { note("", "missing-rule", "", b[i]); told = 1 }
    for (i = 2; i <= n; i++) if (left[a[i]] > 0) { left[a[i]]--; note("", "extra-rule", "", a[i]); told = 1 }
    if (!told) note("", "order")
}
function wanted() {
    if (element != "") {
        if ((1, key) in head) return
        note("elementsAdded", "missing-element", "", element)
        if (!(("anew", f) in todo)) more[++nmore] = "add element " f " kube-proxy " name " { " element " }"
    } else if (!((1, key) in head)) note(type == "chain" ? "added" : "", "missing-" type, "new")
    else if (rules[1, key] != rules[2, key]) {
        note("changed", "", "set")
        explain()
    } else if (head[1, key] != head[2, key]) note("", "attributes", "alter", head[2, key])
    else if (type == "chain") note("same")
}
function unwanted() {
    if (element == "") { note(type == "chain" ? "removed" : "", "stale-" type, (2, f) in family ? "gone" : ""); return }
    note("elementsRemoved", "extra-element", "", element)
    sub(/ (comment "[^"]*" )?: .*$/, "", element)
    if ((2, f SUBSEP type SUBSEP name) in head && !(("anew", f) in todo)) less[++nless] = "delete element " f " kube-proxy " name " { " element " }"
}
function plan(   i, text, sort) {
    for (f in IPV) {
        if ((1, f) in family && !((2, f) in family)) todo["leave", f]
        if ((2, f) in family && !((1, f) in family)) todo["table", f]
    }
    # A table whose sets or base chains are made differently is made anew.
    for (i = 1; i <= n[2]; i++) {
        load(order[2, i])
        if ((1, key) in head && head[1, key] != head[2, key] && name !~ /^affinity-/) todo["anew", f]
    }
    for (i in todo) tasks++
    for (i = 1; i <= n[2]; i++) { load(order[2, i]); wanted() }
    for (i = 1; i <= n[1]; i++) if (!((2, order[1, i]) in head)) { load(order[1, i]); unwanted() }
    tasks += nmore + nless
    for (f in IPV) {
        i = split("added changed removed same elementsAdded elementsRemoved", sort, " ")
        for (text = "}"; i; i--) text = ", \"" sort[i] "\": " sum[sort[i], f] + 0 text
        print quote(IPV[f]) ": {" substr(text, 3) > (work "/plan." f "/counts")
        printf "" > DETAIL[f]
    }
}
BEGIN {
    FS = "\t"; IPV["ip"] = "ipv4"; IPV["ip6"] = "ipv6"
    for (f in IPV) DETAIL[f] = work "/plan." f "/detail"
}
pass < 3 { key = $1 SUBSEP $2 SUBSEP $3; text = $5 }
pass < 3 && $4 == "R" { rules[pass, key] = rules[pass, key] "\n" text; next }
pass < 3 && $4 == "E" { key = key SUBSEP text; text = "" }
pass < 3 { head[pass, key] = text; order[pass, ++n[pass]] = key; family[pass, $1] = 1; next }
