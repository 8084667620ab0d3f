"""Whole examples in iptables mode: manifests in, every rule out, in the form in which iptables-save prints them."""

from __future__ import annotations

import re

from agentless_kube_proxy.backends.state import State

from tests.unit.build import NO_NFACCT, endpoint, file, node, port, render, service, slice_of, text

P80 = [port(80, "p80")]

SIX_SERVICES = [
    node("test-node", "192.168.0.2"),
    # a plain ClusterIP
    service("svc1", "ns1", clusterIP="172.30.0.41", ports=P80),
    slice_of("svc1", endpoint("10.180.0.1", node=None), namespace="ns1", ports=P80),
    # a load balancer of policy Local with an external IP, and no endpoint on this node
    service(
        "svc2",
        "ns2",
        type="LoadBalancer",
        clusterIP="172.30.0.42",
        ports=[port(80, "p80", nodePort=3001)],
        externalTrafficPolicy="Local",
        externalIPs=["192.168.99.22"],
        healthCheckNodePort=30000,
        ingress=("1.2.3.4",),
    ),
    slice_of("svc2", endpoint("10.180.0.2", node="elsewhere"), namespace="ns2", ports=P80),
    # a NodePort
    service("svc3", "ns3", type="NodePort", clusterIP="172.30.0.43", ports=[port(80, "p80", nodePort=3003)]),
    slice_of("svc3", endpoint("10.180.0.3", node=None), namespace="ns3", ports=P80),
    # an external IP, and two endpoints
    service(
        "svc4",
        "ns4",
        type="NodePort",
        clusterIP="172.30.0.44",
        ports=[port(80, "p80", nodePort=3004)],
        externalIPs=["192.168.99.33"],
    ),
    slice_of(
        "svc4", endpoint("10.180.0.5", node="test-node"), endpoint("10.180.0.4", node=None), namespace="ns4", ports=P80
    ),
    # a load balancer with a source range and session affinity
    service(
        "svc5",
        "ns5",
        type="LoadBalancer",
        clusterIP="172.30.0.45",
        ports=[port(80, "p80", nodePort=3002)],
        loadBalancerSourceRanges=[" 203.0.113.0/25"],
        sessionAffinity="ClientIP",
        ingress=("5.6.7.8",),
    ),
    slice_of("svc5", endpoint("10.180.0.3", node=None), namespace="ns5", ports=P80),
    # no endpoints
    service("svc6", "ns6", clusterIP="172.30.0.46", ports=P80),
]

# The three files of IPv4, one after the other.
SIX_SERVICES_RULES = """\
# node test-node, iptables mode, IPv4, generation GENERATION
*nat
:KUBE-MARK-MASQ - [0:0]
# ns1/svc1:p80 tcp
:KUBE-SVC-XPGD46QRK7WJZT7O - [0:0]
:KUBE-SEP-SXIVWICOYRO3J4NJ - [0:0]
-A KUBE-SVC-XPGD46QRK7WJZT7O ! -s 10.0.0.0/8 -d 172.30.0.41/32 -p tcp -m comment --comment "ns1/svc1:p80 cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-XPGD46QRK7WJZT7O -m comment --comment "ns1/svc1:p80 -> 10.180.0.1:80" -j KUBE-SEP-SXIVWICOYRO3J4NJ
-A KUBE-SEP-SXIVWICOYRO3J4NJ -s 10.180.0.1/32 -m comment --comment "ns1/svc1:p80" -j KUBE-MARK-MASQ
-A KUBE-SEP-SXIVWICOYRO3J4NJ -p tcp -m comment --comment "ns1/svc1:p80" -m tcp -j DNAT --to-destination 10.180.0.1:80
# ns2/svc2:p80 tcp
:KUBE-SVC-GNZBNJ2PO5MGZ6GT - [0:0]
:KUBE-SEP-RS4RBKLTHTF2IUXJ - [0:0]
-A KUBE-SVC-GNZBNJ2PO5MGZ6GT ! -s 10.0.0.0/8 -d 172.30.0.42/32 -p tcp -m comment --comment "ns2/svc2:p80 cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-GNZBNJ2PO5MGZ6GT -m comment --comment "ns2/svc2:p80 -> 10.180.0.2:80" -j KUBE-SEP-RS4RBKLTHTF2IUXJ
-A KUBE-SEP-RS4RBKLTHTF2IUXJ -s 10.180.0.2/32 -m comment --comment "ns2/svc2:p80" -j KUBE-MARK-MASQ
-A KUBE-SEP-RS4RBKLTHTF2IUXJ -p tcp -m comment --comment "ns2/svc2:p80" -m tcp -j DNAT --to-destination 10.180.0.2:80
# ns3/svc3:p80 tcp
:KUBE-SVC-X27LE4BHSL4DOUIK - [0:0]
:KUBE-SEP-OYPFS5VJICHGATKP - [0:0]
-A KUBE-SVC-X27LE4BHSL4DOUIK ! -s 10.0.0.0/8 -d 172.30.0.43/32 -p tcp -m comment --comment "ns3/svc3:p80 cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-X27LE4BHSL4DOUIK -m comment --comment "ns3/svc3:p80 -> 10.180.0.3:80" -j KUBE-SEP-OYPFS5VJICHGATKP
-A KUBE-SEP-OYPFS5VJICHGATKP -s 10.180.0.3/32 -m comment --comment "ns3/svc3:p80" -j KUBE-MARK-MASQ
-A KUBE-SEP-OYPFS5VJICHGATKP -p tcp -m comment --comment "ns3/svc3:p80" -m tcp -j DNAT --to-destination 10.180.0.3:80
# ns4/svc4:p80 tcp
:KUBE-SVC-4SW47YFZTEDKD3PK - [0:0]
:KUBE-SEP-UKSFD7AGPMPPLUHC - [0:0]
:KUBE-SEP-C6EBXVWJJZMIWKLZ - [0:0]
-A KUBE-SVC-4SW47YFZTEDKD3PK ! -s 10.0.0.0/8 -d 172.30.0.44/32 -p tcp -m comment --comment "ns4/svc4:p80 cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-4SW47YFZTEDKD3PK -m comment --comment "ns4/svc4:p80 -> 10.180.0.4:80" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-UKSFD7AGPMPPLUHC
-A KUBE-SVC-4SW47YFZTEDKD3PK -m comment --comment "ns4/svc4:p80 -> 10.180.0.5:80" -j KUBE-SEP-C6EBXVWJJZMIWKLZ
-A KUBE-SEP-UKSFD7AGPMPPLUHC -s 10.180.0.4/32 -m comment --comment "ns4/svc4:p80" -j KUBE-MARK-MASQ
-A KUBE-SEP-UKSFD7AGPMPPLUHC -p tcp -m comment --comment "ns4/svc4:p80" -m tcp -j DNAT --to-destination 10.180.0.4:80
-A KUBE-SEP-C6EBXVWJJZMIWKLZ -s 10.180.0.5/32 -m comment --comment "ns4/svc4:p80" -j KUBE-MARK-MASQ
-A KUBE-SEP-C6EBXVWJJZMIWKLZ -p tcp -m comment --comment "ns4/svc4:p80" -m tcp -j DNAT --to-destination 10.180.0.5:80
# ns5/svc5:p80 tcp
:KUBE-SVC-NUKIZ6OKUXPJNT4C - [0:0]
:KUBE-SEP-I77PXRDZVX7PMWMN - [0:0]
-A KUBE-SVC-NUKIZ6OKUXPJNT4C ! -s 10.0.0.0/8 -d 172.30.0.45/32 -p tcp -m comment --comment "ns5/svc5:p80 cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-NUKIZ6OKUXPJNT4C -m comment --comment "ns5/svc5:p80 -> 10.180.0.3:80" -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-I77PXRDZVX7PMWMN --mask 255.255.255.255 --rsource -j KUBE-SEP-I77PXRDZVX7PMWMN
-A KUBE-SVC-NUKIZ6OKUXPJNT4C -m comment --comment "ns5/svc5:p80 -> 10.180.0.3:80" -j KUBE-SEP-I77PXRDZVX7PMWMN
-A KUBE-SEP-I77PXRDZVX7PMWMN -s 10.180.0.3/32 -m comment --comment "ns5/svc5:p80" -j KUBE-MARK-MASQ
-A KUBE-SEP-I77PXRDZVX7PMWMN -p tcp -m comment --comment "ns5/svc5:p80" -m recent --set --name KUBE-SEP-I77PXRDZVX7PMWMN --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination 10.180.0.3:80
COMMIT
# node test-node, iptables mode, IPv4, generation GENERATION
*nat
# ns2/svc2:p80 tcp
:KUBE-EXT-GNZBNJ2PO5MGZ6GT - [0:0]
-A KUBE-EXT-GNZBNJ2PO5MGZ6GT -s 10.0.0.0/8 -m comment --comment "pod traffic for ns2/svc2:p80 external destinations" -j KUBE-SVC-GNZBNJ2PO5MGZ6GT
-A KUBE-EXT-GNZBNJ2PO5MGZ6GT -m comment --comment "masquerade LOCAL traffic for ns2/svc2:p80 external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-EXT-GNZBNJ2PO5MGZ6GT -m comment --comment "route LOCAL traffic for ns2/svc2:p80 external destinations" -m addrtype --src-type LOCAL -j KUBE-SVC-GNZBNJ2PO5MGZ6GT
# ns3/svc3:p80 tcp
:KUBE-EXT-X27LE4BHSL4DOUIK - [0:0]
-A KUBE-EXT-X27LE4BHSL4DOUIK -m comment --comment "masquerade traffic for ns3/svc3:p80 external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-X27LE4BHSL4DOUIK -j KUBE-SVC-X27LE4BHSL4DOUIK
# ns4/svc4:p80 tcp
:KUBE-EXT-4SW47YFZTEDKD3PK - [0:0]
-A KUBE-EXT-4SW47YFZTEDKD3PK -m comment --comment "masquerade traffic for ns4/svc4:p80 external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-4SW47YFZTEDKD3PK -j KUBE-SVC-4SW47YFZTEDKD3PK
# ns5/svc5:p80 tcp
:KUBE-FW-NUKIZ6OKUXPJNT4C - [0:0]
:KUBE-EXT-NUKIZ6OKUXPJNT4C - [0:0]
-A KUBE-EXT-NUKIZ6OKUXPJNT4C -m comment --comment "masquerade traffic for ns5/svc5:p80 external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-NUKIZ6OKUXPJNT4C -j KUBE-SVC-NUKIZ6OKUXPJNT4C
# all services
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
-A KUBE-SERVICES -d 172.30.0.41/32 -p tcp -m comment --comment "ns1/svc1:p80 cluster IP" -m tcp --dport 80 -j KUBE-SVC-XPGD46QRK7WJZT7O
-A KUBE-SERVICES -d 172.30.0.42/32 -p tcp -m comment --comment "ns2/svc2:p80 cluster IP" -m tcp --dport 80 -j KUBE-SVC-GNZBNJ2PO5MGZ6GT
-A KUBE-SERVICES -d 192.168.99.22/32 -p tcp -m comment --comment "ns2/svc2:p80 external IP" -m tcp --dport 80 -j KUBE-EXT-GNZBNJ2PO5MGZ6GT
-A KUBE-SERVICES -d 1.2.3.4/32 -p tcp -m comment --comment "ns2/svc2:p80 loadbalancer IP" -m tcp --dport 80 -j KUBE-EXT-GNZBNJ2PO5MGZ6GT
-A KUBE-SERVICES -d 172.30.0.43/32 -p tcp -m comment --comment "ns3/svc3:p80 cluster IP" -m tcp --dport 80 -j KUBE-SVC-X27LE4BHSL4DOUIK
-A KUBE-SERVICES -d 172.30.0.44/32 -p tcp -m comment --comment "ns4/svc4:p80 cluster IP" -m tcp --dport 80 -j KUBE-SVC-4SW47YFZTEDKD3PK
-A KUBE-SERVICES -d 192.168.99.33/32 -p tcp -m comment --comment "ns4/svc4:p80 external IP" -m tcp --dport 80 -j KUBE-EXT-4SW47YFZTEDKD3PK
-A KUBE-SERVICES -d 172.30.0.45/32 -p tcp -m comment --comment "ns5/svc5:p80 cluster IP" -m tcp --dport 80 -j KUBE-SVC-NUKIZ6OKUXPJNT4C
-A KUBE-SERVICES -d 5.6.7.8/32 -p tcp -m comment --comment "ns5/svc5:p80 loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-NUKIZ6OKUXPJNT4C
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m comment --comment "ns2/svc2:p80" -m tcp --dport 3001 -m nfacct --nfacct-name localhost_nps_accepted_pkts -j KUBE-EXT-GNZBNJ2PO5MGZ6GT
-A KUBE-NODEPORTS -p tcp -m comment --comment "ns2/svc2:p80" -m tcp --dport 3001 -j KUBE-EXT-GNZBNJ2PO5MGZ6GT
-A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m comment --comment "ns3/svc3:p80" -m tcp --dport 3003 -m nfacct --nfacct-name localhost_nps_accepted_pkts -j KUBE-EXT-X27LE4BHSL4DOUIK
-A KUBE-NODEPORTS -p tcp -m comment --comment "ns3/svc3:p80" -m tcp --dport 3003 -j KUBE-EXT-X27LE4BHSL4DOUIK
-A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m comment --comment "ns4/svc4:p80" -m tcp --dport 3004 -m nfacct --nfacct-name localhost_nps_accepted_pkts -j KUBE-EXT-4SW47YFZTEDKD3PK
-A KUBE-NODEPORTS -p tcp -m comment --comment "ns4/svc4:p80" -m tcp --dport 3004 -j KUBE-EXT-4SW47YFZTEDKD3PK
-A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m comment --comment "ns5/svc5:p80" -m tcp --dport 3002 -m nfacct --nfacct-name localhost_nps_accepted_pkts -j KUBE-EXT-NUKIZ6OKUXPJNT4C
-A KUBE-NODEPORTS -p tcp -m comment --comment "ns5/svc5:p80" -m tcp --dport 3002 -j KUBE-EXT-NUKIZ6OKUXPJNT4C
:KUBE-PROXY-GEN-SHORT - [0:0]
-A KUBE-PROXY-GEN-SHORT -m comment --comment GENERATION
COMMIT
*filter
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
-A KUBE-SERVICES -d 172.30.0.46/32 -p tcp -m comment --comment "ns6/svc6:p80 has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
-A KUBE-EXTERNAL-SERVICES -d 192.168.99.22/32 -p tcp -m comment --comment "ns2/svc2:p80 has no local endpoints" -m tcp --dport 80 -j DROP
-A KUBE-EXTERNAL-SERVICES -d 1.2.3.4/32 -p tcp -m comment --comment "ns2/svc2:p80 has no local endpoints" -m tcp --dport 80 -j DROP
-A KUBE-EXTERNAL-SERVICES -p tcp -m comment --comment "ns2/svc2:p80 has no local endpoints" -m addrtype --dst-type LOCAL -m tcp --dport 3001 -j DROP
:KUBE-PROXY-GEN-SHORT - [0:0]
-A KUBE-PROXY-GEN-SHORT -m comment --comment GENERATION
COMMIT
# node test-node, iptables mode, IPv4
*nat
# ns5/svc5:p80 tcp
:KUBE-FW-NUKIZ6OKUXPJNT4C - [0:0]
-A KUBE-FW-NUKIZ6OKUXPJNT4C -s 203.0.113.0/25 -m comment --comment "ns5/svc5:p80 loadbalancer IP" -j KUBE-EXT-NUKIZ6OKUXPJNT4C
-A KUBE-FW-NUKIZ6OKUXPJNT4C -m comment --comment "other traffic to ns5/svc5:p80 will be dropped by KUBE-PROXY-FIREWALL"
# all services
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A KUBE-FORWARD -m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-NODEPORTS -p tcp -m comment --comment "ns2/svc2:p80 health check node port" -m tcp --dport 30000 -j ACCEPT
-A KUBE-PROXY-FIREWALL -d 5.6.7.8/32 -p tcp -m comment --comment "ns5/svc5:p80 traffic not accepted by KUBE-FW-NUKIZ6OKUXPJNT4C" -m tcp --dport 80 -j DROP
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I INPUT -j KUBE-FIREWALL
-I OUTPUT -j KUBE-FIREWALL
COMMIT
*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
"""


def generic(state: State, name: str) -> str:
    """All files of a tool, with words for the generation."""
    short = f"GEN-{state.generation[:13].upper()}"
    return file(state, name).replace(short, "GEN-SHORT").replace(state.generation, "GENERATION")


def test_six_services_from_the_first_line_to_the_last() -> None:
    state = render(*SIX_SERVICES, on="test-node", clusterCIDR="10.0.0.0/8")
    assert generic(state, "iptables.rules") == SIX_SERVICES_RULES


def test_a_cluster_without_services_has_the_frame_in_both_families() -> None:
    state = render(clusterCIDR="10.244.0.0/16")
    assert generic(state, "ip6tables.rules") == text("""
        # node n1, iptables mode, IPv6, generation GENERATION
        *nat
        :KUBE-MARK-MASQ - [0:0]
        COMMIT
        # node n1, iptables mode, IPv6, generation GENERATION
        *nat
        # all services
        :KUBE-SERVICES - [0:0]
        :KUBE-NODEPORTS - [0:0]
        -A KUBE-SERVICES ! -d ::1/128 -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
        :KUBE-PROXY-GEN-SHORT - [0:0]
        -A KUBE-PROXY-GEN-SHORT -m comment --comment GENERATION
        COMMIT
        *filter
        :KUBE-SERVICES - [0:0]
        :KUBE-EXTERNAL-SERVICES - [0:0]
        :KUBE-PROXY-GEN-SHORT - [0:0]
        -A KUBE-PROXY-GEN-SHORT -m comment --comment GENERATION
        COMMIT
        # node n1, iptables mode, IPv6
        *nat
        # all services
        :KUBE-POSTROUTING - [0:0]
        :KUBE-MARK-MASQ - [0:0]
        :KUBE-PROXY-CANARY - [0:0]
        -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
        -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
        -A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
        -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
        -I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
        COMMIT
        *filter
        :KUBE-FORWARD - [0:0]
        :KUBE-NODEPORTS - [0:0]
        :KUBE-PROXY-FIREWALL - [0:0]
        :KUBE-FIREWALL - [0:0]
        :KUBE-PROXY-CANARY - [0:0]
        -A KUBE-FORWARD -m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP
        -A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
        -A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
        -I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
        -I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
        -I INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
        -I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
        -I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
        -I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
        -I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
        -I INPUT -j KUBE-FIREWALL
        -I OUTPUT -j KUBE-FIREWALL
        COMMIT
        *mangle
        :KUBE-PROXY-CANARY - [0:0]
        COMMIT
    """)


WEB = service(
    "web",
    "shop",
    type="LoadBalancer",
    clusterIP="10.96.7.7",
    ports=[port(80, nodePort=31080)],
    externalTrafficPolicy="Local",
    healthCheckNodePort=32100,
    loadBalancerSourceRanges=["203.0.113.0/24", "192.168.0.0/16"],
    ingress=("198.51.100.9",),
)
WEB_SLICE = slice_of("web", "10.244.1.2", "10.244.1.10", endpoint("10.244.2.7", node="n2"))


def test_a_shop_behind_a_load_balancer_of_policy_local() -> None:
    rules = file(render(WEB, WEB_SLICE, node("n1", "192.168.0.2"), facts=NO_NFACCT), "iptables.rules")
    assert [line for line in rules.splitlines() if re.search(r"shop/web|67NZLRHBNDSAWJRO", line)] == text("""
        # shop/web:http tcp
        :KUBE-SVC-67NZLRHBNDSAWJRO - [0:0]
        :KUBE-SVL-67NZLRHBNDSAWJRO - [0:0]
        -A KUBE-SVC-67NZLRHBNDSAWJRO ! -s 10.244.0.0/16 -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
        -A KUBE-SVC-67NZLRHBNDSAWJRO -m comment --comment "shop/web:http -> 10.244.1.10:8080" -m statistic --mode random --probability 0.33333333349 -j KUBE-SEP-FZQ6KZLGXRSKN2AD
        -A KUBE-SVC-67NZLRHBNDSAWJRO -m comment --comment "shop/web:http -> 10.244.1.2:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-XTJTEC7KOHLCQM25
        -A KUBE-SVC-67NZLRHBNDSAWJRO -m comment --comment "shop/web:http -> 10.244.2.7:8080" -j KUBE-SEP-DYSIX5QMVXZZP7LU
        -A KUBE-SVL-67NZLRHBNDSAWJRO -m comment --comment "shop/web:http -> 10.244.1.10:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-FZQ6KZLGXRSKN2AD
        -A KUBE-SVL-67NZLRHBNDSAWJRO -m comment --comment "shop/web:http -> 10.244.1.2:8080" -j KUBE-SEP-XTJTEC7KOHLCQM25
        -A KUBE-SEP-FZQ6KZLGXRSKN2AD -s 10.244.1.10/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ
        -A KUBE-SEP-FZQ6KZLGXRSKN2AD -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.1.10:8080
        -A KUBE-SEP-XTJTEC7KOHLCQM25 -s 10.244.1.2/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ
        -A KUBE-SEP-XTJTEC7KOHLCQM25 -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.1.2:8080
        -A KUBE-SEP-DYSIX5QMVXZZP7LU -s 10.244.2.7/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ
        -A KUBE-SEP-DYSIX5QMVXZZP7LU -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.2.7:8080
        # shop/web:http tcp
        :KUBE-FW-67NZLRHBNDSAWJRO - [0:0]
        :KUBE-EXT-67NZLRHBNDSAWJRO - [0:0]
        -A KUBE-EXT-67NZLRHBNDSAWJRO -s 10.244.0.0/16 -m comment --comment "pod traffic for shop/web:http external destinations" -j KUBE-SVC-67NZLRHBNDSAWJRO
        -A KUBE-EXT-67NZLRHBNDSAWJRO -m comment --comment "masquerade LOCAL traffic for shop/web:http external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
        -A KUBE-EXT-67NZLRHBNDSAWJRO -m comment --comment "route LOCAL traffic for shop/web:http external destinations" -m addrtype --src-type LOCAL -j KUBE-SVC-67NZLRHBNDSAWJRO
        -A KUBE-EXT-67NZLRHBNDSAWJRO -j KUBE-SVL-67NZLRHBNDSAWJRO
        -A KUBE-SERVICES -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-67NZLRHBNDSAWJRO
        -A KUBE-SERVICES -d 198.51.100.9/32 -p tcp -m comment --comment "shop/web:http loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-67NZLRHBNDSAWJRO
        -A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http" -m tcp --dport 31080 -j KUBE-EXT-67NZLRHBNDSAWJRO
        # shop/web:http tcp
        :KUBE-FW-67NZLRHBNDSAWJRO - [0:0]
        -A KUBE-FW-67NZLRHBNDSAWJRO -s 203.0.113.0/24 -m comment --comment "shop/web:http loadbalancer IP" -j KUBE-EXT-67NZLRHBNDSAWJRO
        -A KUBE-FW-67NZLRHBNDSAWJRO -s 192.168.0.0/16 -m comment --comment "shop/web:http loadbalancer IP" -j KUBE-EXT-67NZLRHBNDSAWJRO
        -A KUBE-FW-67NZLRHBNDSAWJRO -s 198.51.100.9/32 -m comment --comment "shop/web:http loadbalancer IP" -j KUBE-EXT-67NZLRHBNDSAWJRO
        -A KUBE-FW-67NZLRHBNDSAWJRO -m comment --comment "other traffic to shop/web:http will be dropped by KUBE-PROXY-FIREWALL"
        -A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http health check node port" -m tcp --dport 32100 -j ACCEPT
        -A KUBE-PROXY-FIREWALL -d 198.51.100.9/32 -p tcp -m comment --comment "shop/web:http traffic not accepted by KUBE-FW-67NZLRHBNDSAWJRO" -m tcp --dport 80 -j DROP
    """).splitlines()


def test_ipv6_with_affinity_and_without_endpoints() -> None:
    state = render(
        service(
            "dns",
            clusterIP="fd00:10:96::a",
            ports=[port(53, "dns", "UDP"), port(9153, "metrics")],
            sessionAffinity="ClientIP",
            sessionAffinityConfig={"clientIP": {"timeoutSeconds": 300}},
        ),
        slice_of("dns", "fd00:10:244:1::5", "fd00:10:244:1::15", ports=[port(5353, "dns", "UDP")]),
    )
    rules = [line for line in file(state, "ip6tables.rules").splitlines() if "shop/dns" in line and line[0] == "-"]
    mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    assert (
        rules
        == text(f"""
        -A KUBE-SVC-4XI5CTFPAP7AFMBM ! -s fd00:10:244::/56 -d fd00:10:96::a/128 -p udp -m comment --comment "shop/dns:dns cluster IP" -m udp --dport 53 -j KUBE-MARK-MASQ
        -A KUBE-SVC-4XI5CTFPAP7AFMBM -m comment --comment "shop/dns:dns -> [fd00:10:244:1::15]:5353" -m recent --rcheck --seconds 300 --reap --name KUBE-SEP-X5EDM4LJIS23TBGQ --mask {mask} --rsource -j KUBE-SEP-X5EDM4LJIS23TBGQ
        -A KUBE-SVC-4XI5CTFPAP7AFMBM -m comment --comment "shop/dns:dns -> [fd00:10:244:1::5]:5353" -m recent --rcheck --seconds 300 --reap --name KUBE-SEP-UV5UBOTL5N22VXFD --mask {mask} --rsource -j KUBE-SEP-UV5UBOTL5N22VXFD
        -A KUBE-SVC-4XI5CTFPAP7AFMBM -m comment --comment "shop/dns:dns -> [fd00:10:244:1::15]:5353" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-X5EDM4LJIS23TBGQ
        -A KUBE-SVC-4XI5CTFPAP7AFMBM -m comment --comment "shop/dns:dns -> [fd00:10:244:1::5]:5353" -j KUBE-SEP-UV5UBOTL5N22VXFD
        -A KUBE-SEP-X5EDM4LJIS23TBGQ -s fd00:10:244:1::15/128 -m comment --comment "shop/dns:dns" -j KUBE-MARK-MASQ
        -A KUBE-SEP-X5EDM4LJIS23TBGQ -p udp -m comment --comment "shop/dns:dns" -m recent --set --name KUBE-SEP-X5EDM4LJIS23TBGQ --mask {mask} --rsource -m udp -j DNAT --to-destination [fd00:10:244:1::15]:5353
        -A KUBE-SEP-UV5UBOTL5N22VXFD -s fd00:10:244:1::5/128 -m comment --comment "shop/dns:dns" -j KUBE-MARK-MASQ
        -A KUBE-SEP-UV5UBOTL5N22VXFD -p udp -m comment --comment "shop/dns:dns" -m recent --set --name KUBE-SEP-UV5UBOTL5N22VXFD --mask {mask} --rsource -m udp -j DNAT --to-destination [fd00:10:244:1::5]:5353
        -A KUBE-SERVICES -d fd00:10:96::a/128 -p udp -m comment --comment "shop/dns:dns cluster IP" -m udp --dport 53 -j KUBE-SVC-4XI5CTFPAP7AFMBM
        -A KUBE-SERVICES -d fd00:10:96::a/128 -p tcp -m comment --comment "shop/dns:metrics has no endpoints" -m tcp --dport 9153 -j REJECT --reject-with icmp6-port-unreachable
    """).splitlines()
    )
    assert "shop/dns" not in file(state, "iptables.rules")
