# shellcheck shell=sh disable=SC2034,SC2153,SC2154,SC3043
# ---------------------------------------------------------------- Facts
HOST_TOOLS='iptables ip6tables iptables-nft iptables-legacy nft ipset ipvsadm conntrack nfacct ip flock sha256sum unshare
 curl wget ssh-keygen'

# What this host is and can do. Probes run in throw-away namespaces: nothing is left behind.
verb_facts() { facts_members; answer; }

# Put the facts into the answer.
facts_members() {
    local name list text kind
    put_text hostname "$(uname -n)" kernel "$(uname -r)" akpNode "$VERSION"
    put cpus "$(grep -c '^processor' /proc/cpuinfo)" addresses "[$(interface_addresses)]"
    list="\"ipv4\": $(truth family_usable ip iptables), \"ipv6\": $(truth family_usable ip6 ip6tables)"
    list="$list, \"nfacct\": $(truth nfacct_works), \"ipvs\": $(truth ipvs_works)"
    reply=null
    if has iptables; then
        text=$(iptables -V 2>/dev/null) || text=''
        kind=${AKP_IPTABLES:-$r_flavour}
        [ -n "$kind" ] || case $text in *nf_tables*) kind=nft ;; *) kind=legacy ;; esac
        text=${text#*v}
        json "${text%% *}"
        reply="{\"flavour\": \"$kind\", \"version\": $reply}"
    fi
    list="$list, \"iptables\": $reply"
    version_of nft add table ip akp-probe
    list="$list, \"nft\": $reply"
    version_of ipset create AKP-PROBE hash:ip
    put capabilities "{$list, \"ipset\": $reply}"
    list=''
    for name in $HOST_TOOLS; do list="$list${list:+, }\"$name\": $(truth has "$name")"; done
    switch netfilter/nf_conntrack_tcp_be_liberal
    put tcpBeLiberal "$reply" tools "{$list}"
}

# reply is the version of tool $1 as JSON, null if the command that the arguments make does not work here.
version_of() {
    reply=''
    if has "$1" && in_sandbox "$@"; then reply=$("$1" --version | sed -n 's/^[a-z]* v\([0-9.]*\).*/\1/p'); fi
    json "$reply"
}

truth() { if "$@" >/dev/null 2>&1; then echo true; else echo false; fi; }

# reply is the first digit of a sysctl, or 0.
switch() {
    reply=''
    { read -r reply <"/proc/sys/net/$1"; } 2>/dev/null || reply=${reply:-0}
}

# Print every address of every interface as JSON, loopback included.
interface_addresses() {
    ! has ip || ip -o addr show 2>/dev/null | awk "$quote_awk"'$3 ~ /^inet6?$/ {
        n = split($4, part, "/")
        printf "%s{\"interface\": %s, \"address\": \"%s\", \"prefix\": %d}", comma, quote($2), part[1], (n > 1 ? part[2] : 0)
        comma = ", "
    }'
}

# True if rules of a family can be made here: by iptables, or by nft where there is no iptables.
family_usable() {
    if has iptables; then has "$2" && { in_sandbox "$2" -t nat -N AKP-PROBE || ! in_sandbox true; }
    else has nft && in_sandbox nft add table "$1" akp-probe
    fi
}

# True if a counter can be made and a rule that names it loads.
nfacct_works() {
    has nfacct && has iptables &&
        in_sandbox sh -c 'nfacct add akp_probe && iptables -N AKP-PROBE && iptables -A AKP-PROBE -m nfacct --nfacct-name akp_probe'
}

ipvs_works() { [ -e /proc/net/ip_vs ] || { has modprobe && modprobe -n -q ip_vs; }; }

# reply is the processes of a kube-proxy that writes the tables of this network, as JSON.
other_writers() {
    local each
    reply=''
    for each in $(grep -lsx kube-proxy /proc/[0-9]*/comm | head -n 20); do
        each=${each%/comm}
        [ "$(readlink "$each/ns/net")" != "$(readlink /proc/self/ns/net)" ] || reply="$reply${reply:+, }${each#/proc/}"
    done
}

# What a carrier asks at every run: is the kernel still what was recorded, and is this still the host it knows? Capabilities
# depend on this boot and on the tools there are: that is the key. routeLocalnetLeft: an earlier kube-proxy let packets to 127.0.0.0/8
# in, and nothing in force asks for it.
verb_ask() {
    local key name facts status localnet
    facts=null localnet=false
    read -r key </proc/sys/kernel/random/boot_id
    for name in $HOST_TOOLS; do if has "$name"; then key=$key.$name; fi; done
    if [ "$known" != "$key" ]; then facts_members; facts="{${members#, }}" members=''; fi
    # Where rules are few, comparing all of them costs little more than a look at the markers.
    [ "$r_ports" -gt "$SMALL" ] || verify=1
    status_members
    status="{${members#, }}" members=''
    switch ipv4/conf/all/route_localnet
    if [ "$reply" = 1 ]; then
        dirs=$r_dirs
        effective sysctls.conf
        grep -q -s -x 'net.ipv4.conf.all.route_localnet = 1' "${reply:-/dev/null}" || localnet=true
    fi
    put_text key "$key" akpNode "$VERSION"
    other_writers
    # One within another program, as in k3s, and one that is hidden, still has its metrics port, 10249.
    put kubeProxy "[$reply]" kubeProxyPort "$(truth grep -qs ':2809 [0-9A-F]*:0000 0A ' /proc/net/tcp /proc/net/tcp6)"
    switch netfilter/nf_conntrack_tcp_be_liberal
    put addresses "[$(interface_addresses)]" tcpBeLiberal "$reply" routeLocalnetLeft "$localnet" facts "$facts" status "$status"
    answer
}
