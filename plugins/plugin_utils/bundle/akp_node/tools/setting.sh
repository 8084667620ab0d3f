# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# reply is the value of a setting, or the default $2.
setting() {
    local name rest
    reply=''
    [ ! -r "$ETC/node.conf" ] || while read -r name rest || [ -n "$name" ]; do [ "$name" != "$1" ] || reply=$rest; done <"$ETC/node.conf"
    reply=${reply:-${2:-}}
}
