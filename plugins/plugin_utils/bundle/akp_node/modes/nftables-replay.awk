# Run the commands of bundle files in mind, in the order in which they are loaded, and print what lasts as facts: FAMILY, KIND and
# NAME of an object, then H and its attributes, R and a rule, or E and an element; tab separated. nft could make them in this
# order: an object keeps its first place, a rule its last one.
function keep(kind, what, text) {
    line[++n] = $3 "\t" kind "\t" name "\t" what "\t" text
    return n
}
# Forget what is in a chain, set or map.
function empty(   i, count, part) {
    if ($2 == "chain") {
        count = split(rules[$3, name], part, " ")
        for (i = 1; i <= count; i++) delete line[part[i]]
        delete rules[$3, name]
    } else for (i in element) if (index(i, $3 SUBSEP name SUBSEP) == 1) { delete line[element[i]]; delete element[i] }
}
/^#/ || NF == 0 { next }
{ name = $2 == "table" ? $4 : $5; object = $3 SUBSEP $2 SUBSEP name; text = substr($0, index($0, " " name) + length(name) + 2) }
$2 == "rule" { rules[$3, name] = rules[$3, name] " " keep("chain", "R", text); next }
$2 == "element" {
    text = key = substr(text, 3, length(text) - 4)
    sub(/ (comment "[^"]*" )?: .*$/, "", key)
    key = $3 SUBSEP name SUBSEP key
    if ($1 == "delete") { delete line[element[key]]; delete element[key] }
    else if (!(key in element)) element[key] = keep(kind[$3, name], "E", text)
    next
}
$1 == "flush" { empty(); next }
$1 == "delete" { empty(); delete line[head[object]]; delete head[object]; next }
# Declared again: attributes count.
object in head { if (text != "") line[head[object]] = $3 "\t" $2 "\t" name "\tH\t" text; next }
{ kind[$3, name] = $2; head[object] = keep($2, "H", text) }
END { for (i = 1; i <= n; i++) if (i in line) print line[i] }
