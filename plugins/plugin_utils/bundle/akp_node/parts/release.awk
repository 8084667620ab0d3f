# Reads a release. Prints "CLUSTER COUNTER EXPIRES", and after it "covered" if the line wanted is in it; or "bad", and why.
#   akp-release 1
#   cluster NAME
#   counter N                          milliseconds since the epoch when it was made; never goes back
#   expires SECONDS                    since the epoch
#   bundle NODE GENERATION DIGEST      the digest of manifest.json
#   delta NODE BASE GENERATION DIGEST
#   object DIGEST SHA256 BYTES         the archive in which akp-pull finds that bundle or delta
#   note TEXT                          for people
function bad(why) { if (!failed) print "bad line " NR " " why; failed = 1; exit }
function once(name) { if (seen[name]++) bad("says " name " twice") }
NR == 1 { if ($0 != "akp-release 1") bad("is not akp-release 1; a newer node program may be needed"); next }
$0 == wanted { covered = " covered" }
/^cluster [A-Za-z0-9][A-Za-z0-9._-]*$/ { once("cluster"); value["cluster"] = $2; next }
/^(counter|expires) [1-9][0-9]*$/ && length($2) < 16 { once($1); value[$1] = $2; next }
$1 == "bundle" && NF == 4 || $1 == "delta" && NF == 5 || $1 == "object" && NF == 4 || $1 == "note" { next }
{ bad("is not a line of a release") }
END {
    if (failed) exit
    if (seen["cluster"] + seen["counter"] + seen["expires"] != 3) print "bad: it must say cluster, counter and expires"
    else print value["cluster"], value["counter"], value["expires"] covered
}
