# Takes an archive apart into the directory dir. For each file it has a line "== NAME LINES" and then that many lines;
# "==" alone is the end. Names are plain, so nothing can land anywhere else. With what=head only the release, its
# signatures and the manifest are taken, which come first. Prints what is wrong, or nothing; "packed" if it is no archive.
NR == 1 && !/^== / { print "packed"; packed = 1; exit }
{ bytes += length($0) + 1 }
left > 0 { print > file; if (!--left) close(file); next }
ended { trouble = 1; exit }
/^==$/ { ended = 1; next }
!/^== [A-Za-z0-9_][A-Za-z0-9._-]* [0-9]+$/ || $2 == "log" || seen[$2]++ || ++files > 64 || length($2) > 64 || length($3) > 9 { trouble = 1; exit }
what == "head" && $2 !~ /^(release|release\.([0-9]+\.)?sig|manifest\.json)$/ { ended = 1; exit }
{ file = dir "/" $2; left = $3 + 0; printf "" > file; if (!left) close(file) }
END {
    if (packed) exit
    if (bytes >= limit + 0) print "is larger than " limit / 1000000 " MB (AKP_MAX_BUNDLE on the node)"
    else if (trouble || left > 0 || !ended) print "is no bundle, or was cut short"
}
