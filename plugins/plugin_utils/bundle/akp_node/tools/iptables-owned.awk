# Ours: the chains of kube-proxy in any mode, the markers, and the jumps as kube-proxy writes them. Any other rule is foreign.
function is_service(c) { return c ~ /^KUBE-(SVC|SVL|EXT|SEP|FW)-[A-Z2-7]+$/ && substr(c, length(c) - 16, 1) == "-" }
function is_owned(t, c) {
    return c ~ /^KUBE-/ && t ~ /^(mangle|filter|nat)$/ && (c ~ /^KUBE-PROXY-(CANARY|GENERATION|GEN-[0-9A-F]+)$/ ||
        t == "nat" && (is_service(c) || c ~ /^KUBE-(SERVICES|NODEPORTS|POSTROUTING|MARK-MASQ|NODE-PORT|LOAD-BALANCER|(PORTALS|NODEPORT)-(CONTAINER|HOST))$/) ||
        t == "filter" && c ~ /^KUBE-((EXTERNAL-)?SERVICES|FORWARD|NODEPORTS|((PROXY|SOURCE-RANGES)-)?FIREWALL|NODE-PORT|NODEPORT-NON-LOCAL|IPVS-(OUT-)?FILTER)$/)
}
function is_jump(t, rule) {
    if (!sub(/^-A (INPUT|FORWARD|OUTPUT|PREROUTING|POSTROUTING) ((-m conntrack --ctstate NEW |-m addrtype --dst-type LOCAL )?-m comment --comment )?/, "", rule)) return 0
    return index("\n" JUMPS "\n", "\n" t " " rule "\n")
}
BEGIN {
    JUMPS = "filter -j KUBE-FIREWALL\nnat \"kubernetes service portals\" -j KUBE-SERVICES\n" \
        "nat \"kubernetes postrouting rules\" -j KUBE-POSTROUTING\n" \
        "filter \"kubernetes externally-visible service portals\" -j KUBE-EXTERNAL-SERVICES\n" \
        "filter \"kubernetes health check service ports\" -j KUBE-NODEPORTS\nfilter \"kubernetes service portals\" -j KUBE-SERVICES\n" \
        "filter \"kubernetes forwarding rules\" -j KUBE-FORWARD\nfilter \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\n" \
        "filter \"kubernetes health check rules\" -j KUBE-NODE-PORT\nfilter \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL\n" \
        "filter \"kubernetes ipvs access filter\" -j KUBE-IPVS-FILTER\n" \
        "nat \"handle ClusterIPs; NOTE: this must be before the NodePort rules\" -j KUBE-PORTALS-CONTAINER\n" \
        "nat \"handle ClusterIPs; NOTE: this must be before the NodePort rules\" -j KUBE-PORTALS-HOST\n" \
        "nat \"handle service NodePorts; NOTE: this must be the last rule in the chain\" -j KUBE-NODEPORT-CONTAINER\n" \
        "nat \"handle service NodePorts; NOTE: this must be the last rule in the chain\" -j KUBE-NODEPORT-HOST\n" \
        "filter \"Ensure that non-local NodePort traffic can flow\" -j KUBE-NODEPORT-NON-LOCAL\nfilter \"kubernetes ipvs access filter\" -j KUBE-IPVS-OUT-FILTER"
}
