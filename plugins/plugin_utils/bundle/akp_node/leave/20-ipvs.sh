# shellcheck shell=sh disable=SC2015,SC2034,SC2046,SC2086,SC2154,SC3043
# include tools/ipvs.sh
# ---------------------------------------------------------------- Leaving ipvs
# True if something of ipvs mode is in the kernel. On a host that never had it that costs nothing.
leave_ipvs_present() {
    [ ! -e /sys/class/net/kube-ipvs0 ] || return 0
    [ -d /sys/module/ip_set ] && has ipset && ipset list -n >"$work/names" 2>/dev/null && grep -q -E '^KUBE-(6-)?(CLUSTER-IP|IPVS-IPS|LOOP-BACK)$' "$work/names"
}

# Remove device, virtual servers and sets; the chains that ask them are gone already. False with refused.
leave_ipvs() {
    local dir dirs
    dir=$work/leave.ipvs dirs=$r_dirs
    ipvs_save "$dir" || return 1
    effective ipvs.conf
    refused="what is to be removed cannot be told (is $RUN full?)"
    ipvs_ours "$dir" /dev/null "${reply:-/dev/null}" >"$dir/servers.del" &&
        awk "$ipvs_own_awk"'$1 == "create" && our_set($2) { print "destroy " $2 }' "$dir/sets" >"$dir/sets.destroy" && room || return 1
    rm -f "$STATE/draining"
    [ ! -e /sys/class/net/kube-ipvs0 ] || echo "link del kube-ipvs0" >"$dir/link"
    ipvs_tool "$dir/link" ip -batch - && ipvs_tool "$dir/servers.del" ipvsadm -R && ipvs_destroy "$dir/sets.destroy" || return 1
    [ -s "$STATE/before/timeouts" ] && [ -e /proc/net/ip_vs ] || return 0
    ipvsadm --set $(cat "$STATE/before/timeouts") 2>/dev/null || warn "the timeouts of ip_vs could not be set back"
}

# What cleanup needs to know about chains; timeouts are kept when they are set for the first time.
ipvs_remember() {
    [ ! -e "$STATE/before/iptables" ] || return 0
    iptables_remember "$1"
    : >"$1/iptables"
}

# Note in directory $1 what another program has in our place; put exactly that back.
ipvs_keep() { iptables_keep "$1" && ipvs_save "$1/ipvs"; }
ipvs_back() { ipvs_undo "$1/ipvs" iptables_back "$1" && [ -z "$unfinished" ]; }
ipvs_features() { iptables_features; }
