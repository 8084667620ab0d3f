# Is this a set of ours? Names are cut to 31 characters; KUBE-AKP-N is one that is built aside.
function our_set(name) {
    return name ~ /^KUBE-(6-)?(LOOP-BACK|CLUSTER-IP|EXTERNAL-IP(-LOCAL)?|LOAD-BALANCER(-FW|-LOCAL|-SOURCE-IP|-SOURCE-CIDR?)?|NODE-PORT(-LOCAL)?-(TCP|UDP|SCTP-HASH?)|HEALTH-CHECK-NODE-PORT|IPVS-IPS|AKP-[0-9]+)$/
}
