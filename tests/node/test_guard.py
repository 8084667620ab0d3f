# ruff: noqa: E501 -- a rule stands on one line, as it would be typed.
"""Bundles a node refuses, each with the message that an operator needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node import bundles
from tests.node.host import Host

WEB, CART = bundles.shop()
WEB_ENDPOINT = WEB.endpoint_chain(WEB.endpoints[0])
STRANGER = "KUBE-SVC-AAAAAAAAAAAAAAAA"


@pytest.fixture(scope="module", params=["dash", "busybox"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One namespace for all: nothing of these bundles reaches it."""
    each = Host(tmp_path_factory.mktemp("host"), "nft", request.param)
    try:
        yield each
        assert each.sh("nft list ruleset") == ""
        assert not each.state.exists()
    finally:
        each.close()


def refusal(host: Host, bundle: Path, **env: str) -> str:
    """The message with which a bundle is refused, the same by apply and check."""
    messages = []
    for verb in ("check", "apply"):
        result = host.akp(verb, bundle, **env)
        assert result.code == 2, result.stdout + result.stderr
        assert result.json["ok"] is False
        messages.append(result.json["error"])
    assert messages[0] == messages[1]
    return str(messages[0])


def rule(chain: str, text: str, table: str = "nat") -> Callable[[str], str]:
    """Put a rule at the end of a chain that has rules, or just before the marker."""

    def edit(rules: str) -> str:
        head, star, body = rules.partition(f"*{table}\n")
        body, commit, tail = body.partition("COMMIT\n")
        lines = body.splitlines()
        own = [i for i, line in enumerate(lines) if line.startswith(f"-A {chain} ")]
        marker = [i for i, line in enumerate(lines) if line.startswith("-A KUBE-PROXY-GENERATION")]
        lines.insert(own[-1] + 1 if own else marker[0], f"-A {chain} {text}")
        return head + star + "\n".join(lines) + "\n" + commit + tail

    return edit


def swap(old: str, new: str) -> Callable[[str], str]:
    def edit(rules: str) -> str:
        assert old in rules
        return rules.replace(old, new, 1)

    return edit


# name: (edit of iptables.rules, part of the message)
RULES: dict[str, tuple[Callable[[str], str], str]] = {
    "a rule in a built-in chain": (rule("INPUT", "-j ACCEPT", "filter"), "chain INPUT in table filter is not ours"),
    "a foreign chain declared": (swap(":KUBE-SERVICES -", ":MINE - [0:0]\n:KUBE-SERVICES -"), "chain MINE in table filter is not ours"),
    "a built-in chain declared": (swap("*filter\n", "*filter\n:INPUT ACCEPT [0:0]\n"), "chain INPUT in table filter is not ours"),
    "a kubelet chain declared": (swap("*mangle\n", "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\n"), "chain KUBE-KUBELET-CANARY in table mangle is not ours"),
    "a service chain in filter": (swap("*filter\n", f"*filter\n:{STRANGER} - [0:0]\n"), f"chain {STRANGER} in table filter is not ours"),
    "a service chain with a short name": (swap("*nat\n", "*nat\n:KUBE-SVC-AAAA - [0:0]\n"), "chain KUBE-SVC-AAAA in table nat is not ours"),
    "a service chain with a lower-case name": (swap("*nat\n", "*nat\n:KUBE-SVC-aaaaaaaaaaaaaaaa - [0:0]\n"), "is not ours"),
    "another table": (swap("*mangle\n", "*raw\nCOMMIT\n*mangle\n"), "line 2: table raw is not ours"),
    "a table twice": (swap("*filter\n", "*filter\nCOMMIT\n*filter\n"), "table filter appears twice"),
    "a table without end": (lambda text: text.removesuffix("COMMIT\n"), "table nat has no COMMIT"),
    "a table inside a table": (swap("COMMIT\n*nat", "*nat"), "table filter has no COMMIT"),
    "COMMIT alone": (swap("*mangle\n", "COMMIT\n*mangle\n"), "line 2: COMMIT outside a table"),
    "a rule outside a table": (swap("*mangle\n", "-A KUBE-SERVICES -j DROP\n*mangle\n"), "line 2: a rule outside a table"),
    "a chain outside a table": (swap("*mangle\n", ":KUBE-SERVICES - [0:0]\n*mangle\n"), "line 2: a chain outside a table"),
    "a policy for a chain of ours": (swap(":KUBE-SERVICES - [0:0]", ":KUBE-SERVICES ACCEPT [0:0]"), 'not a line ":CHAIN - [0:0]"'),
    "a chain declared twice": (swap(":KUBE-SERVICES - [0:0]\n", ":KUBE-SERVICES - [0:0]\n" * 2), "chain KUBE-SERVICES is declared twice"),
    "rules of a chain that is not declared": (rule(STRANGER, "-j KUBE-MARK-MASQ"), f"chain {STRANGER} is not declared in table nat"),
    "a jump to a chain that is not declared": (
        rule("KUBE-SERVICES", f'-d 10.96.9.9/32 -p tcp -m comment --comment "a/b" -m tcp --dport 80 -j {STRANGER}'),
        f"jump to {STRANGER}, which this file does not declare",
    ),
    "rules of a chain in two places": (swap("-A KUBE-POSTROUTING -j MARK", "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n-A KUBE-POSTROUTING -j MARK"), "do not stand together"),
    "a deletion": (swap("COMMIT\n*nat", "-D INPUT 1\nCOMMIT\n*nat"), "not a line of a restore file: -D INPUT 1"),
    "a flush": (swap("COMMIT\n*nat", "-F INPUT\nCOMMIT\n*nat"), "not a line of a restore file: -F INPUT"),
    "a chain removed": (swap("COMMIT\n*nat", "-X MINE\nCOMMIT\n*nat"), "not a line of a restore file: -X MINE"),
    "a policy": (swap("COMMIT\n*nat", "-P INPUT ACCEPT\nCOMMIT\n*nat"), "not a line of a restore file: -P INPUT ACCEPT"),
    "a jump of our own making": (swap("-I INPUT -j KUBE-FIREWALL", "-I INPUT -j ACCEPT"), "not a jump rule of kube-proxy in table filter: -I INPUT -j ACCEPT"),
    "a jump with a condition": (swap("-I INPUT -j KUBE-FIREWALL", "-I INPUT -s 192.0.2.1 -j KUBE-FIREWALL"), "not a jump rule of kube-proxy"),
    "a jump in the wrong table": (swap("-I POSTROUTING", "-I INPUT -j KUBE-FIREWALL\n-I POSTROUTING"), "not a jump rule of kube-proxy in table nat"),
    "a jump of another mode": (swap("-I INPUT -j KUBE-FIREWALL", '-I INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL'), "not a jump rule of kube-proxy"),
    "a jump twice": (swap("-I INPUT -j KUBE-FIREWALL\n", "-I INPUT -j KUBE-FIREWALL\n" * 2), "a jump rule twice"),
    "an insert at a position": (swap("-I INPUT -j KUBE-FIREWALL", "-I INPUT 3 -j KUBE-FIREWALL"), "not a jump rule of kube-proxy"),
    "ACCEPT for everything": (rule("KUBE-FORWARD", "-j ACCEPT", "filter"), "ACCEPT only in the forms kube-proxy uses"),
    "ACCEPT from a source": (rule("KUBE-FORWARD", "-s 192.0.2.1/32 -j ACCEPT", "filter"), "ACCEPT only in the forms kube-proxy uses"),
    "ACCEPT for a system port": (
        rule("KUBE-NODEPORTS", '-p tcp -m comment --comment "a/b health check node port" -m tcp --dport 22 -j ACCEPT', "filter"),
        "ACCEPT only in the forms kube-proxy uses, for ports 1024-65535",
    ),
    "ACCEPT that is not a health check": (
        rule("KUBE-NODEPORTS", '-p tcp -m comment --comment "a/b" -m tcp --dport 30080 -j ACCEPT', "filter"),
        "ACCEPT only in the forms kube-proxy uses",
    ),
    "ACCEPT in nat": (rule("KUBE-SERVICES", '-d 10.96.9.9/32 -p tcp -m comment --comment "a" -m tcp --dport 80 -j ACCEPT'), "ACCEPT only in the forms"),
    "a target kube-proxy has not": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -j LOG", "nat"), "target LOG is not allowed"),
    "REDIRECT": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 22"), "option --to-ports is not one kube-proxy uses"),
    "TPROXY": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -j TPROXY"), "target TPROXY is not allowed"),
    "a goto": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -g KUBE-NODEPORTS"), "option -g is not one kube-proxy uses"),
    "a match kube-proxy has not": (rule("KUBE-SERVICES", "-m owner -j DROP", "filter"), "match owner is not one kube-proxy uses"),
    "a match module from a file": (rule("KUBE-SERVICES", "-m bpf --object-pinned /x -j DROP", "filter"), "match bpf is not one kube-proxy uses"),
    "a long option": (rule("KUBE-SERVICES", "--destination 10.96.9.9/32 -j DROP", "filter"), "option --destination is not one kube-proxy uses"),
    "DROP for everything": (rule("KUBE-SERVICES", "-j DROP", "filter"), "not a rule that belongs in KUBE-SERVICES"),
    "DROP for a network": (rule("KUBE-SERVICES", '-d 10.0.0.0/8 -p tcp -m comment --comment "a/b has no endpoints" -m tcp --dport 80 -j DROP', "filter"), "not a rule that belongs in KUBE-SERVICES"),
    "a dispatch without a port": (rule("KUBE-SERVICES", f'-d 10.96.9.9/32 -p tcp -m comment --comment "a/b" -j {WEB.chain}'), "not a rule that belongs in KUBE-SERVICES"),
    "a dispatch without an address": (rule("KUBE-SERVICES", f'-p tcp -m comment --comment "a/b" -m tcp --dport 22 -j {WEB.chain}'), "not a rule that belongs in KUBE-SERVICES"),
    "DNAT outside an endpoint": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -p tcp -m tcp -j DNAT --to-destination 192.0.2.1:80"), "not a rule that belongs in KUBE-SERVICES"),
    "DNAT to a range": (rule(WEB_ENDPOINT, "-p tcp -m tcp -j DNAT --to-destination 192.0.2.1-192.0.2.9:80"), f"not a rule that belongs in {WEB_ENDPOINT}"),
    "MASQUERADE outside postrouting": (rule("KUBE-MARK-MASQ", "-j MASQUERADE"), "not a rule that belongs in KUBE-MARK-MASQ"),
    "a mark of many bits": (rule("KUBE-MARK-MASQ", "-j MARK --set-xmark 0xffffffff/0xffffffff"), "not a rule that belongs in KUBE-MARK-MASQ"),
    "a name of another list": (rule(WEB.chain, f"-m recent --rcheck --seconds 9 --reap --name mine --mask 255.255.255.255 --rsource -j {WEB_ENDPOINT}"), "not a rule that belongs in"),
    "an IPv6 address in the IPv4 file": (rule("KUBE-SERVICES", f'-d fd00::1/128 -p tcp -m comment --comment "a/b" -m tcp --dport 80 -j {WEB.chain}'), "not a rule that belongs in KUBE-SERVICES"),
    "a second comment": (rule("KUBE-FORWARD", '-m comment --comment "kubernetes forwarding rules" -m comment --comment "x" -m mark --mark 0x4000/0x4000 -j ACCEPT', "filter"), "ACCEPT only in the forms"),
    "a quote inside a comment": (rule(WEB_ENDPOINT, '-s 10.244.1.10/32 -m comment --comment "a\\" -j ACCEPT" -j KUBE-MARK-MASQ'), "a character no rule has"),
    "an apostrophe": (rule(WEB_ENDPOINT, "-s 10.244.1.10/32 -m comment --comment 'a b' -j KUBE-MARK-MASQ"), "a character no rule has"),
    "a comment without end": (rule(WEB_ENDPOINT, '-s 10.244.1.10/32 -m comment --comment "a -j KUBE-MARK-MASQ'), "not a rule that belongs in"),
    "a comment that is too long": (rule(WEB_ENDPOINT, f'-s 10.244.1.10/32 -m comment --comment "{"a" * 256}" -j KUBE-MARK-MASQ'), "a comment of more than 255 characters"),
    "a control character": (rule(WEB_ENDPOINT, '-s 10.244.1.10/32 -m comment --comment "a\x1b[31m" -j KUBE-MARK-MASQ'), "a character that is not printable ASCII"),
    "a tab": (swap("-A KUBE-MARK-MASQ -j", "-A KUBE-MARK-MASQ\t-j"), "a character that is not printable ASCII"),
    "a carriage return": (lambda text: text.replace("\n", "\r\n"), "line 1: a character that is not printable ASCII"),
    "counters": (swap("-A KUBE-MARK-MASQ", "[5:5] -A KUBE-MARK-MASQ"), "not a line of a restore file"),
    "a marker of another generation": (swap("--comment GENERATION", f"--comment {'0' * 64}"), "the marker is not the generation of the manifest"),
    "a rule in the canary": (rule("KUBE-PROXY-CANARY", '-d 10.96.9.9/32 -p tcp -m comment --comment "a" -m tcp --dport 80 -j DROP', "filter"), "not a rule that belongs in KUBE-PROXY-CANARY"),
    "a shell command": (swap("*mangle\n", "$(reboot)\n*mangle\n"), "not a line of a restore file: $(reboot)"),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_a_rule_that_kube_proxy_would_not_write_is_refused(host: Host, tmp_path: Path, case: str) -> None:
    edit, expected = RULES[case]
    original = bundles.rules(bundles.shop())
    changed = edit(original)
    assert changed != original
    message = refusal(host, bundles.simple(tmp_path / "b", iptables_rules=changed))
    assert expected in message
    assert re.match(r"iptables\.rules line \d+: ", message)


FILES = {
    "sysctls.conf": {
        "kernel.panic = 1": "sysctl kernel.panic is not one this program sets",
        "net.ipv4.conf.all.route_localnet=1": 'not a line "name = integer"',
        "net.ipv4.ip_forward = yes": 'not a line "name = integer"',
        "net.ipv4.ip_forward = -1": 'not a line "name = integer"',
        "net/ipv4/ip_forward = 1": 'not a line "name = integer"',
        "net.ipv4.ip_forward = 1; reboot": 'not a line "name = integer"',
        "net.ipv4.conf.eth0.rp_filter = 0": "is not one this program sets",
    },
    "nfacct.rules": {
        "mine": 'counter "mine" is not one this program makes',
        "ct_state_invalid_dropped_pkts x": "is not one this program makes",
        "-h": 'counter "-h" is not one this program makes',
    },
    "conntrack.udp": {
        "ipv4 10.0.0.1 53": 'not a line "family frontend port replies"',
        "ipv5 10.0.0.1 53 -": 'not a line "family frontend port replies"',
        "ipv4 fd00::1 53 -": 'not a line "family frontend port replies"',
        "ipv4 10.0.0.1 dns -": 'not a line "family frontend port replies"',
        "ipv6 fd00::1 53 fd00::2:53": 'not a line "family frontend port replies"',
        "ipv4 * 53 10.0.0.1:53,--all": 'not a line "family frontend port replies"',
    },
}


@pytest.mark.parametrize(("file", "line"), [(file, line) for file, lines in FILES.items() for line in lines])
def test_a_line_of_another_file_that_does_not_fit_is_refused(host: Host, tmp_path: Path, file: str, line: str) -> None:
    files = {"iptables.rules": bundles.rules(bundles.shop()), file: f"# made by hand\n{line}\n"}
    message = refusal(host, bundles.write(tmp_path / "b", files))
    assert message.startswith(f"{file} line 2: ")
    assert FILES[file][line] in message


def edit_manifest(bundle: Path, **fields: object) -> None:
    """Change fields and sign again, as somebody with the right tools would."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    del manifest["apiVersion"], manifest["digest"]
    (bundle / "manifest.json").write_text(bundles.manifest_text({**manifest, **fields}))


MANIFESTS = {
    "another API version": ({"apiVersion": "akp/v2"}, 'apiVersion "akp/v2" is not known'),
    "another kind": ({"kind": "Cluster"}, 'kind "Cluster" is not known'),
    "another mode": ({"mode": "ebpf"}, 'mode "ebpf" is not known'),
    "a short generation": ({"generation": "abc"}, "generation is not 64 hex digits"),
    "a path as a file name": ({"files": {"../x": "0" * 64}}, "the list of files is not"),
    "an option as a file name": ({"files": {"-x": "0" * 64}}, "the list of files is not"),
    "a digest that is none": ({"files": {"iptables.rules": "abc"}}, "the list of files is not"),
    "a file that is not there": ({"files": {"other.rules": "0" * 64}}, "other.rules: listed in the manifest but not there"),
    "a file that is not listed": ({"files": {"notes.txt": bundles.sha256("x\n")}}, "iptables.rules: not listed in the manifest"),
    "a digest of another file": ({"files": {"iptables.rules": "0" * 64}}, "iptables.rules: the digest does not match the manifest"),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_does_not_fit_is_refused(host: Host, tmp_path: Path, case: str) -> None:
    fields, expected = MANIFESTS[case]
    bundle = bundles.write(tmp_path / "b", {"iptables.rules": bundles.rules(bundles.shop()), "notes.txt": "x\n"})
    edit_manifest(bundle, **fields)
    assert expected in refusal(host, bundle)


@pytest.mark.parametrize("file", ["manifest.json", "iptables.rules", "ip6tables.rules", "akp-node", "sysctls.conf"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_byte_is_enough_to_refuse_a_bundle(host: Host, tmp_path: Path, file: str, place: str) -> None:
    bundle = bundles.simple(tmp_path / "b", sysctls_conf="net.ipv4.ip_forward = 1\n")
    data = bytearray((bundle / file).read_bytes())
    at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[place]
    data[at] ^= 1
    (bundle / file).write_bytes(data)
    message = refusal(host, bundle)
    assert file in message or "manifest" in message


def test_a_bundle_for_another_node_is_refused(host: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "b")
    assert refusal(host, bundle, AKP_NODE="n2") == 'the bundle is for node "n1", this is "n2"'
    assert host.akp("check", "--node", "n2", bundle).code == 2
    assert host.akp("check", "--node", "n1", bundle).code == 0


def test_a_directory_that_is_no_bundle_is_refused(host: Host, tmp_path: Path) -> None:
    assert "no such bundle directory" in refusal(host, tmp_path / "missing")
    assert "no manifest.json" in refusal(host, tmp_path)


USAGE = {
    (): "no verb given",
    ("remove",): 'unknown verb "remove"',
    ("apply",): "apply needs a bundle directory",
    ("apply", "a", "b"): "one argument too many: b",
    ("apply", "--force", "a"): "unknown option --force",
    ("apply", "--node"): "--node needs a name",
    ("status", "x"): "status takes no argument",
    ("rollback",): "no bundle was applied here",
    ("rollback", "zz"): "no bundle was applied here",
    ("restore",): "no bundle was applied here",
}


@pytest.mark.parametrize("arguments", USAGE)
def test_a_wrong_command_line_is_explained(host: Host, arguments: tuple[str, ...]) -> None:
    result = host.akp(*arguments)
    assert result.code == 2
    assert USAGE[arguments] in result.json["error"]


def test_help_and_version_need_nothing(host: Host) -> None:
    assert "akp-node apply" in host.akp("--help").stdout
    assert host.akp("apply", "--help").code == 0
    assert host.akp("--version").stdout.startswith("akp-node ")


def test_a_health_check_port_outside_the_nodes_own_range_is_refused(host: Host, tmp_path: Path) -> None:
    line = '-p tcp -m comment --comment "a/b health check node port" -m tcp --dport 31000 -j ACCEPT'
    text = rule("KUBE-NODEPORTS", line, "filter")(bundles.rules(bundles.shop()))
    bundle = bundles.simple(tmp_path / "b", iptables_rules=text)
    assert host.akp("check", bundle).code == 0
    assert "for ports 32000-32767" in refusal(host, bundle, AKP_ACCEPT_PORTS="32000-32767")
