# ruff: noqa: E501 -- a rule stands on one line, as it would be typed.
"""Bundles a node refuses, each with the message that an operator needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.manifest import sha256

from tests.lab.program import PROGRAMS
from tests.node import bundles
from tests.node.guarding import HERE, Verdict, guarded
from tests.node.host import Host

WEB, CART = bundles.shop()
WEB_ENDPOINT = WEB.endpoint_chain(WEB.endpoints[0])
SHAPES = Path(__file__).parents[2] / "plugins/plugin_utils/bundle/akp_node/shapes"
STRANGER = "KUBE-SVC-AAAAAAAAAAAAAAAA"
Text = Callable[[str], str]
Edit = Callable[[list[str]], list[str]]  # of the files 1-endpoints, 2-dispatch, 3-frontends
NAMES = bundles.FILES["iptables.rules"]
UNLIKE = "not a line of iptables-"  # and file, table, line


@pytest.fixture(scope="module", params=["dash", "busybox"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One namespace for all: nothing of these bundles reaches it."""
    each = Host(tmp_path_factory.mktemp("host"), "nft", request.param)
    try:
        yield each
        assert each.sh("nft list ruleset") == ""
        assert not each.state.exists() or {file.name for file in each.state.iterdir()} <= {"lock"}
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


def on(index: int, change: Text) -> Edit:
    """Change one of the files."""

    def edit(files: list[str]) -> list[str]:
        return [change(text) if i == index else text for i, text in enumerate(files)]

    return edit


def swap_text(old: str, new: str) -> Text:
    return lambda text: text.replace(old, new, 1)


def swap(old: str, new: str) -> Edit:
    """Change the first file that has a text."""

    def edit(files: list[str]) -> list[str]:
        found = [i for i, text in enumerate(files) if old in text]
        return on(found[0], swap_text(old, new))(files)

    return edit


def marker(change: Text) -> Edit:
    """Change the line of a marker."""

    def edit(files: list[str]) -> list[str]:
        line = re.findall("^-A KUBE-PROXY-GEN-.*\n", files[1], re.M)[0]
        return swap(line, f"{change(line.rstrip())}\n".lstrip("\n"))(files)

    return edit


def rule(chain: str, text: str, table: str = "nat") -> Edit:
    """Put a rule at the end of a chain, or where it would stand if there were one."""

    def insert(rules: str) -> str:
        head, star, body = rules.partition(f"*{table}\n")
        body, commit, tail = body.partition("COMMIT\n")
        lines = body.splitlines()
        own = [i for i, line in enumerate(lines) if line.startswith((f"-A {chain} ", f":{chain} "))]
        last = [i for i, line in enumerate(lines) if line.startswith((":", "#"))][-1]
        at = own[-1] + 1 if own and lines[own[-1]].startswith("-A") else last + 1
        lines.insert(at, f"-A {chain} {text}")
        return head + star + "\n".join(lines) + "\n" + commit + tail

    def edit(files: list[str]) -> list[str]:
        table_of = [re.findall(rf"^\*{table}\n.*?^COMMIT\n", text, re.M | re.S) for text in files]
        found = [i for i, texts in enumerate(table_of) if texts and f":{chain} " in texts[0]]
        return on(found[-1] if found else 0 if chain == STRANGER else 1, insert)(files)

    return edit


# name: (edit of the files of IPv4, part of the message)
RULES: dict[str, tuple[Edit, str]] = {
    "a rule in a built-in chain": (rule("INPUT", "-j ACCEPT", "filter"), UNLIKE),
    "a foreign chain declared": (swap(":KUBE-SERVICES -", ":MINE - [0:0]\n:KUBE-SERVICES -"), UNLIKE),
    "a built-in chain declared": (swap("*filter\n", "*filter\n:INPUT ACCEPT [0:0]\n"), UNLIKE),
    "a kubelet chain declared": (swap("*mangle\n", "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\n"), UNLIKE),
    "a service chain in filter": (swap("*filter\n", f"*filter\n:{STRANGER} - [0:0]\n"), UNLIKE),
    "a service chain with a short name": (swap("*nat\n", "*nat\n:KUBE-SVC-AAAA - [0:0]\n"), UNLIKE),
    "a service chain with a lower-case name": (swap("*nat\n", "*nat\n:KUBE-SVC-aaaaaaaaaaaaaaaa - [0:0]\n"), UNLIKE),
    "another table": (swap("*mangle\n", "*raw\nCOMMIT\n*mangle\n"), "line 1: table raw is not ours"),
    "a table twice": (swap("*filter\n", "*filter\nCOMMIT\n*filter\n"), "table filter appears twice"),
    "a table without end": (on(0, lambda text: text.removesuffix("COMMIT\n")), "table nat has no COMMIT"),
    "a table inside a table": (swap("COMMIT\n*nat", "*nat"), "table filter has no COMMIT"),
    "COMMIT alone": (swap("*mangle\n", "COMMIT\n*mangle\n"), "line 1: a line outside a table: COMMIT"),
    "a rule outside a table": (swap("*mangle\n", "-A KUBE-SERVICES -j DROP\n*mangle\n"), "line 1: a line outside a table"),
    "a chain outside a table": (swap("*mangle\n", ":KUBE-SERVICES - [0:0]\n*mangle\n"), "line 1: a line outside a table"),
    "a policy for a chain of ours": (swap(":KUBE-SERVICES - [0:0]", ":KUBE-SERVICES ACCEPT [0:0]"), UNLIKE),
    "rules of a chain that is not declared": (rule(STRANGER, "-j KUBE-MARK-MASQ"), UNLIKE),
    "a chain declared twice": (swap(":KUBE-SERVICES - [0:0]\n", ":KUBE-SERVICES - [0:0]\n" * 2), "chain KUBE-SERVICES is declared twice"),
    "rules of a chain in two places": (swap("-A KUBE-POSTROUTING -j MARK", "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n-A KUBE-POSTROUTING -j MARK"), "do not stand together"),
    "a jump twice": (swap("-I INPUT -j KUBE-FIREWALL\n", "-I INPUT -j KUBE-FIREWALL\n" * 2), "a line twice"),
    "a deletion": (swap("COMMIT\n*nat", "-D INPUT 1\nCOMMIT\n*nat"), UNLIKE),
    "a flush": (swap("COMMIT\n*nat", "-F INPUT\nCOMMIT\n*nat"), UNLIKE),
    "a chain removed": (swap("COMMIT\n*nat", "-X MINE\nCOMMIT\n*nat"), UNLIKE),
    "a policy": (swap("COMMIT\n*nat", "-P INPUT ACCEPT\nCOMMIT\n*nat"), UNLIKE),
    "a jump of our own making": (swap("-I INPUT -j KUBE-FIREWALL", "-I INPUT -j ACCEPT"), UNLIKE),
    "a jump with a condition": (swap("-I INPUT -j KUBE-FIREWALL", "-I INPUT -s 192.0.2.1 -j KUBE-FIREWALL"), UNLIKE),
    "a jump in the wrong table": (swap("-I POSTROUTING", "-I INPUT -j KUBE-FIREWALL\n-I POSTROUTING"), UNLIKE),
    "a jump of another mode": (swap("-I INPUT -j KUBE-FIREWALL", '-I INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL'), UNLIKE),
    "an insert at a position": (swap("-I INPUT -j KUBE-FIREWALL", "-I INPUT 3 -j KUBE-FIREWALL"), UNLIKE),
    "ACCEPT for everything": (rule("KUBE-FORWARD", "-j ACCEPT", "filter"), UNLIKE),
    "ACCEPT from a source": (rule("KUBE-FORWARD", "-s 192.0.2.1/32 -j ACCEPT", "filter"), UNLIKE),
    "ACCEPT for a system port": (
        rule("KUBE-NODEPORTS", '-p tcp -m comment --comment "a/b health check node port" -m tcp --dport 22 -j ACCEPT', "filter"),
        UNLIKE,
    ),
    "ACCEPT that is not a health check": (
        rule("KUBE-NODEPORTS", '-p tcp -m comment --comment "a/b" -m tcp --dport 30080 -j ACCEPT', "filter"),
        UNLIKE,
    ),
    "ACCEPT in nat": (rule("KUBE-SERVICES", '-d 10.96.9.9/32 -p tcp -m comment --comment "a" -m tcp --dport 80 -j ACCEPT'), UNLIKE),
    "a target kube-proxy has not": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -j LOG", "nat"), UNLIKE),
    "REDIRECT": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 22"), UNLIKE),
    "TPROXY": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -j TPROXY"), UNLIKE),
    "a goto": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -g KUBE-NODEPORTS"), UNLIKE),
    "a match kube-proxy has not": (rule("KUBE-SERVICES", "-m owner -j DROP", "filter"), UNLIKE),
    "a match module from a file": (rule("KUBE-SERVICES", "-m bpf --object-pinned /x -j DROP", "filter"), UNLIKE),
    "a long option": (rule("KUBE-SERVICES", "--destination 10.96.9.9/32 -j DROP", "filter"), UNLIKE),
    "DROP for everything": (rule("KUBE-SERVICES", "-j DROP", "filter"), UNLIKE),
    "DROP for a network": (rule("KUBE-SERVICES", '-d 10.0.0.0/8 -p tcp -m comment --comment "a/b has no endpoints" -m tcp --dport 80 -j DROP', "filter"), UNLIKE),
    "a dispatch without a port": (rule("KUBE-SERVICES", f'-d 10.96.9.9/32 -p tcp -m comment --comment "a/b" -j {WEB.chain}'), UNLIKE),
    "a dispatch without an address": (rule("KUBE-SERVICES", f'-p tcp -m comment --comment "a/b" -m tcp --dport 22 -j {WEB.chain}'), UNLIKE),
    "DNAT outside an endpoint": (rule("KUBE-SERVICES", "-d 10.96.9.9/32 -p tcp -m tcp -j DNAT --to-destination 192.0.2.1:80"), UNLIKE),
    "DNAT to a range": (rule(WEB_ENDPOINT, "-p tcp -m tcp -j DNAT --to-destination 192.0.2.1-192.0.2.9:80"), UNLIKE),
    "MASQUERADE outside postrouting": (rule("KUBE-MARK-MASQ", "-j MASQUERADE"), UNLIKE),
    "a mark of many bits": (rule("KUBE-MARK-MASQ", "-j MARK --set-xmark 0xffffffff/0xffffffff"), UNLIKE),
    "a name of another list": (rule(WEB.chain, f"-m recent --rcheck --seconds 9 --reap --name mine --mask 255.255.255.255 --rsource -j {WEB_ENDPOINT}"), UNLIKE),
    "an IPv6 address in the IPv4 file": (rule("KUBE-SERVICES", f'-d fd00::1/128 -p tcp -m comment --comment "a/b" -m tcp --dport 80 -j {WEB.chain}'), UNLIKE),
    "a second comment": (rule("KUBE-FORWARD", '-m comment --comment "kubernetes forwarding rules" -m comment --comment "x" -m mark --mark 0x4000/0x4000 -j ACCEPT', "filter"), UNLIKE),
    "a quote inside a comment": (rule(WEB_ENDPOINT, '-s 10.244.1.10/32 -m comment --comment "a\\" -j ACCEPT" -j KUBE-MARK-MASQ'), UNLIKE),
    "an apostrophe": (rule(WEB_ENDPOINT, "-s 10.244.1.10/32 -m comment --comment 'a b' -j KUBE-MARK-MASQ"), UNLIKE),
    "a comment without end": (rule(WEB_ENDPOINT, '-s 10.244.1.10/32 -m comment --comment "a -j KUBE-MARK-MASQ'), UNLIKE),
    "a comment that is too long": (rule(WEB_ENDPOINT, f'-s 10.244.1.10/32 -m comment --comment "{"a" * 256}" -j KUBE-MARK-MASQ'), "a comment of more than 255 characters"),
    "a control character": (rule(WEB_ENDPOINT, '-s 10.244.1.10/32 -m comment --comment "a\x1b[31m" -j KUBE-MARK-MASQ'), "a character that is not printable ASCII"),
    "a tab": (swap("-A KUBE-MARK-MASQ -j", "-A KUBE-MARK-MASQ\t-j"), "a character that is not printable ASCII"),
    "a carriage return": (on(2, lambda text: text.replace("\n", "\r\n")), "line 1: a character that is not printable ASCII"),
    "counters": (swap("-A KUBE-MARK-MASQ", "[5:5] -A KUBE-MARK-MASQ"), UNLIKE),
    "a marker of another generation": (marker(lambda line: re.sub("--comment .*", f"--comment {'0' * 64}", line)), UNLIKE),
    "a rule in the canary": (rule("KUBE-PROXY-CANARY", '-d 10.96.9.9/32 -p tcp -m comment --comment "a" -m tcp --dport 80 -j DROP', "filter"), UNLIKE),
    "a shell command": (swap("*mangle\n", "$(reboot)\n*mangle\n"), "a line outside a table: $(reboot)"),
    "a marker of another name": (marker(lambda line: re.sub("GEN-[0-9a-f]+", f"GEN-{'0' * 13}", line)), UNLIKE),
    "no marker": (marker(lambda _line: ""), "no line: -A KUBE-PROXY-GEN-"),
    "a marker with a jump": (marker(lambda line: f"{line} -j KUBE-MARK-MASQ"), UNLIKE),
    "a port with a zero in front": (rule(WEB_ENDPOINT, "-p tcp -m tcp -j DNAT --to-destination 10.244.1.9:080"), UNLIKE),
    "a port beyond all ports": (rule(WEB_ENDPOINT, "-p tcp -m tcp -j DNAT --to-destination 10.244.1.9:65536"), UNLIKE),
    "an address with a zero in front": (rule(WEB_ENDPOINT, "-p tcp -m tcp -j DNAT --to-destination 10.244.01.9:80"), UNLIKE),
    "an octet beyond all octets": (rule(WEB_ENDPOINT, "-p tcp -m tcp -j DNAT --to-destination 10.244.1.256:80"), UNLIKE),
    "an address of three parts": (rule(WEB_ENDPOINT, "-p tcp -m tcp -j DNAT --to-destination 10.244.1:80"), UNLIKE),
    "another protocol than the one that is matched": (rule(WEB_ENDPOINT, "-p tcp -m udp -j DNAT --to-destination 10.244.1.9:80"), UNLIKE),
    "a mark of another bit": (swap("--mark 0x4000/0x4000 -j ACCEPT", "--mark 0x8000/0x8000 -j ACCEPT"), UNLIKE),
    "a mark of two bits": (swap("--mark 0x4000/0x4000 -j ACCEPT", "--mark 0x6000/0x6000 -j ACCEPT"), UNLIKE),
    "ACCEPT for a port of the node": (
        rule("KUBE-NODEPORTS", '-p tcp -m comment --comment "a/b health check node port" -m tcp --dport 10250 -j ACCEPT', "filter"),
        UNLIKE,
    ),
    "a chain filled in two files": (on(2, swap_text("-A KUBE-POSTROUTING -j MARK", f"-A {WEB.chain} -j {WEB_ENDPOINT}\n-A KUBE-POSTROUTING -j MARK")), UNLIKE),
    "a dispatch among the endpoints": (on(0, swap_text(":KUBE-MARK-MASQ - [0:0]\n", ":KUBE-MARK-MASQ - [0:0]\n:KUBE-SERVICES - [0:0]\n")), UNLIKE),
    "a jump among the endpoints": (on(0, swap_text("COMMIT\n", "-I OUTPUT -j KUBE-MARK-MASQ\nCOMMIT\n")), UNLIKE),
    "a firewall among the dispatch": (on(1, swap_text("*nat\n", '*nat\n:KUBE-FW-AAAAAAAAAAAAAAAA - [0:0]\n-A KUBE-FW-AAAAAAAAAAAAAAAA -m comment --comment "x"\n')), UNLIKE),
    "what a delta does": (on(0, swap_text("COMMIT\n", f"-X {WEB_ENDPOINT}\nCOMMIT\n")), UNLIKE),
    "what a delta asks": (on(2, swap_text("-I INPUT -j KUBE-FIREWALL", "-C INPUT -j KUBE-FIREWALL")), UNLIKE),
    "a word that stands for an address": (rule(WEB_ENDPOINT, "-p tcp -m tcp -j DNAT --to-destination <DEST>:80"), UNLIKE),
    "a null byte": (on(0, swap_text("-j KUBE-MARK-MASQ\n", "-j KUBE-MARK-MASQ\0 -j ACCEPT\n")), ""),
    "a null byte before the end of a line": (on(0, swap_text("- [0:0]\n", "- [0:0]\0\n")), ""),
    "no newline at the end": (on(0, lambda text: text.removesuffix("\n")), "the digest does not match"),
    "two blanks": (swap("-A KUBE-MARK-MASQ -j", "-A KUBE-MARK-MASQ  -j"), UNLIKE),
    "a blank at the end": (swap("-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000", "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000 "), UNLIKE),
}  # fmt: skip


def written(directory: Path, edit: Edit) -> Path:
    """The shop with other rules of IPv4."""
    bundle = bundles.simple(directory)
    files = [(bundle / name).read_text() for name in NAMES]
    changed = edit(files)
    assert changed != files
    for name, before, text in zip(NAMES, files, changed, strict=True):
        if text != before:
            replace(bundle, name, text)
    return bundle


def replace(bundle: Path, name: str, text: str) -> Path:
    return bundles.replace_file(bundle, name, text)


@pytest.fixture(scope="module", params=HERE)
def awk(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def refused(awk: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """The verdict of each case of RULES."""
    folder = tmp_path_factory.mktemp("rules")
    made = [written(folder / str(number), edit) for number, (edit, _message) in enumerate(RULES.values())]
    return dict(zip(RULES, guarded(made, awk), strict=True))


@pytest.mark.parametrize("case", RULES)
def test_a_rule_that_kube_proxy_would_not_write_is_refused(refused: dict[str, Verdict], case: str) -> None:
    verdict = refused[case]
    assert verdict.code == 2
    assert RULES[case][1] in verdict.reason
    assert re.match(r"iptables-\d-\w+\.rules( line \d+)?: ", verdict.reason)


def test_what_is_right_passes(awk: str, tmp_path: Path) -> None:
    one, two = bundles.simple(tmp_path / "a"), bundles.simple(tmp_path / "b", bundles.shop("10.244.1.99:8080"))
    change = bundles.delta(tmp_path / "d", one, two)
    assert guarded([one, two, change], awk) == [Verdict(0, "")] * 3


# file: {line: part of the message}; what comes before the line is right
FILES = {
    "sysctls.conf": dict.fromkeys(
        (
            "kernel.panic = 1",
            "net.ipv4.conf.all.route_localnet=1",
            "net.ipv4.ip_forward = yes",
            "net.ipv4.ip_forward = -1",
            "net.ipv4.ip_forward = 01",
            "net/ipv4/ip_forward = 1",
            "net.ipv4.ip_forward = 1; reboot",
            "net.ipv4.ip_forward = 1 2",
            "net.ipv4.conf.eth0.rp_filter = 0",
        ),
        "not a line of sysctls.conf",
    ),
    "nfacct.rules": dict.fromkeys(("mine", "ct_state_invalid_dropped_pkts x", "-h"), "not a line of nfacct.rules"),
    "conntrack.udp": dict.fromkeys(
        (
            "ipv4 10.0.0.1 53",
            "ipv5 10.0.0.1 53 -",
            "ipv4 fd00::1 53 -",
            "ipv4 10.0.0.1 dns -",
            "ipv4 10.0.0.1 053 -",
            "ipv6 fd00::1 53 fd00::2:53",
            "ipv4 * 53 10.0.0.1:53,--all",
            "ipv4 * 53 10.0.0.1:53,",
            "ipv4 * 53 $(id)",
        ),
        "not a line of conntrack.udp",
    ),
    "health.conf": {
        **dict.fromkeys(
            (
                "listen ipv4 /run/x",
                "listen ipv6 10.0.0.1",
                "check ipv4 22 shop web",
                "check ipv4 10250 shop web",
                "check ipv4 31000 shop web 1",
                "check ipv4 31000 shop -web",
                f"check ipv4 31000 shop {'a' * 64}",
                "[Service]",
                "ExecStart=x",
                "count ipv4 31000 1",
            ),
            "not a line of health.conf",
        ),
        "check ipv4 31000 a b\ncheck ipv4 31000 a c": "ipv4 31000 twice",
    },
    "health.counts": dict.fromkeys(
        ("eligible maybe", "count ipv4 22 1", "count ipv4 31000", "check ipv4 31000 shop web"),
        "not a line of health.counts",
    ),
    "services.jsonl": dict.fromkeys(("x", "{", '{"a": 1} x', "[]"), "not a line of services.jsonl"),
    "frontends.allow": {"4 nat -A KUBE-SERVICES -j DROP": "not a line of frontends.allow"},
    "notes.txt": {"x": "not a file that such a bundle has"},
    "nftables-1-endpoints.nft": {"add chain ip kube-proxy services": "not a file that such a bundle has"},
    "iptables.rules.old": {"*nat": "not a file that such a bundle has"},
    "nftables-4-drop.nft": {"x": "not a file that such a bundle has"},
}
LINES = [(file, line) for file, lines in FILES.items() for line in lines]


@pytest.fixture(scope="module")
def refused_lines(awk: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Verdict]:
    folder = tmp_path_factory.mktemp("lines")
    made = []
    for number, (file, line) in enumerate(LINES):
        files = {"iptables.rules": bundles.rules(bundles.shop()), file: f"# made by hand\n{line}\n"}
        made.append(bundles.write(folder / str(number), files))
    return dict(zip(LINES, guarded(made, awk), strict=True))


@pytest.mark.parametrize(("file", "line"), LINES)
def test_a_line_of_another_file_that_does_not_fit_is_refused(
    refused_lines: dict[tuple[str, str], Verdict], file: str, line: str
) -> None:
    verdict = refused_lines[file, line]
    assert verdict.code == 2
    at = "" if "not a file" in FILES[file][line] else f" line {2 + line.count(chr(10))}"
    assert verdict.reason.startswith(f"{file}{at}: ")
    assert FILES[file][line] in verdict.reason


GOOD = {
    "sysctls.conf": "net.ipv4.ip_forward = 1\nnet.netfilter.nf_conntrack_max = 1048576\n",
    "nfacct.rules": "ct_state_invalid_dropped_pkts\nlocalhost_nps_accepted_pkts\n",
    "conntrack.udp": "# a\n\nipv4 10.0.0.1 53 -\nipv4 * 30053 10.0.0.1:53,10.0.0.2:53\nipv6 fd00::1 53 [fd00::2]:53\n",
    "health.conf": "period 30\nlisten ipv4 0.0.0.0\nlisten ipv6 ::\ncheck ipv4 31000 a b\ncheck ipv6 31000 a b\n",
    "health.counts": "eligible true\ncount ipv4 31000 0\n",
    "services.jsonl": '{"service":"a/b","family":"IPv4"}\n',
    "frontends.allow": "+4 nat -A KUBE-SERVICES -j x\n",
}


def test_lines_of_all_files_that_fit_pass(awk: str, tmp_path: Path) -> None:
    bundle = bundles.write(tmp_path / "b", {"iptables.rules": bundles.rules(bundles.shop()), **GOOD})
    assert guarded([bundle], awk) == [Verdict(0, "")]


# name: (file of a delta, edit, part of the message)
DELTAS: dict[str, tuple[int, Text, str]] = {
    "the marker of another base": (0, lambda text: re.sub("-X KUBE-PROXY-GEN-[0-9A-F]+", f"-X KUBE-PROXY-GEN-{'0' * 13}", text), UNLIKE),
    "no base": (0, lambda text: re.sub("-[FX] KUBE-PROXY-GEN-.*\n", "", text), "no line: -X KUBE-PROXY-GEN-"),
    "a jump asked for twice": (0, lambda text: re.sub("(-C OUTPUT .*\n)", r"\1\1", text, count=1), "a line twice"),
    "the base removed twice": (0, lambda text: re.sub("(-X KUBE-PROXY-GEN-.*\n)", r"\1\1", text, count=1), "a line twice"),
    "a marker declared twice": (0, lambda text: re.sub("(:KUBE-PROXY-GEN-.*\n)((?s:.*?))(?=COMMIT)", r"\1\2\1", text, count=1), "is declared twice"),
    "a chain removed that was not emptied": (0, swap_text("COMMIT", f"-X {CART.chain}\nCOMMIT"), "not a chain that this bundle empties"),
    "a chain removed that has rules": (0, swap_text("COMMIT", f"-X {WEB.chain}\nCOMMIT"), "not a chain that this bundle empties"),
    "no base in a table": (0, lambda text: re.sub("-X KUBE-PROXY-GEN-.*\n", "", text, count=1), "no line: -X KUBE-PROXY-GEN-"),
    "no marker": (0, lambda text: re.sub("-A KUBE-PROXY-GEN-.*\n", "", text, count=1), "no line: -A KUBE-PROXY-GEN-"),
    "a jump inserted": (0, swap_text("-C OUTPUT", "-I OUTPUT"), UNLIKE),
    "a foreign rule asked for": (0, swap_text("-C OUTPUT", "-C OUTPUT -s 192.0.2.1 -j DROP\n-C OUTPUT"), UNLIKE),
    "the way to masquerade": (0, swap_text("COMMIT", ":KUBE-MARK-MASQ - [0:0]\nCOMMIT"), UNLIKE),
    "kubelet's firewall": (0, swap_text("*filter\n", "*filter\n:KUBE-FIREWALL - [0:0]\n"), UNLIKE),
    "a chain flushed": (0, swap_text("COMMIT", "-F KUBE-SERVICES\nCOMMIT"), UNLIKE),
    "a static chain removed": (0, swap_text("COMMIT", "-X KUBE-SERVICES\nCOMMIT"), UNLIKE),
    "endpoints that lead to the node": (0, lambda text: re.sub("--to-destination .*", "--to-destination 127.0.0.1:22", text), "127.0.0.1 is no address for a destination"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused_deltas(awk: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    folder = tmp_path_factory.mktemp("deltas")
    base = bundles.simple(folder / "a")
    new = bundles.simple(folder / "b", (bundles.Service(WEB.name, WEB.ip, ("10.244.1.99:8080",)), CART))
    made = []
    for number, (file, change, _message) in enumerate(DELTAS.values()):
        each = bundles.delta(folder / str(number), base, new)
        text = (each / NAMES[file]).read_text()
        assert change(text) != text
        made.append(replace(each, NAMES[file], change(text)))
    return dict(zip(DELTAS, guarded(made, awk), strict=True))


@pytest.mark.parametrize("case", DELTAS)
def test_a_delta_that_reaches_further_is_refused(refused_deltas: dict[str, Verdict], case: str) -> None:
    assert refused_deltas[case].code == 2
    assert DELTAS[case][2] in refused_deltas[case].reason


def test_a_refusal_is_the_answer_of_check_and_apply(host: Host, tmp_path: Path) -> None:
    bundle = written(tmp_path / "b", RULES["ACCEPT for everything"][0])
    assert re.match(
        r"iptables-3-frontends\.rules line \d+: not a line of .*, table filter: -A KUBE-FORWARD -j ACCEPT",
        refusal(host, bundle),
    )
    bundle = bundles.write(tmp_path / "c", {"iptables.rules": bundles.rules(bundles.shop()), "sysctls.conf": "x\n"})
    assert refusal(host, bundle) == "sysctls.conf line 1: not a line of sysctls.conf: x"


def edit_manifest(bundle: Path, **fields: object) -> None:
    """Change fields of a manifest, as somebody with the right tools would."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps({**manifest, **fields}, indent=2) + "\n")


X = f"{sha256('x')} 1"
MANIFESTS: dict[str, tuple[dict[str, object], str]] = {
    "another API version": ({"apiVersion": "akp/v1"}, 'apiVersion "akp/v1" is not known'),
    "another kind": ({"kind": "Cluster"}, 'not a line of a manifest:   "kind": "Cluster"'),
    "another mode": ({"mode": "ebpf"}, 'not a line of a manifest:   "mode": "ebpf"'),
    "a mode that the program is not for": ({"mode": "nftables"}, "the bundle is of mode nftables"),
    "a short generation": ({"generation": "abc"}, 'not a line of a manifest:   "generation": "abc"'),
    "a delta without a base": ({"kind": "Delta"}, "base or generation is missing"),
    "a number that is none": ({"endpoints": "many"}, 'not a line of a manifest:   "endpoints": "many"'),
    "a number that a shell reads as octal": ({"servicePorts": "08"}, 'not a line of a manifest:   "servicePorts": "08"'),
    "a path as a file name": ({"files": {"../x": X}}, "not a line of a manifest"),
    "an option as a file name": ({"files": {"-x": X}}, "not a line of a manifest"),
    "a digest that is none": ({"files": {"notes.txt": "abc 1"}}, "not a line of a manifest"),
    "a file without a size": ({"files": {"notes.txt": sha256("x")}}, "not a line of a manifest"),
    "a file that is not there": ({"files": {"other.rules": X}}, "other.rules: listed in the manifest but not there"),
}  # fmt: skip


LISTED = re.compile('^    "(iptables-3-frontends.rules": .*[^,]),?\n', re.M)
LAYOUTS: dict[str, Callable[[str], str]] = {
    "a file that stands out": lambda text: LISTED.sub(r'  "\1,\n', text),
    "a file after the files": lambda text: text.replace("\n  }\n", '\n  },\n    "notes.txt": "x"\n'),
    "a field after the files": lambda text: text.replace("\n  }\n", '\n  }\n  "mode": "iptables"\n'),
    "files twice": lambda text: text.replace('  "files": {\n', '  "files": {\n  }\n  "files": {\n'),
    "a file before the files": lambda text: LISTED.sub("", text).replace(
        '  "files": {\n', f'    "{LISTED.findall(text)[0]}\n  "files": {{\n'
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_manifest_has_one_reading(host: Host, tmp_path: Path, case: str) -> None:
    """Who may sign depends on the files, so no two readers of a manifest may find others."""
    bundle = bundles.simple(tmp_path)
    file = bundle / "manifest.json"
    changed = LAYOUTS[case](file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)
    assert "not a line of a manifest" in refusal(host, bundle)


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_does_not_fit_is_refused(host: Host, tmp_path: Path, case: str) -> None:
    fields, expected = MANIFESTS[case]
    bundle = bundles.write(tmp_path / "b", {"iptables.rules": bundles.rules(bundles.shop())})
    edit_manifest(bundle, **fields)
    result = host.akp("check", bundle, program=PROGRAMS["iptables"])
    assert (result.code, expected in result.json["error"]) == (2, True), result.stdout


@pytest.mark.parametrize(
    "file", ["iptables-1-endpoints.rules", "ip6tables-3-frontends.rules", "akp-node", "sysctls.conf"]
)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_byte_is_enough_to_refuse_a_bundle(host: Host, tmp_path: Path, file: str, place: str) -> None:
    bundle = bundles.simple(tmp_path / "b", sysctls_conf="net.ipv4.ip_forward = 1\n")
    data = bytearray((bundle / file).read_bytes())
    at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[place]
    data[at] ^= 1
    (bundle / file).write_bytes(data)
    result = host.akp("check", bundle, program=PROGRAMS["iptables"])
    assert result.code == 2
    assert file in result.json["error"]


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
    ("apply",): "apply needs a directory",
    ("apply", "a", "b"): "one argument too many: b",
    ("apply", "--force", "a"): "unknown option --force",
    ("apply", "--node"): "--node needs a value",
    ("status", "x"): "status takes no argument",
    ("rollback",): "no bundle was applied here",
    ("rollback", "zz"): '"zz" is not a generation',
    ("restore",): "no bundle was applied here",
}


@pytest.mark.parametrize("arguments", USAGE)
def test_a_wrong_command_line_is_explained(host: Host, arguments: tuple[str, ...]) -> None:
    result = host.akp(*arguments)
    assert result.code == 2
    assert USAGE[arguments] in result.json["error"]


def test_help_and_version_need_nothing(host: Host) -> None:
    assert "apply DIR" in host.akp("--help").stdout
    assert host.akp("apply", "--help").code == 0
    assert host.akp("--version").stdout.startswith("akp-node ")


def test_ports_that_are_opened_are_those_of_the_node(awk: str, tmp_path: Path) -> None:
    line = '-p tcp -m comment --comment "a/b health check node port" -m tcp --dport {} -j ACCEPT'
    low, high, none = (
        written(tmp_path / port, rule("KUBE-NODEPORTS", line.format(port), "filter"))
        for port in ("31000", "32500", "8080")
    )
    assert [each.code for each in guarded([low, high, none], awk)] == [0, 0, 2]
    narrow = guarded([low, high, none], awk, accept_ports="32000-32767")
    assert [each.code for each in narrow] == [2, 0, 2]
    assert "for ports 32000-32767" in narrow[0].reason
    assert [each.code for each in guarded([low, none], awk, accept_ports="8000-9000")] == [2, 0]


def test_a_table_of_shapes_is_well_formed() -> None:
    """Holes are of known types, and where a hole ends is the same for all that may follow it."""
    known = re.findall(r'"([A-Z0-9_]+)"', (SHAPES.parent / "core/guard-types.awk").read_text())
    known += re.findall(r"[\",]([A-Z]+) \d+ ", (SHAPES.parent / "core/guard-types.awk").read_text())
    words = re.findall(r"<[A-Z0-9:-]+", (SHAPES.parent / "core/guard-shapes.awk").read_text())
    known += [each.strip("<:") for each in words] + ["P"]
    for file in sorted(SHAPES.glob("*.txt")):
        text = file.read_text()
        assert "'" not in text
        for hole in re.findall(r"<([^>\n]*)>", re.sub("^#.*", "", text, flags=re.M)):
            assert set(hole.split(":")) <= set(known), (file.name, hole)
