# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
#
# akp-node - make this host's kernel equal to a bundle.
#
# A bundle is a directory of native files (iptables.rules, sysctls.conf, ...) with a manifest that
# holds their digests. This program verifies it, refuses whatever reaches outside the objects it
# owns, writes the difference to the kernel in one transaction per table, and remembers what was
# there before. It knows nothing of Kubernetes, and nothing of it stays resident.
# It needs sh, awk, sed, grep, sha256sum, flock, and the netfilter tools of the bundle's mode.
#
#   Constants           what is ours: chains, jumps, sysctls, counters
#   Reporting           messages, JSON, exit codes
#   Bundle              copy, verify, read the manifest
#   Guard               the shapes every line of a bundle must fit
#   Settings            what /etc/akp pins on this host
#   State directory     lock, record, what was there before
#   Sysctls, counters   set if different, and put back
#   Releases            signed by whom, for which node, how old
#   Automation          changes of endpoints that need no approver
#   iptables: host      flavour, families, reading tables
#   iptables: plan      what differs, as restore files
#   iptables: commit    stage, switch, undo
#   Conntrack           stale UDP flows
#   Modes               what the verbs ask of a mode; mode iptables
#   nftables: guard     every command a bundle may hold
#   nftables: host      markers, listings
#   nftables: plan      what differs, as transactions
#   nftables: commit    stage, switch, drop
#   nftables: mode      what the verbs ask
#   ipvs: guard         sets, rules, virtual servers a bundle may hold
#   ipvs: host          modules, reading the kernel
#   ipvs: plan          what differs, as input of ipset, ipvsadm and ip
#   ipvs: commit        what comes, what goes, undo, draining
#   ipvs: mode          what the verbs ask
#   Health              what load balancers are told; nothing listens, systemd or inetd does
#   Deltas              what changes between two generations
#   Carriers            ask, what changes per service port
#   Commit-confirmed    a change that nobody confirms is undone
#   Pull                fetch, verify, apply, report
#   Metrics             how a run ended, for Prometheus
#   Verbs
#
# awk programs stand in single quotes:
# shellcheck disable=SC2016
set -eu
umask 077
LC_ALL=C
export LC_ALL
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

# ---------------------------------------------------------------- Constants
VERSION=0.1.0
STATE=${AKP_STATE:-/var/lib/akp}
case $STATE in /*) ;; *) STATE=$PWD/$STATE ;; esac
LOCK_WAIT=${AKP_LOCK_WAIT:-30}   # seconds to wait for another run
KEEP=${AKP_KEEP:-3}              # bundles kept for rollback
MAX_BUNDLE=${AKP_MAX_BUNDLE:-256} # megabytes of a bundle on stdin, unpacked
CHUNK=${AKP_CHUNK:-2000}         # lines in a staging transaction; larger is slower on the nft back end
FAMILIES='4 6'

# Chains that are ours, by table. KUBE-FIREWALL is shared with kubelet, see firewall_owner.
OWNED='mangle KUBE-PROXY-CANARY
filter KUBE-SERVICES KUBE-EXTERNAL-SERVICES KUBE-FORWARD KUBE-NODEPORTS KUBE-PROXY-FIREWALL KUBE-FIREWALL KUBE-PROXY-CANARY KUBE-PROXY-GENERATION KUBE-NODE-PORT KUBE-SOURCE-RANGES-FIREWALL KUBE-IPVS-FILTER KUBE-IPVS-OUT-FILTER
nat KUBE-SERVICES KUBE-NODEPORTS KUBE-POSTROUTING KUBE-MARK-MASQ KUBE-PROXY-CANARY KUBE-PROXY-GENERATION KUBE-NODE-PORT KUBE-LOAD-BALANCER'

# The only rules ever put into chains that are not ours: mode, table, chain, rule.
# shellcheck disable=SC2089,SC2090
JUMPS='iptables filter INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
iptables filter FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
iptables filter INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
iptables filter FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
iptables filter OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
iptables filter FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
iptables filter INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
iptables filter OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
iptables filter FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
iptables nat OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
iptables nat PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
iptables nat POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
iptables filter INPUT -j KUBE-FIREWALL
iptables filter OUTPUT -j KUBE-FIREWALL
ipvs nat OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
ipvs nat PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
ipvs nat POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
ipvs filter FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
ipvs filter INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
ipvs filter INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
ipvs filter FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
ipvs filter INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
ipvs filter OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER'
# shellcheck disable=SC2090
export OWNED JUMPS

# Sysctls a bundle may set, and the nfacct counters it may ask for.
SYSCTLS='net.netfilter.nf_conntrack_max net.netfilter.nf_conntrack_tcp_timeout_established net.netfilter.nf_conntrack_tcp_timeout_close_wait net.netfilter.nf_conntrack_tcp_be_liberal net.netfilter.nf_conntrack_udp_timeout net.netfilter.nf_conntrack_udp_timeout_stream net.ipv4.conf.all.route_localnet net.ipv4.vs.conntrack net.ipv4.vs.conn_reuse_mode net.ipv4.vs.expire_nodest_conn net.ipv4.vs.expire_quiescent_template net.ipv4.ip_forward net.ipv4.conf.all.arp_ignore net.ipv4.conf.all.arp_announce'
COUNTERS='ct_state_invalid_dropped_pkts localhost_nps_accepted_pkts'
export SYSCTLS COUNTERS

H4='[A-Z2-7][A-Z2-7][A-Z2-7][A-Z2-7]'
HASH=$H4$H4$H4$H4                # mawk has no {16}

# awk: is_owned(table, chain). Every program that decides about ownership starts with it.
AWK_OWNED='
function load_owned(   i, j, n, m, row, word) {
    n = split(ENVIRON["OWNED"], row, "\n")
    for (i = 1; i <= n; i++) {
        m = split(row[i], word, " ")
        for (j = 2; j <= m; j++) OWN[word[1], word[j]] = 1
    }
    n = split(ENVIRON["JUMPS"], row, "\n")
    for (i = 1; i <= n; i++) {
        split(row[i], word, " ")
        m = length(word[1]) + length(word[2]) + 3
        JUMP[word[2], "-A " substr(row[i], m)] = 1
        JUMP_OF[word[1], word[2], "-I " substr(row[i], m)] = 1
    }
}
function is_owned(t, c) {
    if ((t, c) in OWN) return 1
    return t == "nat" && c ~ /^KUBE-(SVC|SVL|EXT|SEP|FW)-'$HASH'$/
}
BEGIN { load_owned() }
'

