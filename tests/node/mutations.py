# ruff: noqa: E501 -- a rule stands on one line, as it would be typed.
"""Bundles gone wrong on purpose: real ones of every mode, changed by chance and by malice, with digests that fit again."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.manifest import manifest_text
from agentless_kube_proxy.bundle.write import bundle_parts, delta_parts

from tests.unit.build import Object, dual_stack, endpoint, node, port, render, service, slice_of

MODES = ("iptables", "nftables", "ipvs")
Files = dict[str, bytes]

# Lines that would reach what is not ours, in the languages of all tools.
HOSTILE = """\
-A INPUT -j ACCEPT
-I INPUT -j ACCEPT
-I INPUT 1 -p tcp --dport 22 -j ACCEPT
-D INPUT 1
-F INPUT
-F FOREIGN
-X FOREIGN
-E FOREIGN KUBE-SERVICES
-P INPUT ACCEPT
-Z
-N KUBE-SVC-AAAAAAAAAAAAAAAA
-R FOREIGN 1 -j ACCEPT
:INPUT ACCEPT [0:0]
:FOREIGN - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A FOREIGN -j ACCEPT
-A KUBE-KUBELET-CANARY -j ACCEPT
-A KUBE-FORWARD -j ACCEPT
-A KUBE-SERVICES -j FOREIGN
-A KUBE-NODEPORTS -p tcp -m comment --comment "a health check node port" -m tcp --dport 22 -j ACCEPT
[0:0] -A INPUT -j ACCEPT
*raw
*security
*broute
COMMIT
*filter
-t raw -A PREROUTING -j NOTRACK
--modprobe=/tmp/x
flush ruleset
delete table inet foreign
add table inet foreign
flush table inet foreign
add rule inet foreign input accept
delete rule inet foreign input handle 2
add chain ip kube-proxy input { type filter hook input priority -300 ; policy accept ; }
add rule ip kube-proxy services accept
add table ip nat
flush table ip filter
table inet foreign { chain input { accept ; } ; }
include "/etc/shadow"
define x = 1
add element inet foreign names { 192.0.2.1 }
delete set inet foreign names
add flowtable ip kube-proxy f { hook ingress priority 0 ; devices = { lo } ; }
reset counters
create FOREIGN hash:ip
add FOREIGN 192.0.2.1
destroy FOREIGN
destroy
flush
swap KUBE-CLUSTER-IP FOREIGN
rename FOREIGN KUBE-CLUSTER-IP
-A -t 192.0.2.1:22 -s rr
-C
-D -t 192.0.2.1:80
-a -t 10.96.7.7:80 -r 192.0.2.1:22 -g -w 1
-A -f 1 -s rr
addr add 192.0.2.1/32 dev eth0
addr del 127.0.0.1/8 dev lo
link set lo down
link del foreign0
route add default via 192.0.2.1
rule add from all lookup 7
netns exec x sh
kernel.modprobe = /tmp/x
kernel.core_pattern = 1
net.ipv4.conf.all.rp_filter = 0
net/ipv4/ip_forward = 1
net.ipv4.ip_forward = 1 2
../kernel/panic = 1
foreign_counter
ipv4 * 22 -
ipv4 192.0.2.1 22 $(id)
listen ipv4 /run/x
check ipv4 22 shop web 1""".splitlines()
WORDS = (
    *("INPUT", "FORWARD", "OUTPUT", "PREROUTING", "POSTROUTING", "FOREIGN", "ACCEPT", "DROP", "RETURN", "QUEUE", "LOG"),
    *("-A", "-I", "-D", "-F", "-X", "-P", "-N", "-g", "-j", "!", "-m", "-t", "--", "0.0.0.0/0", "::/0", "127.0.0.1/32"),
    *("add", "delete", "flush", "insert", "replace", "create", "destroy", "table", "chain", "rule", "set", "map"),
    *("inet", "ip", "ip6", "arp", "bridge", "netdev", "foreign", "kube-proxy", "filter", "nat", "raw", "mangle"),
    *(
        "{",
        "}",
        ";",
        "accept",
        "goto",
        "jump",
        "continue",
        "@foreign",
        "22",
        "0",
        "65536",
        "-1",
        "99999999999999999999",
    ),
    *(
        "lo",
        "eth0",
        "foreign0",
        "kube-ipvs0",
        "KUBE-SERVICES",
        "KUBE-CLUSTER-IP",
        "KUBE-KUBELET-CANARY",
        "owner",
        "bpf",
    ),
)
GLUE = (
    " ; ",
    ";",
    "\r",
    "\v",
    "\f",
    "\t",
    "\\\n",
    "\n",
    " # ",
    "\0",
    "\x85",
    "\u2028",
    " ",
    "&&",
    "|",
    "`",
    "$(id)",
    '"',
    "'",
    "\\",
)
FOREIGN_NAMES = (
    "INPUT",
    "FOREIGN",
    "KUBE-KUBELET-CANARY",
    "DOCKER",
    "kube-svc",
    "KUBE-SVC-SHORT",
    "foreign",
    "a b",
    "../x",
)
# Where no endpoint is, in forms that tools take.
NOWHERE = (
    *(
        "127.0.0.1",
        "127.1",
        "0.0.0.0",
        "0",
        "169.254.169.254",
        "224.0.0.1",
        "255.255.255.255",
        "10.0.0.256",
        "010.0.0.1",
    ),
    *(
        "::1",
        "::",
        "0:0:0:0:0:0:0:1",
        "::ffff:127.0.0.1",
        "::ffff:7f00:1",
        "fe80::1",
        "ff02::1",
        "localhost",
        "10.0.0.1-10.0.0.9",
    ),
    *("10.0.0.0/8", "fd00::/8", "10.99.99.99", "fd99::99"),
)
_ADDRESS = r"\d+\.\d+\.\d+\.\d+|[0-9a-f]*(?::[0-9a-f]*){2,}"
ALL_FILES = (
    *(
        f"{tool}-{kind}.rules"
        for tool in ("iptables", "ip6tables")
        for kind in ("1-endpoints", "2-dispatch", "3-frontends")
    ),
    *("nftables-1-endpoints.nft", "nftables-2-dispatch.nft", "nftables-3-frontends.nft", "nftables-4-drop.nft"),
    *("iptables.rules", "ip6tables.rules", "ipset-1-frontends.rules", "ipset-2-endpoints.rules"),
    *("ipvs-1-frontends.rules", "ipvs-2-endpoints.rules", "ip.batch", "ipvs.conf", "sysctls.conf", "nfacct.rules"),
    *("conntrack.udp", "health.conf", "health.counts", "services.jsonl", "frontends.allow"),
    *("conntrack.udp.diff", "services.jsonl.diff", "iptables-9.rules", "x"),
)


@dataclass(frozen=True)
class Original:
    """A real bundle, or a real delta."""

    mode: str
    fields: Object
    files: Files
    base: State | None = None  # what a delta builds on


def _objects(second: bool) -> list[Object]:
    """A cluster with a Service of every kind."""
    local = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000}
    web = service(
        ports=[port(nodePort=30080), port(53, "dns", "UDP")],
        ingress=("198.51.100.9",),
        **local,
        loadBalancerSourceRanges=["203.0.113.0/24"],
    )
    both = dual_stack(
        "both", clusterIP="10.96.7.9", clusterIPs=["10.96.7.9", "fd00:10:96::9"], sessionAffinity="ClientIP"
    )
    empty = service("empty", clusterIP="10.96.7.10", externalIPs=["192.0.2.10"])
    ends = ["10.244.1.1", endpoint("10.244.2.1", node="n2"), *(["10.244.1.9"] if second else [])]
    made = [
        node("n1", "172.18.0.11", "fd00:18::11"),
        web,
        slice_of("web", *ends, ports=[port(8080), port(53, "dns", "UDP")]),
        both,
        slice_of("both", "10.244.1.3", "10.244.1.4"),
        slice_of("both", "fd00:10:244:1::3"),
        empty,
    ]
    return [*made, service("new", clusterIP="10.96.7.11"), slice_of("new", "10.244.1.11")] if second else made


@cache
def originals() -> tuple[Original, ...]:
    """A bundle and a delta of each mode."""
    found = []
    quiet = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    for mode in MODES:
        old, new = (render(*_objects(second), mode=mode, conntrack=quiet) for second in (False, True))
        change = delta(old, new)
        for (fields, contents), base in ((bundle_parts(new), None), (delta_parts(change, new), old)):
            found.append(Original(mode, fields, {name: text.encode() for name, text in contents}, base))
    return tuple(found)


class Mutation:
    """The bundle of one seed: the same every time."""

    def __init__(self, seed: int, modes: tuple[str, ...] = MODES) -> None:
        self._random = random.Random(seed)
        self.seed = seed
        self.original = self._random.choice([each for each in originals() if each.mode in modes])
        self.files = dict(self.original.files)
        self.fields = dict(self.original.fields)
        self.steps: list[str] = []
        self._raw = False
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            step = self._random.choice(self._steps())
            self.steps.append(step.__name__.strip("_"))
            step()

    def _steps(self) -> tuple[Callable[[], None], ...]:
        lines = (
            self._word,
            self._number,
            self._address,
            self._hostile,
            self._glued,
            self._splice,
            self._duplicate,
            self._drop,
            self._swap,
        )
        return (
            *lines * 3,
            self._rename,
            self._bytes,
            self._bytes,
            self._move,
            self._other_file,
            self._manifest,
            self._raw_bytes,
        )

    # ---- lines of one file

    def _pick(self) -> str:
        """A file, mostly one of rules."""
        names = sorted(self.files)
        rules = [name for name in names if name.endswith((".rules", ".nft", ".batch")) and self.files[name]]
        return self._random.choice(rules if rules and self._random.random() < 0.8 else names)

    def _edit(self, change: Callable[[list[str]], None]) -> None:
        name = self._pick()
        lines = self.files[name].decode("utf-8", "surrogateescape").split("\n")
        change(lines)
        self.files[name] = "\n".join(lines).encode("utf-8", "surrogateescape")

    def _word(self) -> None:
        def change(lines: list[str]) -> None:
            at = self._random.randrange(len(lines))
            words = lines[at].split(" ")
            i = self._random.randrange(len(words))
            words[i : i + self._random.choice((0, 1, 1, 1))] = [self._random.choice(WORDS)]
            lines[at] = " ".join(words)

        self._edit(change)

    def _number(self) -> None:
        def change(lines: list[str]) -> None:
            at = self._random.randrange(len(lines))
            found = list(re.finditer(r"\d+", lines[at]))
            if found:
                number = self._random.choice(found)
                new = self._random.choice(
                    ("0", "1", "22", "33", "255", "256", "4096", "65535", "65536", "08", "1e3", "0x10")
                )
                lines[at] = lines[at][: number.start()] + new + lines[at][number.end() :]

        self._edit(change)

    def _address(self) -> None:
        def change(lines: list[str]) -> None:
            found = [(at, each) for at, line in enumerate(lines) for each in re.finditer(_ADDRESS, line)]
            if found:
                at, address = self._random.choice(found)
                new = self._random.choice(NOWHERE)
                lines[at] = lines[at][: address.start()] + new + lines[at][address.end() :]

        self._edit(change)

    def _hostile(self) -> None:
        self._edit(lambda lines: lines.insert(self._random.randrange(len(lines)), self._random.choice(HOSTILE)))

    def _glued(self) -> None:
        def change(lines: list[str]) -> None:
            at = self._random.randrange(len(lines))
            cut = self._random.choice((0, len(lines[at]), self._random.randrange(len(lines[at]) + 1)))
            more = self._random.choice((self._random.choice(HOSTILE), ""))
            lines[at] = lines[at][:cut] + self._random.choice(GLUE) + more + lines[at][cut:]

        self._edit(change)

    def _splice(self) -> None:
        def change(lines: list[str]) -> None:
            one, two = self._random.choice(lines).split(" "), self._random.choice(lines).split(" ")
            text = " ".join(one[: self._random.randrange(len(one) + 1)] + two[self._random.randrange(len(two) + 1) :])
            lines[self._random.randrange(len(lines))] = text

        self._edit(change)

    def _duplicate(self) -> None:
        self._edit(lambda lines: lines.insert(self._random.randrange(len(lines)), self._random.choice(lines)))

    def _drop(self) -> None:
        self._edit(lambda lines: lines.pop(self._random.randrange(len(lines))) and None)

    def _swap(self) -> None:
        def change(lines: list[str]) -> None:
            i, j = self._random.randrange(len(lines)), self._random.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]

        self._edit(change)

    # ---- more than a line

    def _rename(self) -> None:
        """Another name for one of our objects, wherever it stands."""
        text = b"\n".join(self.files.values()).decode("utf-8", "surrogateescape")
        names = sorted(set(re.findall(r"KUBE-[A-Z0-9-]+|kube-proxy|service-\S+|endpoint-\S+|[a-z]+-[a-z-]+", text)))
        if names:
            old, new = self._random.choice(names).encode(), self._random.choice(FOREIGN_NAMES).encode()
            self.files = {name: content.replace(old, new) for name, content in self.files.items()}

    def _bytes(self) -> None:
        name = self._pick()
        content = bytearray(self.files[name])
        for _ in range(self._random.choice((1, 1, 2, 8))):
            at = self._random.randrange(len(content) + 1)
            content[at : at + self._random.choice((0, 1, 1, 4))] = self._random.randbytes(
                self._random.choice((0, 1, 1, 3))
            )
        self.files[name] = bytes(content)

    def _move(self) -> None:
        """The content of one file in the name of another."""
        self.files[self._random.choice(ALL_FILES)] = self.files[self._pick()]

    def _other_file(self) -> None:
        self.files[self._random.choice(ALL_FILES)] = ("\n".join(self._random.choices(HOSTILE, k=3)) + "\n").encode()

    def _manifest(self) -> None:
        field = self._random.choice(("mode", "kind", "base", "generation", "node"))
        self.fields[field] = self._random.choice(
            (*MODES, "Bundle", "Delta", "", "x", "';id;'", "$(id)", "0" * 64, "../x", "KUBE")
        )

    def _raw_bytes(self) -> None:
        """After the digests were taken."""
        self._raw = True

    def write(self, directory: Path) -> Path:
        """As a bundle directory."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        (directory / "manifest.json").write_text(manifest_text(self.fields, [*self.files.items()]))
        if self._raw:
            file = directory / self._random.choice(("manifest.json", *sorted(self.files)))
            content = bytearray(file.read_bytes())
            at = self._random.randrange(len(content) + 1)
            content[at : at + self._random.choice((0, 1, 16))] = self._random.randbytes(self._random.choice((0, 1, 16)))
            file.write_bytes(bytes(content))
        return directory

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.original.mode} {self.original.fields['kind']}, {', '.join(self.steps)}"


def mutations(first: int, count: int, modes: tuple[str, ...] = MODES) -> Iterator[Mutation]:
    return (Mutation(seed, modes) for seed in range(first, first + count))
