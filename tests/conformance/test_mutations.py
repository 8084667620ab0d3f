"""The comparison is worth something only if it sees the smallest change: one character of a rule, one rule, one order.

Each mutation is made in the text of a bundle whose golden it otherwise equals, loaded into a kernel of its own, read
back and compared: exactly as in a conformance run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.controlplane import netns
from tests.node.bundles import grouped

from . import goldens, kernel
from .side import Namespace
from .test_goldens import namespace, recorded, rendered

__all__ = ["namespace"]

Mutate = Callable[[str], str]


def change(pattern: str, replacement: str) -> Mutate:
    """Change the first place that matches."""
    return lambda text: re.sub(pattern, replacement, text, count=1, flags=re.MULTILINE)


def swap(first: str) -> Mutate:
    """Exchange a rule with the one behind it."""
    return change(rf"^({first}.*)\n(?!\1)(-[AI] \S+ .*|add rule .*)$", r"\2\n\1")


def node_ports_first(text: str) -> str:
    """Move the jump that must come last to the front of its chain."""
    jump = re.search(r"^-A KUBE-SERVICES .*-j KUBE-NODEPORTS\n", text, re.MULTILINE)
    if jump is None:
        return text
    rest = text.replace(jump.group(), "", 1)
    return re.sub(
        r"^-A KUBE-SERVICES .*-j KUBE-SVC-",
        lambda found: jump.group() + found.group(),
        rest,
        count=1,
        flags=re.MULTILINE,
    )


IPTABLES: dict[str, Mutate] = {
    "cluster IP, one digit": change(r"(-A KUBE-SERVICES -d 1)0\.", r"\g<1>1."),
    "port of a cluster IP": change(r"(-A KUBE-SERVICES .* --dport )(\d+)( -j KUBE-SVC-)", r"\g<1>7\3"),
    "a letter of a comment": change(r"( cluster I)P\"", r'\1p"'),
    "the Service in a comment": change(r'(-A KUBE-SEP-.*--comment "?)(\w)', r"\1x\2"),
    "protocol": change(r"^(-A KUBE-SEP-.*)-p tcp (.*)-m tcp ", r"\1-p udp \2-m udp "),
    "probability, its last bit": change(r"--probability 0\.50000000000", "--probability 0.50000000047"),
    "port of an endpoint": change(r"(--to-destination 10\S+:)\d+", r"\g<1>9"),
    "address of an endpoint": change(r"(--to-destination 1)0\.", r"\g<1>1."),
    "hairpin source": change(r"^(-A KUBE-SEP-\S+ -s 10\.\d+\.\d+\.\d+)/32", r"\1/31"),
    "reject becomes drop": change(r"-j REJECT --reject-with \S+", "-j DROP"),
    "another kind of reject": change(r"icmp-port-unreachable", "icmp-host-unreachable"),
    "drop becomes accept": change(r"^(-A KUBE-FORWARD .*)-j DROP", r"\1-j ACCEPT"),
    "the mark": change(r"^(-A KUBE-MARK-MASQ .*)--set-xmark (\S+)/\S+", r"\1--set-xmark 0x10/0x10"),
    "the mask of the mark": change(r"^(-A KUBE-MARK-MASQ .*--set-xmark (\S+))/\S+", r"\1/0xffffffff"),
    "source ports no longer random": change(r" --random-fully", ""),
    "a jump for all states": change(r"^(-I INPUT )-m conntrack --ctstate NEW ", r"\1"),
    "a jump twice": change(r"^(-I INPUT .*\n)", r"\1\1"),
    "two jumps exchanged": change(r"^(-I INPUT .*)\n((?:-I (?!INPUT ).*\n)*)(-I INPUT .*)$", r"\3\n\2\1"),
    "a rule is missing": change(r"^-A KUBE-SEP-.*-j KUBE-MARK-MASQ\n", ""),
    "a rule twice": change(r"^(-A KUBE-SVC-.*\n)", r"\1\1"),
    "two rules of an endpoint exchanged": swap("-A KUBE-SEP-.*KUBE-MARK-MASQ"),
    "the node port jump comes first": node_ports_first,
    "another type of address": change(r"--dst-type LOCAL", "--dst-type UNICAST"),
    "not, forgotten": change(r" ! (-[si] \S+ .*-j KUBE-MARK-MASQ)", r" \1"),
    "another target": change(r"^(-A KUBE-NODEPORTS .*-j KUBE-)EXT(-\S+)", r"\1MARK-MASQ"),
    "the canary is missing": change(r"^:KUBE-PROXY-CANARY.*\n", ""),
    "a chain too many": change(r"^(:KUBE-MARK-MASQ.*\n)", r"\1:KUBE-SVC-ABCDEFGHIJKLMNOP - [0:0]\n"),
    "affinity a second shorter": change(r"--seconds (\d+) ", r"--seconds 7 "),
    "no counter": change(r"-m nfacct --nfacct-name +\S+ ", ""),
}
NFTABLES: dict[str, Mutate] = {
    "cluster IP, one digit": change(r"(cluster-ips \{ 1)0\.", r"\g<1>1."),
    "port of a service IP": change(r"(service-ips \{ \S+ \. \w+ \. )(\d+)", r"\g<1>7"),
    "protocol of a node port": change(r"(service-nodeports \{ )tcp", r"\1sctp"),
    "verdict": change(r"(no-endpoint-services \{ .* : )goto reject-chain", r"\1drop"),
    "a letter of a comment": change(r"(masquerade clusterIP traffic from outside cluste)r", r"\1R"),
    "endpoint": change(r"(dnat to 1)0\.", r"\g<1>1."),
    "an element is missing": change(r"^add element ip kube-proxy hairpin-connections .*\n", ""),
    "priority": change(r"priority -110", "priority -111"),
    "hook": change(r"hook forward", "hook input"),
    "mark": change(r"(mark set mark or )0x\w+", r"\g<1>0x10"),
    "timeout of an affinity set": change(r"timeout \d+s", "timeout 7s"),
    "two rules exchanged": swap("add rule ip kube-proxy services "),
    "a rule twice": change(r"^(add rule ip kube-proxy masquerading .*\n)", r"\1\1"),
    "a set is missing its comment": change(r' ?comment "service hairpin connections" ;', ""),
}
MUTATIONS = {"iptables": IPTABLES, "nftables": NFTABLES}


def rules_of(bundle: Path, tool: str) -> str:
    """The rules of all files of a tool, as a node loads them."""
    texts = [file.read_text() for file in sorted(bundle.glob(f"{tool}-*"))]
    return "".join(texts) if tool == "nftables" else grouped(texts)


def load(namespace: str, bundle: Path, mode: str, text: str) -> None:
    """Load a bundle's rules without the node program, which would refuse what was tampered with."""
    counters = bundle / "nfacct.rules"
    for counter in counters.read_text().split() if counters.exists() else ():
        netns.run(namespace, "nfacct", "add", counter)
    if mode == "nftables":
        netns.run(namespace, "nft", "-f", "-", stdin=text)
        return
    netns.run(namespace, "iptables-restore", "--noflush", stdin=text)
    netns.run(namespace, "ip6tables-restore", "--noflush", stdin=rules_of(bundle, "ip6tables"))


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode, known in MUTATIONS.items() for name in known])
def test_mutation_is_seen(mode: str, name: str, namespace: str) -> None:
    for golden in recorded(mode):
        bundle = rendered(golden)
        text = rules_of(bundle, mode)
        mutated = MUTATIONS[mode][name](text)
        if mutated != text:
            break
    else:
        raise AssertionError(f"no golden of {mode} mode has anything that this mutation changes")
    expected = goldens.load((golden / "kernel.txt").read_text())
    load(namespace, bundle, mode, mutated)
    found = kernel.differences(
        _rules(expected), _rules(kernel.canonical(kernel.read(Namespace(namespace), mode), mode))
    )
    assert found, f"{golden.name}: nobody noticed"


@pytest.mark.parametrize("golden", recorded(*MUTATIONS), ids=lambda path: path.name)
def test_nothing_is_seen_without_mutation(golden: Path, namespace: str) -> None:
    """Loaded in the same way, unchanged rules equal their golden: what the mutations show is due to them alone."""
    mode = golden.name.partition("-")[0]
    bundle = rendered(golden)
    load(namespace, bundle, mode, rules_of(bundle, mode))
    expected = goldens.load((golden / "kernel.txt").read_text())
    assert not kernel.differences(
        _rules(expected), _rules(kernel.canonical(kernel.read(Namespace(namespace), mode), mode))
    )


def _rules(state: kernel.State) -> kernel.State:
    return {name: lines for name, lines in state.items() if name not in ("sysctls", "nfacct")}


def test_a_setting_and_a_counter_are_seen() -> None:
    state: kernel.State = {
        "sysctls": ("net.ipv4.conf.all.route_localnet = 1",),
        "nfacct": ("ct_state_invalid_dropped_pkts",),
    }
    for name in state:
        assert kernel.differences(state, {**state, name: ()})


def test_the_programs_refuse_a_mutation(namespace: str, tmp_path: Path) -> None:
    """A bundle that was changed on its way never gets as far as the kernel."""
    golden = recorded("iptables")[0]
    bundle = tmp_path / "bundle"
    subprocess.run(["cp", "-r", str(rendered(golden)), str(bundle)], check=True)
    rules = bundle / "iptables-1-endpoints.rules"
    rules.write_text(rules.read_text() + "# one line more\n")
    argv = ["env", f"AKP_STATE={tmp_path}/state", "sh", f"{bundle}/akp-node", "apply", f"{bundle}"]
    done = subprocess.run(netns.command(namespace, argv), capture_output=True, text=True)
    assert done.returncode == 2
