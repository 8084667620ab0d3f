# shellcheck shell=sh disable=SC2015,SC2034,SC2153,SC2154,SC3043
# ---------------------------------------------------------------- Facts
HOST_TOOLS='iptables ip6tables iptables-nft iptables-legacy nft ipset ipvsadm conntrack nfacct ip flock sha256sum unshare
 curl wget ssh-keygen'

# What this host is and can do.
verb_facts() { facts_members; answer; }

# Put the facts into the answer. Probes run in throw-away network namespaces: nothing is left behind.
facts_members() {
    local name list text
    put_text hostname "$(uname -n)" kernel "$(uname -r)" akpNode "$VERSION"
    network
    put cpus "$(grep -c '^processor' /proc/cpuinfo)" addresses "${reply% *}"
    text=null
    if has iptables; then
        reply=$(iptables -V 2>/dev/null) || reply=''
        case $reply in *nf_tables*) text=nft ;; *) text=legacy ;; esac
        text=${AKP_IPTABLES:-${r_flavour:-$text}} reply=${reply#*v}
        json "${reply%% *}"
        text="{\"flavour\": \"$text\", \"version\": $reply}"
    fi
    list="\"ipv4\": $(truth family_usable ip iptables), \"ipv6\": $(truth family_usable ip6 ip6tables)"
    list="$list, \"nfacct\": $(truth nfacct_works), \"ipvs\": $(truth ipvs_works), \"iptables\": $text"
    version_of nft add table ip akp-probe
    list="$list, \"nft\": $reply"
    version_of ipset create AKP-PROBE hash:ip
    put capabilities "{$list, \"ipset\": $reply}"
    list=''
    for name in $HOST_TOOLS; do list="$list${list:+, }\"$name\": $(truth has "$name")"; done
    switch netfilter/nf_conntrack_tcp_be_liberal
    put tcpBeLiberal "$reply" tools "{$list}"
}

truth() { if "$@" >/dev/null 2>&1; then echo true; else echo false; fi; }

# reply is the version of tool $1 as JSON, null if the command that the arguments make does not work here.
version_of() {
    reply=''
    if has "$1" && in_sandbox "$@"; then reply=$("$1" --version | sed -n 's/^[a-z]* v\([0-9.]*\).*/\1/p'); fi
    json "$reply"
}

# False if command $1 can have no nat table. It is tried in a throw-away network namespace, so that none appears here.
nat_usable() { in_sandbox "$1" -t nat -N AKP-PROBE || ! in_sandbox true; }

# True if rules of a family can be made here: by iptables, or by nft where there is no iptables.
family_usable() {
    if has iptables; then has "$2" && nat_usable "$2"
    else has nft && in_sandbox nft add table "$1" akp-probe
    fi
}

# True if a counter can be made and a rule that names it loads.
nfacct_works() {
    has nfacct && has iptables &&
        in_sandbox sh -c 'nfacct add akp_probe && iptables -N AKP-PROBE && iptables -A AKP-PROBE -m nfacct --nfacct-name akp_probe'
}

ipvs_works() { [ -e /proc/net/ip_vs ] || { has modprobe && modprobe -n -q ip_vs; }; }

# reply is the first digit of a sysctl, or 0.
switch() {
    reply=''
    { read -r reply <"/proc/sys/net/$1"; } 2>/dev/null || reply=${reply:-0}
}

# reply is every address of every interface as JSON, loopback included, and then whether something listens on port 10249: a kube-proxy
# within another program, as in k3s, and one that is hidden, still has its metrics there.
network() {
    set -- /proc/net/tcp6
    [ -r "$1" ] || set --
    reply=$({ ! has ip || ip -o addr show 2>/dev/null; } | awk "$quote_awk"'
        $2 ~ /:2809$/ && $4 == "0A" { port = 1 }
        $3 ~ /^inet6?$/ {
            n = split($4, part, "/")
            list = list sprintf(", {\"interface\": %s, \"address\": \"%s\", \"prefix\": %d}", quote($2), part[1], n > 1 ? part[2] : 0)
        }
        END { print "[" substr(list, 3) "]", port ? "true" : "false" }' - /proc/net/tcp "$@")
}

# reply is the processes of root that may be a kube-proxy and write the tables of this network, as JSON: at most 20.
other_writers() {
    local each count
    reply='' count=0
    # shellcheck disable=SC2013 # these names have no blanks
    for each in $(grep -lsx kube-proxy /proc/[0-9]*/comm); do
        each=${each%/comm}
        # shellcheck disable=SC3013 # dash and busybox have it
        [ -O "$each" ] && [ "$each/ns/net" -ef /proc/self/ns/net ] || continue
        reply="$reply${reply:+, }${each#/proc/}" count=$((count + 1))
        [ "$count" -lt 20 ] || break
    done
}

# What a carrier asks at every run: is the kernel what was recorded, and is this the host it knows? Capabilities depend on this boot and
# the tools there are: that is the key. routeLocalnetLeft: an earlier kube-proxy let packets to 127.0.0.0/8 in; nothing asks for it now.
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
    put kubeProxy "[$reply]"
    network
    put addresses "${reply% *}" kubeProxyPort "${reply##* }"
    switch netfilter/nf_conntrack_tcp_be_liberal
    put tcpBeLiberal "$reply" routeLocalnetLeft "$localnet" facts "$facts" status "$status"
    answer
}
