# Ours: the chains of kube-proxy in any mode, the markers, and the jumps as kube-proxy writes them. Any other rule is foreign.
function is_service(c) { return c ~ /^KUBE-(SVC|SVL|EXT|SEP|FW)-[A-Z2-7]+$/ && substr(c, length(c) - 16, 1) == "-" }
function is_owned(t, c) {
    return c ~ /^KUBE-/ && t ~ /^(mangle|filter|nat)$/ && (c ~ /^KUBE-PROXY-(CANARY|GENERATION|GEN-[0-9A-F]+)$/ ||
        t == "nat" && (is_service(c) || c ~ /^KUBE-(SERVICES|NODEPORTS|POSTROUTING|MARK-MASQ|NODE-PORT|LOAD-BALANCER|(PORTALS|NODEPORT)-(CONTAINER|HOST))$/) ||
        t == "filter" && c ~ /^KUBE-((EXTERNAL-)?SERVICES|FORWARD|NODEPORTS|((PROXY|SOURCE-RANGES)-)?FIREWALL|NODE-PORT|NODEPORT-NON-LOCAL|IPVS-(OUT-)?FILTER)$/)
}
# A jump has at most one match beside a comment of kube-proxy. kubelet has KUBE-FIREWALL without one, too.
function is_jump(t, rule,   c) {
    if (!sub(/^-A (INPUT|FORWARD|OUTPUT|PREROUTING|POSTROUTING) ((-m conntrack --ctstate NEW |-m addrtype --dst-type LOCAL )?-m comment --comment )?/, "", rule)) return 0
    c = substr(rule, index(rule, "-j ") + 3)
    return t != "mangle" && is_owned(t, c) && !is_service(c) && (rule == "-j KUBE-FIREWALL" ||
        rule ~ /^"(kube(rnetes|-proxy) [a-z -]+|handle (ClusterIPs|service NodePorts); NOTE: this must be [a-zA-Z ]+|Ensure that non-local NodePort traffic can flow)" -j KUBE-[A-Z-]+$/)
}
