# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# ---------------------------------------------------------------- Settings
# $ETC belongs to the owner of the host; no bundle and no carrier changes it.
SETTINGS='cluster node signatures unsigned keep program accept_ports proxy_ports vip_ranges endpoint_ranges health healthz'
SETTINGS="$SETTINGS proxy_check proxy_connect proxy_hours proxy_reloads url ca certificate key proxy report fetcher limit textfile"

# include tools/setting.sh

# End with 2 if node.conf has an unknown key, a key twice or with a value of another form.
check_settings() {
    [ -e "$ETC/node.conf" ] || return 0
    refused=$(awk -v known=" $SETTINGS " '
        function bad(why) { print "line " NR ": " why; exit }
        /^[ \t]*(#|$)/ { next }
        !index(known, " " $1 " ") { bad("unknown setting " $1 ", known are" known) }
        NF < 2 { bad("setting " $1 " has no value") }
        seen[$1]++ { bad("setting " $1 " appears twice") }
        $1 ~ /^(cluster|node|signatures|keep|.*_ports|.*_ranges)$/ && NF > 2 { bad("setting " $1 " takes one word") }
        $1 ~ /^(signatures|keep)$/ && $2 !~ /^[1-9][0-9]?$/ { bad($1 " is a number from 1 to 99, not " $2) }
        $1 ~ /_ports$/ && $2 !~ /^[1-9][0-9]*-[1-9][0-9]*$/ { bad($1 " is a range such as 30000-32767, not " $2) }
        $1 ~ /_ranges$/ && $2 !~ /^[0-9a-f:.]+\/[0-9]+(,[0-9a-f:.]+\/[0-9]+)*$/ { bad($1 " is a list such as 10.0.0.0/8,fd00::/8, not " $2) }
        ' "$ETC/node.conf") || die 3 "$ETC/node.conf cannot be read"
    [ -z "$refused" ] || die 2 "$ETC/node.conf: $refused"
}
