# shellcheck shell=sh disable=SC2015,SC2034,SC2046,SC2086,SC2154,SC3043
# ---------------------------------------------------------------- ipvs: its tools
# Ours are kube-ipvs0, the sets that our_set names, and the virtual servers that a bundle, the device or these sets name.

# Read sets, virtual servers, timeouts and addresses as their tools print them, into directory $1. Looking loads no module. False
# with refused if the kernel cannot be read.
ipvs_save() {
    mkdir -p "$1" && : >"$1/sets" && : >"$1/servers" && : >"$1/timeouts" && : >"$1/addresses" && : >"$work/err" || return 1
    if {
        { [ ! -d /sys/module/ip_set ] || ! has ipset || ipset save >"$1/sets"; } &&
            { [ ! -e /proc/net/ip_vs ] || ! has ipvsadm || { ipvsadm -Sn >"$1/servers" && ipvsadm -L --timeout >"$1/timeouts"; }; } &&
            { [ ! -e /sys/class/net/kube-ipvs0 ] || { ip -o addr show dev kube-ipvs0 >"$1/addresses" && echo link >>"$1/addresses"; }; }
    } 2>"$work/err" && room; then return 0; fi
    first_lines "$work/err" "sets and virtual servers cannot be read"
    return 1
}

# reply is the files $1 that the directories after it have, in their order.
ipvs_files() {
    local names dir name
    names=$1 reply=''
    shift
    for dir; do for name in $names; do [ ! -e "$dir/$name" ] || reply="$reply $dir/$name"; done; done
}

# Print "-D OPTION SERVER" for the virtual servers of the kernel, read into directory $1, that are ours. Those that file $2 lists
# stay, and so do those that ipvs.conf $3 excludes.
ipvs_ours() {
    ipvs_files ipvs-1-frontends.rules $r_dirs $bundle
    awk "$addresses_awk$ipvs_own_awk$ipvs_address_awk$ipvs_ours_awk" pass=named $reply pass=wanted "$2" pass=kernel "$3" "$1/sets" "$1/addresses" "$1/servers"
}

# Feed file $1, if it has lines, to a tool. ipvsadm goes on after a line that fails and forgets the failure, so whatever a tool
# says counts as one. False with refused.
ipvs_tool() {
    local file
    [ -s "$1" ] || return 0
    file=$1
    shift
    "$@" <"$file" >/dev/null 2>"$work/err" && [ ! -s "$work/err" ] && return 0
    first_lines "$work/err" "$*"
    return 1
}

# Destroy the sets that the lines "destroy SET" of file $1 name. A set that a foreign rule asks stays.
ipvs_destroy() {
    local set
    if ipvs_tool "$1" ipset restore -exist; then return 0; fi
    while read -r _ set; do
        if ipset destroy "$set" 2>"$work/err" || grep -q 'does not exist' "$work/err"; then continue; fi
        grep -q 'in use' "$work/err" || { first_lines "$work/err" "ipset destroy $set"; return 1; }
        warn "set $set stays: it is in use by a rule that is not ours"
    done <"$1"
}
