# guard.awk (after the other guard-*.awk) - every line of a bundle fits a shape, else "FILE line N: reason" and exit 1.
#   ENVIRON: SHAPES the tables of shapes/*.txt; NAMES the files
#   operands: kind=Bundle|Delta gen=GENERATION base=GENERATION FILE...    names as in the tables, in the order of loading
function refuse(text) { if (!refused++) printf "%s line %d: %s\n", FILENAME, FNR, /[^ -~]/ ? "a character that is not printable ASCII" : text; exit 1 }
function lacks(what, text) { if (!refused++) printf "%s: %s\n", what, text; exit 1 }
# What an operator is told of a line that fits no shape.
function reason() {
    why = ""
    fits(fixed ? top : TOP[fam], $0 "\n")
    if (why == "" && !fixed) { fam = 10 - fam; judged = ""; fits(TOP[fam], $0 "\n") }
    return (why == "" ? "" : why ", ") "not a line of " FILENAME (t == "" ? "" : ", table " t) ": " $0
}
BEGIN {
    FULL = "+"
    for (i = split(ENVIRON["NAMES"], word, " "); i; i--) LISTED[word[i]]
}
function ended() { if (t != "") lacks(file " line " lines, "table " t " has no COMMIT") }
FNR == 1 {
    ended()
    file = FILENAME; fixed = file ~ /^iptables/ ? 4 : file ~ /^ip6tables/ ? 6 : 0
    if (fixed) SEEN[fixed] = 1
    fam = fixed ? fixed : 4; judged = ""
    if (!(tables(4, file) + tables(6, file))) lacks(file, "not a file that such a bundle has")
    TOP[4] = root("4/" file "/"); TOP[6] = root("6/" file "/")
    bare = file ~ /^ip(set-|vs-|[.])/
}
{ lines = FNR }
fixed { restore(); next }
/^(#|$)/ && !/[^ -~]/ && !bare { next }
!fits(TOP[fam], $0 "\n") { fam = 10 - fam; judged = ""; if (!fits(TOP[fam], $0 "\n")) refuse(reason()) }
FILENAME ~ /nft$/ { SEEN[fam] = 1; next }
# Sets and virtual servers that others have must not get members of ours.
$1 == "create" || $1 == "-A" || $1 == "check" {
    if (MADE[key = $1 == "create" ? $2 : $2 " " $3]++) refuse(key " twice")
}
bare && kind == "Bundle" && ($1 == "add" && !($2 in MADE) || $1 == "-a" && !(($2 " " $3) in MADE)) { refuse("not made in this bundle: " $0) }
END {
    if (refused) exit 1
    ended()
    if (kind == "Delta" && short(gen) == short(base)) lacks("manifest.json", "base and generation begin alike")
    tables(4, ""); tables(6, "")
}
