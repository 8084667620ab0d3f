"""Whole examples in nftables mode: manifests in, every command out, in the order in which nft runs them."""

from __future__ import annotations

import re

from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State

from tests.unit.build import render

from .test_iptables import SIX_SERVICES

SIX_SERVICES_COMMANDS = """\
# nftables-1-endpoints.nft
add table ip kube-proxy { comment "rules for kube-proxy" ; }
add set ip kube-proxy cluster-ips { type ipv4_addr ; comment "Active ClusterIPs" ; }
add set ip kube-proxy hairpin-connections { type ipv4_addr . ipv4_addr . inet_proto . inet_service ; comment "service hairpin connections" ; }
add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; comment "ClusterIP, ExternalIP and LoadBalancer IP traffic" ; }
add map ip kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; comment "NodePort traffic" ; }
add map ip kube-proxy firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict ; comment "destinations that are subject to LoadBalancerSourceRanges" ; }
add map ip kube-proxy no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict ; comment "vmap to drop or reject packets to services with no endpoints" ; }
add map ip kube-proxy no-endpoint-nodeports { type inet_proto . inet_service : verdict ; comment "vmap to drop or reject packets to service nodeports with no endpoints" ; }
add chain ip kube-proxy reject-chain { comment "helper for @no-endpoint-services / @no-endpoint-nodeports" ; }
flush set ip kube-proxy hairpin-connections
add element ip kube-proxy hairpin-connections { 10.180.0.5 . 10.180.0.5 . tcp . 80 }

# ns1/svc1:p80 tcp
add chain ip kube-proxy service-ULMVA6XW-ns1/svc1/tcp/p80
flush chain ip kube-proxy service-ULMVA6XW-ns1/svc1/tcp/p80
add rule ip kube-proxy service-ULMVA6XW-ns1/svc1/tcp/p80 meta l4proto tcp dnat to 10.180.0.1:80

# ns2/svc2:p80 tcp
add chain ip kube-proxy service-42NFTM6N-ns2/svc2/tcp/p80
flush chain ip kube-proxy service-42NFTM6N-ns2/svc2/tcp/p80
add rule ip kube-proxy service-42NFTM6N-ns2/svc2/tcp/p80 meta l4proto tcp dnat to 10.180.0.2:80

# ns3/svc3:p80 tcp
add chain ip kube-proxy service-4AT6LBPK-ns3/svc3/tcp/p80
flush chain ip kube-proxy service-4AT6LBPK-ns3/svc3/tcp/p80
add rule ip kube-proxy service-4AT6LBPK-ns3/svc3/tcp/p80 meta l4proto tcp dnat to 10.180.0.3:80

# ns4/svc4:p80 tcp
add chain ip kube-proxy service-LAUZTJTB-ns4/svc4/tcp/p80
flush chain ip kube-proxy service-LAUZTJTB-ns4/svc4/tcp/p80
add rule ip kube-proxy service-LAUZTJTB-ns4/svc4/tcp/p80 meta l4proto tcp dnat ip addr . port to numgen random mod 2 map { 0 : 10.180.0.4 . 80 , 1 : 10.180.0.5 . 80 }

# ns5/svc5:p80 tcp
add set ip kube-proxy affinity-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80 { type ipv4_addr ; flags dynamic,timeout ; timeout 10800s ; }
add chain ip kube-proxy endpoint-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80
flush chain ip kube-proxy endpoint-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80
add chain ip kube-proxy service-HVFWP5L3-ns5/svc5/tcp/p80
flush chain ip kube-proxy service-HVFWP5L3-ns5/svc5/tcp/p80
add rule ip kube-proxy endpoint-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80 update @affinity-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80 { ip saddr }
add rule ip kube-proxy endpoint-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80 meta l4proto tcp dnat to 10.180.0.3:80
add rule ip kube-proxy service-HVFWP5L3-ns5/svc5/tcp/p80 ip saddr @affinity-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80 goto endpoint-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80
add rule ip kube-proxy service-HVFWP5L3-ns5/svc5/tcp/p80 numgen random mod 1 vmap { 0 : goto endpoint-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80 }

# nftables-2-dispatch.nft
flush map ip kube-proxy service-ips
flush map ip kube-proxy service-nodeports
flush map ip kube-proxy no-endpoint-services
flush map ip kube-proxy no-endpoint-nodeports

# ns1/svc1:p80 tcp
add element ip kube-proxy service-ips { 172.30.0.41 . tcp . 80 : goto service-ULMVA6XW-ns1/svc1/tcp/p80 }

# ns2/svc2:p80 tcp
add chain ip kube-proxy external-42NFTM6N-ns2/svc2/tcp/p80
flush chain ip kube-proxy external-42NFTM6N-ns2/svc2/tcp/p80
add rule ip kube-proxy external-42NFTM6N-ns2/svc2/tcp/p80 ip saddr 10.0.0.0/8 goto service-42NFTM6N-ns2/svc2/tcp/p80 comment "short-circuit pod traffic"
add rule ip kube-proxy external-42NFTM6N-ns2/svc2/tcp/p80 fib saddr type local mark set mark or 0x00004000 comment "masquerade local traffic"
add rule ip kube-proxy external-42NFTM6N-ns2/svc2/tcp/p80 fib saddr type local goto service-42NFTM6N-ns2/svc2/tcp/p80 comment "short-circuit local traffic"
add element ip kube-proxy service-ips { 172.30.0.42 . tcp . 80 : goto service-42NFTM6N-ns2/svc2/tcp/p80 }
add element ip kube-proxy service-ips { 192.168.99.22 . tcp . 80 : goto external-42NFTM6N-ns2/svc2/tcp/p80 }
add element ip kube-proxy service-ips { 1.2.3.4 . tcp . 80 : goto external-42NFTM6N-ns2/svc2/tcp/p80 }
add element ip kube-proxy no-endpoint-services { 192.168.99.22 . tcp . 80 comment "ns2/svc2:p80" : drop }
add element ip kube-proxy no-endpoint-services { 1.2.3.4 . tcp . 80 comment "ns2/svc2:p80" : drop }
add element ip kube-proxy service-nodeports { tcp . 3001 : goto external-42NFTM6N-ns2/svc2/tcp/p80 }
add element ip kube-proxy no-endpoint-nodeports { tcp . 3001 comment "ns2/svc2:p80" : drop }

# ns3/svc3:p80 tcp
add chain ip kube-proxy external-4AT6LBPK-ns3/svc3/tcp/p80
flush chain ip kube-proxy external-4AT6LBPK-ns3/svc3/tcp/p80
add rule ip kube-proxy external-4AT6LBPK-ns3/svc3/tcp/p80 mark set mark or 0x00004000 comment "masquerade"
add rule ip kube-proxy external-4AT6LBPK-ns3/svc3/tcp/p80 goto service-4AT6LBPK-ns3/svc3/tcp/p80
add element ip kube-proxy service-ips { 172.30.0.43 . tcp . 80 : goto service-4AT6LBPK-ns3/svc3/tcp/p80 }
add element ip kube-proxy service-nodeports { tcp . 3003 : goto external-4AT6LBPK-ns3/svc3/tcp/p80 }

# ns4/svc4:p80 tcp
add chain ip kube-proxy external-LAUZTJTB-ns4/svc4/tcp/p80
flush chain ip kube-proxy external-LAUZTJTB-ns4/svc4/tcp/p80
add rule ip kube-proxy external-LAUZTJTB-ns4/svc4/tcp/p80 mark set mark or 0x00004000 comment "masquerade"
add rule ip kube-proxy external-LAUZTJTB-ns4/svc4/tcp/p80 goto service-LAUZTJTB-ns4/svc4/tcp/p80
add element ip kube-proxy service-ips { 172.30.0.44 . tcp . 80 : goto service-LAUZTJTB-ns4/svc4/tcp/p80 }
add element ip kube-proxy service-ips { 192.168.99.33 . tcp . 80 : goto external-LAUZTJTB-ns4/svc4/tcp/p80 }
add element ip kube-proxy service-nodeports { tcp . 3004 : goto external-LAUZTJTB-ns4/svc4/tcp/p80 }

# ns5/svc5:p80 tcp
add chain ip kube-proxy external-HVFWP5L3-ns5/svc5/tcp/p80
flush chain ip kube-proxy external-HVFWP5L3-ns5/svc5/tcp/p80
add rule ip kube-proxy external-HVFWP5L3-ns5/svc5/tcp/p80 mark set mark or 0x00004000 comment "masquerade"
add rule ip kube-proxy external-HVFWP5L3-ns5/svc5/tcp/p80 goto service-HVFWP5L3-ns5/svc5/tcp/p80
add element ip kube-proxy service-ips { 172.30.0.45 . tcp . 80 : goto service-HVFWP5L3-ns5/svc5/tcp/p80 }
add element ip kube-proxy service-ips { 5.6.7.8 . tcp . 80 : goto external-HVFWP5L3-ns5/svc5/tcp/p80 }
add element ip kube-proxy service-nodeports { tcp . 3002 : goto external-HVFWP5L3-ns5/svc5/tcp/p80 }

# ns6/svc6:p80 tcp
add element ip kube-proxy no-endpoint-services { 172.30.0.46 . tcp . 80 comment "ns6/svc6:p80" : goto reject-chain }

add chain ip kube-proxy gen-GENERATION

# nftables-3-frontends.nft
add chain ip kube-proxy filter-prerouting-pre-dnat { type filter hook prerouting priority -110 ; }
add chain ip kube-proxy filter-output-pre-dnat { type filter hook output priority -110 ; }
add chain ip kube-proxy filter-input { type filter hook input priority 0 ; }
add chain ip kube-proxy filter-forward { type filter hook forward priority 0 ; }
add chain ip kube-proxy filter-output { type filter hook output priority 0 ; }
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add chain ip kube-proxy nat-output { type nat hook output priority -100 ; }
add chain ip kube-proxy nat-postrouting { type nat hook postrouting priority 100 ; }
add chain ip kube-proxy nodeport-endpoints-check
add chain ip kube-proxy service-endpoints-check
add chain ip kube-proxy firewall-check
add chain ip kube-proxy cluster-ips-check
add chain ip kube-proxy services
add chain ip kube-proxy masquerading
flush set ip kube-proxy cluster-ips
flush map ip kube-proxy firewall-ips
flush chain ip kube-proxy filter-prerouting-pre-dnat
flush chain ip kube-proxy filter-output-pre-dnat
flush chain ip kube-proxy filter-input
flush chain ip kube-proxy filter-forward
flush chain ip kube-proxy filter-output
flush chain ip kube-proxy nat-prerouting
flush chain ip kube-proxy nat-output
flush chain ip kube-proxy nat-postrouting
flush chain ip kube-proxy nodeport-endpoints-check
flush chain ip kube-proxy service-endpoints-check
flush chain ip kube-proxy firewall-check
flush chain ip kube-proxy cluster-ips-check
flush chain ip kube-proxy services
flush chain ip kube-proxy masquerading
flush chain ip kube-proxy reject-chain
add rule ip kube-proxy filter-prerouting-pre-dnat ct state new jump firewall-check
add rule ip kube-proxy filter-output-pre-dnat ct state new jump firewall-check
add rule ip kube-proxy filter-input ct state new jump nodeport-endpoints-check
add rule ip kube-proxy filter-input ct state new jump service-endpoints-check
add rule ip kube-proxy filter-forward ct state new jump service-endpoints-check
add rule ip kube-proxy filter-forward ct state new jump cluster-ips-check
add rule ip kube-proxy filter-output ct state new jump service-endpoints-check
add rule ip kube-proxy filter-output ct state new jump cluster-ips-check
add rule ip kube-proxy nat-prerouting jump services
add rule ip kube-proxy nat-output jump services
add rule ip kube-proxy nat-postrouting jump masquerading
add rule ip kube-proxy nodeport-endpoints-check ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @no-endpoint-nodeports
add rule ip kube-proxy service-endpoints-check ip daddr . meta l4proto . th dport vmap @no-endpoint-services
add rule ip kube-proxy firewall-check ip daddr . meta l4proto . th dport vmap @firewall-ips
add rule ip kube-proxy cluster-ips-check ip daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
add rule ip kube-proxy services ip daddr @cluster-ips ip saddr != 10.0.0.0/8 mark set mark or 0x00004000 comment "masquerade clusterIP traffic from outside cluster"
add rule ip kube-proxy services ip daddr . meta l4proto . th dport vmap @service-ips
add rule ip kube-proxy services fib daddr type local ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @service-nodeports
add rule ip kube-proxy masquerading mark and 0x00004000 != 0 mark set mark xor 0x00004000 masquerade fully-random
add rule ip kube-proxy masquerading ct status dnat ip saddr . ip daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random
add rule ip kube-proxy reject-chain reject

# ns1/svc1:p80 tcp
add element ip kube-proxy cluster-ips { 172.30.0.41 }

# ns2/svc2:p80 tcp
add element ip kube-proxy cluster-ips { 172.30.0.42 }

# ns3/svc3:p80 tcp
add element ip kube-proxy cluster-ips { 172.30.0.43 }

# ns4/svc4:p80 tcp
add element ip kube-proxy cluster-ips { 172.30.0.44 }

# ns5/svc5:p80 tcp
add chain ip kube-proxy firewall-HVFWP5L3-ns5/svc5/tcp/p80
flush chain ip kube-proxy firewall-HVFWP5L3-ns5/svc5/tcp/p80
add rule ip kube-proxy firewall-HVFWP5L3-ns5/svc5/tcp/p80 ip saddr != { 203.0.113.0/25 } drop
add element ip kube-proxy cluster-ips { 172.30.0.45 }
add element ip kube-proxy firewall-ips { 5.6.7.8 . tcp . 80 : goto firewall-HVFWP5L3-ns5/svc5/tcp/p80 }

# ns6/svc6:p80 tcp
add element ip kube-proxy cluster-ips { 172.30.0.46 }

"""

NO_SERVICES_IPV6 = """\
# nftables-1-endpoints.nft
add table ip6 kube-proxy { comment "rules for kube-proxy" ; }
add set ip6 kube-proxy cluster-ips { type ipv6_addr ; comment "Active ClusterIPs" ; }
add set ip6 kube-proxy hairpin-connections { type ipv6_addr . ipv6_addr . inet_proto . inet_service ; comment "service hairpin connections" ; }
add map ip6 kube-proxy service-ips { type ipv6_addr . inet_proto . inet_service : verdict ; comment "ClusterIP, ExternalIP and LoadBalancer IP traffic" ; }
add map ip6 kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; comment "NodePort traffic" ; }
add map ip6 kube-proxy firewall-ips { type ipv6_addr . inet_proto . inet_service : verdict ; comment "destinations that are subject to LoadBalancerSourceRanges" ; }
add map ip6 kube-proxy no-endpoint-services { type ipv6_addr . inet_proto . inet_service : verdict ; comment "vmap to drop or reject packets to services with no endpoints" ; }
add map ip6 kube-proxy no-endpoint-nodeports { type inet_proto . inet_service : verdict ; comment "vmap to drop or reject packets to service nodeports with no endpoints" ; }
add chain ip6 kube-proxy reject-chain { comment "helper for @no-endpoint-services / @no-endpoint-nodeports" ; }
flush set ip6 kube-proxy hairpin-connections
# nftables-2-dispatch.nft
flush map ip6 kube-proxy service-ips
flush map ip6 kube-proxy service-nodeports
flush map ip6 kube-proxy no-endpoint-services
flush map ip6 kube-proxy no-endpoint-nodeports

add chain ip6 kube-proxy gen-GENERATION
# nftables-3-frontends.nft
add chain ip6 kube-proxy filter-prerouting-pre-dnat { type filter hook prerouting priority -110 ; }
add chain ip6 kube-proxy filter-output-pre-dnat { type filter hook output priority -110 ; }
add chain ip6 kube-proxy filter-input { type filter hook input priority 0 ; }
add chain ip6 kube-proxy filter-forward { type filter hook forward priority 0 ; }
add chain ip6 kube-proxy filter-output { type filter hook output priority 0 ; }
add chain ip6 kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add chain ip6 kube-proxy nat-output { type nat hook output priority -100 ; }
add chain ip6 kube-proxy nat-postrouting { type nat hook postrouting priority 100 ; }
add chain ip6 kube-proxy nodeport-endpoints-check
add chain ip6 kube-proxy service-endpoints-check
add chain ip6 kube-proxy firewall-check
add chain ip6 kube-proxy cluster-ips-check
add chain ip6 kube-proxy services
add chain ip6 kube-proxy masquerading
flush set ip6 kube-proxy cluster-ips
flush map ip6 kube-proxy firewall-ips
flush chain ip6 kube-proxy filter-prerouting-pre-dnat
flush chain ip6 kube-proxy filter-output-pre-dnat
flush chain ip6 kube-proxy filter-input
flush chain ip6 kube-proxy filter-forward
flush chain ip6 kube-proxy filter-output
flush chain ip6 kube-proxy nat-prerouting
flush chain ip6 kube-proxy nat-output
flush chain ip6 kube-proxy nat-postrouting
flush chain ip6 kube-proxy nodeport-endpoints-check
flush chain ip6 kube-proxy service-endpoints-check
flush chain ip6 kube-proxy firewall-check
flush chain ip6 kube-proxy cluster-ips-check
flush chain ip6 kube-proxy services
flush chain ip6 kube-proxy masquerading
flush chain ip6 kube-proxy reject-chain
add rule ip6 kube-proxy filter-prerouting-pre-dnat ct state new jump firewall-check
add rule ip6 kube-proxy filter-output-pre-dnat ct state new jump firewall-check
add rule ip6 kube-proxy filter-input ct state new jump nodeport-endpoints-check
add rule ip6 kube-proxy filter-input ct state new jump service-endpoints-check
add rule ip6 kube-proxy filter-forward ct state new jump service-endpoints-check
add rule ip6 kube-proxy filter-forward ct state new jump cluster-ips-check
add rule ip6 kube-proxy filter-output ct state new jump service-endpoints-check
add rule ip6 kube-proxy filter-output ct state new jump cluster-ips-check
add rule ip6 kube-proxy nat-prerouting jump services
add rule ip6 kube-proxy nat-output jump services
add rule ip6 kube-proxy nat-postrouting jump masquerading
add rule ip6 kube-proxy nodeport-endpoints-check ip6 daddr != ::1 meta l4proto . th dport vmap @no-endpoint-nodeports
add rule ip6 kube-proxy service-endpoints-check ip6 daddr . meta l4proto . th dport vmap @no-endpoint-services
add rule ip6 kube-proxy firewall-check ip6 daddr . meta l4proto . th dport vmap @firewall-ips
add rule ip6 kube-proxy cluster-ips-check ip6 daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
add rule ip6 kube-proxy services ip6 daddr @cluster-ips ip6 saddr != fd00:10:244::/56 mark set mark or 0x00004000 comment "masquerade clusterIP traffic from outside cluster"
add rule ip6 kube-proxy services ip6 daddr . meta l4proto . th dport vmap @service-ips
add rule ip6 kube-proxy services fib daddr type local ip6 daddr != ::1 meta l4proto . th dport vmap @service-nodeports
add rule ip6 kube-proxy masquerading mark and 0x00004000 != 0 mark set mark xor 0x00004000 masquerade fully-random
add rule ip6 kube-proxy masquerading ct status dnat ip6 saddr . ip6 daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random
add rule ip6 kube-proxy reject-chain reject
"""


def commands(state: State, family: str) -> str:
    """The part of one family in each file, below the file's name, with a word for the generation."""
    found = []
    for name, text in backends.files(state):
        if name.endswith(".nft"):
            sections = re.split(r"^# (IPv[46])\n", text.replace(state.generation, "GENERATION"), flags=re.M)
            found.append(f"# {name}\n{dict(zip(sections[1::2], sections[2::2], strict=True))[family]}")
    return "".join(found)


def test_six_services_from_the_first_line_to_the_last() -> None:
    state = render(
        *SIX_SERVICES, on="test-node", mode="nftables", clusterCIDR="10.0.0.0/8", nodePortAddresses=["0.0.0.0/0"]
    )
    assert commands(state, "IPv4") == SIX_SERVICES_COMMANDS


def test_a_cluster_without_services_has_the_frame_in_both_families() -> None:
    state = render(mode="nftables")
    assert commands(state, "IPv6") == NO_SERVICES_IPV6
    # The node has an IPv4 address only: there, node ports are served on it, and in IPv6 on all.
    assert "add element ip kube-proxy nodeport-ips { 172.18.0.11 }\n" in commands(state, "IPv4")
    assert "nodeport-ips" not in commands(state, "IPv6")
