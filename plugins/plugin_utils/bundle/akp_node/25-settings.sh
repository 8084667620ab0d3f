# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Settings
# /etc/akp belongs to whoever owns the host: what is written there no bundle and no carrier can change.
#   node.conf          lines "key value"; lines that begin with # are comments
#   allowed_signers    whose releases count, in the form of ssh-keygen(1); see Releases
#   revoked_signers    optional: keys that count no more
ETC=${AKP_ETC:-/etc/akp}
SETTINGS='cluster node signatures url ca certificate key proxy report fetcher limit textfile keep'

# Is anything set? Asked where the answer is mostly no, and a process to find out is one too many.
has_settings() { [ -e "$ETC/node.conf" ]; }

# The value of a setting, or the default $2.
setting() {
    value=
    if [ -r "$ETC/node.conf" ]; then
        while read -r name rest || [ -n "$name" ]; do
            [ "$name" != "$1" ] || value=$rest
        done <"$ETC/node.conf"
    fi
    printf '%s' "${value:-${2:-}}"
}

# Refuse (2) a node.conf that says something else than it seems to: unknown keys, a key twice or without a value.
check_settings() {
    has_settings || return 0
    [ -r "$ETC/node.conf" ] || die 3 "$ETC/node.conf cannot be read"
    why=$(awk -v known=" $SETTINGS " '
        /^[ \t]*(#|$)/ { next }
        !index(known, " " $1 " ") { print "line " NR ": unknown setting " $1 ", known are" substr(known, 1, length(known) - 1); exit }
        NF < 2 { print "line " NR ": setting " $1 " has no value"; exit }
        seen[$1]++ { print "line " NR ": setting " $1 " appears twice"; exit }
        $1 ~ /^(cluster|node|signatures)$/ && NF > 2 { print "line " NR ": setting " $1 " takes one word"; exit }
        $1 == "signatures" && $2 !~ /^[1-9][0-9]?$/ { print "line " NR ": signatures is a number from 1 to 99, not " $2; exit }
        $1 == "keep" && ($2 !~ /^[1-9][0-9]?$/ || NF > 2) { print "line " NR ": keep is a number from 1 to 99, not " $2; exit }
        ' "$ETC/node.conf") || die 3 "$ETC/node.conf cannot be read"
    [ -z "$why" ] || die 2 "$ETC/node.conf: $why"
}

