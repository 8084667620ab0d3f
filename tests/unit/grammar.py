"""The shapes that a line of a bundle can have. What fits none of them has no business there."""

from __future__ import annotations

import re

from agentless_kube_proxy.backends.state import Part

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_V4 = r"(?:\d{1,3}\.){3}\d{1,3}"
_V6 = r"[0-9a-f:]*:[0-9a-f:]*"
_WORDS = {
    "name": rf"{_LABEL}/{_LABEL}(?::{_LABEL})?",
    "p": "(?:tcp|udp|sctp)",
    "port": r"[1-9]\d{0,4}",
    "hash": "[A-Z2-7]{16}",
    "bit": "0x[1248]0*",
    "generation": "[0-9a-f]{64}",
    "short": "[0-9A-F]{13}",
}
_IPV4 = _WORDS | {
    "host": rf"{_V4}/32",
    "net": rf"{_V4}/\d+",
    "to": _V4,
    "loop": r"127\.0\.0\.0/8",
    "icmp": "icmp",
    "mask": r"255\.255\.255\.255",
}
_IPV6 = _WORDS | {
    "host": rf"{_V6}/128",
    "net": rf"{_V6}/\d+",
    "to": rf"\[{_V6}\]",
    "loop": "::1/128",
    "icmp": "icmp6",
    "mask": "(?:ffff:){7}ffff",
}
_SHAPES = r"""
# node n\d, iptables mode, IPv[46](?:, generation <generation>)?
# all services
# <name> <p>
\*(?:mangle|filter|nat)
COMMIT
:KUBE-(?:SERVICES|EXTERNAL-SERVICES|FORWARD|NODEPORTS|PROXY-FIREWALL|FIREWALL|POSTROUTING|MARK-MASQ|PROXY-CANARY|PROXY-GEN-<short>) - \[0:0\]
:KUBE-(?:SVC|SVL|EXT|FW|SEP)-<hash> - \[0:0\]
-I (?:INPUT|FORWARD|OUTPUT|PREROUTING|POSTROUTING) (?:-m conntrack --ctstate NEW )?-m comment --comment "(?:kubernetes externally-visible service portals|kubernetes health check service ports|kubernetes service portals|kubernetes forwarding rules|kubernetes load balancer firewall|kubernetes postrouting rules)" -j KUBE-(?:EXTERNAL-SERVICES|NODEPORTS|SERVICES|FORWARD|PROXY-FIREWALL|POSTROUTING)
-I (?:INPUT|OUTPUT) -j KUBE-FIREWALL
-A KUBE-PROXY-GEN-<short> -m comment --comment <generation>
-A KUBE-FIREWALL ! -s <loop> -d <loop> -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark <bit>/<bit> -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-POSTROUTING -m mark ! --mark <bit>/<bit> -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark <bit>/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --set-xmark <bit>/<bit>
-A KUBE-SERVICES (?:! -d <loop> )?-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SERVICES -d <host> -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -j KUBE-NODEPORTS
-A KUBE-SERVICES -d <host> -p <p> -m comment --comment "<name> cluster IP" -m <p> --dport <port> -j KUBE-SV[CL]-<hash>
-A KUBE-SERVICES -d <host> -p <p> -m comment --comment "<name> external IP" -m <p> --dport <port> -j KUBE-EXT-<hash>
-A KUBE-SERVICES -d <host> -p <p> -m comment --comment "<name> loadbalancer IP" -m <p> --dport <port> -j KUBE-(?:EXT|FW)-<hash>
-A KUBE-(?:EXTERNAL-)?SERVICES -d <host> -p <p> -m comment --comment "<name> has no endpoints" -m <p> --dport <port> -j REJECT --reject-with <icmp>-port-unreachable
-A KUBE-(?:EXTERNAL-)?SERVICES -d <host> -p <p> -m comment --comment "<name> has no local endpoints" -m <p> --dport <port> -j DROP
-A KUBE-EXTERNAL-SERVICES -p <p> -m comment --comment "<name> has no endpoints" -m addrtype --dst-type LOCAL -m <p> --dport <port> -j REJECT --reject-with <icmp>-port-unreachable
-A KUBE-EXTERNAL-SERVICES -p <p> -m comment --comment "<name> has no local endpoints" -m addrtype --dst-type LOCAL -m <p> --dport <port> -j DROP
-A KUBE-PROXY-FIREWALL -d <host> -p <p> -m comment --comment "<name> traffic not accepted by KUBE-FW-<hash>" -m <p> --dport <port> -j DROP
-A KUBE-NODEPORTS -p tcp -m comment --comment "<name> health check node port" -m tcp --dport <port> -j ACCEPT
-A KUBE-NODEPORTS -d <loop> -p <p> -m comment --comment "<name>" -m <p> --dport <port> -m nfacct --nfacct-name localhost_nps_accepted_pkts -j KUBE-EXT-<hash>
-A KUBE-NODEPORTS -p <p> -m comment --comment "<name>" -m <p> --dport <port> -j KUBE-EXT-<hash>
-A KUBE-SV[CL]-<hash> (?:! -s <net> )?-d <host> -p <p> -m comment --comment "<name> cluster IP" -m <p> --dport <port> -j KUBE-MARK-MASQ
-A KUBE-SV[CL]-<hash> -m comment --comment "<name> -> <to>:<port>" -m recent --rcheck --seconds <port> --reap --name KUBE-SEP-<hash> --mask <mask> --rsource -j KUBE-SEP-<hash>
-A KUBE-SV[CL]-<hash> -m comment --comment "<name> -> <to>:<port>" (?:-m statistic --mode random --probability 0\.\d{11} )?-j KUBE-SEP-<hash>
-A KUBE-EXT-<hash> -m comment --comment "masquerade traffic for <name> external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-<hash> -s <net> -m comment --comment "pod traffic for <name> external destinations" -j KUBE-SVC-<hash>
-A KUBE-EXT-<hash> -m comment --comment "masquerade LOCAL traffic for <name> external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-EXT-<hash> -m comment --comment "route LOCAL traffic for <name> external destinations" -m addrtype --src-type LOCAL -j KUBE-SVC-<hash>
-A KUBE-EXT-<hash> -j KUBE-SV[CL]-<hash>
-A KUBE-FW-<hash> -s <net> -m comment --comment "<name> loadbalancer IP" -j KUBE-EXT-<hash>
-A KUBE-FW-<hash> -m comment --comment "other traffic to <name> will be dropped by KUBE-PROXY-FIREWALL"
-A KUBE-SEP-<hash> -s <host> -m comment --comment "<name>" -j KUBE-MARK-MASQ
-A KUBE-SEP-<hash> -p <p> -m comment --comment "<name>" (?:-m recent --set --name KUBE-SEP-<hash> --mask <mask> --rsource )?-m <p> -j DNAT --to-destination <to>:<port>
"""


def _compiled(words: dict[str, str]) -> re.Pattern[str]:
    shapes = "|".join(_SHAPES.strip().split("\n"))
    return re.compile(re.sub(r"<(\w+)>", lambda word: words[word[1]], shapes))


GRAMMARS = {
    **{f"iptables-{part.value}.rules": _compiled(_IPV4) for part in Part},
    **{f"ip6tables-{part.value}.rules": _compiled(_IPV6) for part in Part},
    "frontends.allow": re.compile(
        rf"\+4 (?:nat|filter) (?:{_compiled(_IPV4).pattern})|\+6 (?:nat|filter) (?:{_compiled(_IPV6).pattern})"
    ),
    "sysctls.conf": re.compile(r"net\.[a-z0-9_.]+ = \d+"),
    "nfacct.rules": re.compile(r"[a-z_]+"),
    "conntrack.udp": re.compile(
        rf"ipv4 (?:{_V4}|\*) \d+ (?:-|{_V4}:\d+(?:,{_V4}:\d+)*)"
        rf"|ipv6 (?:{_V6}|\*) \d+ (?:-|\[{_V6}\]:\d+(?:,\[{_V6}\]:\d+)*)"
    ),
    "services.jsonl": re.compile(r"\{[ -~]*\}"),
    "health.conf": re.compile(
        rf"period [1-9]\d*|listen (?:ipv4 {_V4}|ipv6 {_V6})|check ipv[46] [1-9]\d{{0,4}} {_LABEL} {_LABEL}"
    ),
    "health.counts": re.compile(r"eligible (?:true|false)|count ipv[46] [1-9]\d{0,4} \d+"),
}
