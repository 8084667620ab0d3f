# ruff: noqa: E501 -- a rule stands on one line, as it would be typed.
"""Bundles by hand: the smallest that are complete, and big synthetic ones.

Tests write the rules of a family as one text, which `rules` makes, and `write` divides it into the three files of a
bundle. In such a text `KUBE-PROXY-GEN-SHORT` and `GENERATION` stand for what `write` fills in.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentless_kube_proxy.bundle.manifest import manifest_text, sha256
from agentless_kube_proxy.bundle.program import node_program, part_program

JUMPS = {
    "filter": (
        '-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES',
        '-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES',
        '-I INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS',
        '-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD',
        '-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL',
        '-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL',
        '-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL',
        "-I INPUT -j KUBE-FIREWALL",
        "-I OUTPUT -j KUBE-FIREWALL",
    ),
    "nat": (
        '-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING',
    ),
}
STATIC = {
    "mangle": ("KUBE-PROXY-CANARY",),
    "filter": (
        *("KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD", "KUBE-NODEPORTS"),
        *("KUBE-PROXY-FIREWALL", "KUBE-FIREWALL", "KUBE-PROXY-CANARY", "KUBE-PROXY-GEN-SHORT"),
    ),
    "nat": (
        *("KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ"),
        *("KUBE-PROXY-CANARY", "KUBE-PROXY-GEN-SHORT"),
    ),
}
MARKER = "-A KUBE-PROXY-GEN-SHORT -m comment --comment GENERATION\n"
# The files of a family in the order in which they are loaded, by the name that stands for all three here.
FILES = {
    f"{tool}.rules": tuple(f"{tool}-{kind}.rules" for kind in ("1-endpoints", "2-dispatch", "3-frontends"))
    for tool in ("iptables", "ip6tables")
}
NODEPORTS_LAST = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"


@dataclass(frozen=True)
class Service:
    """One TCP service port and its endpoints, by their addresses."""

    name: str
    ip: str
    endpoints: tuple[str, ...]
    port: int = 80

    @property
    def chain(self) -> str:
        return "KUBE-SVC-" + hash16(f"{self.name}tcp")

    def endpoint_chain(self, endpoint: str) -> str:
        return "KUBE-SEP-" + hash16(f"{self.name}tcp{endpoint}")


def hash16(text: str) -> str:
    return base64.b32encode(hashlib.sha256(text.encode()).digest())[:16].decode()


def shop(*endpoints: str) -> tuple[Service, ...]:
    """Two small services; the arguments are the endpoints of the first."""
    first = endpoints or ("10.244.1.10:8080", "10.244.1.2:8080", "10.244.2.7:8080")
    return (Service("shop/web:http", "10.96.7.7", first), Service("shop/cart:http", "10.96.7.8", ("10.244.1.3:8080",)))


def many(services: int, endpoints: int) -> Iterator[Service]:
    """A synthetic cluster."""
    for i in range(services):
        addresses = ((i * endpoints + k) for k in range(endpoints))
        yield Service(
            f"ns{i % 50}/svc-{i}:http",
            f"10.{96 + i // 65536}.{i // 256 % 256}.{i % 256}",
            tuple(f"10.{200 + a // 62500}.{a // 250 % 250}.{a % 250 + 1}:8080" for a in addresses),
        )


def rules(services: Iterable[Service], *, ipv6: bool = False, extra: Mapping[str, Iterable[str]] | None = None) -> str:
    """The rules of a family. `extra` are more rules of static chains, by table."""
    services = () if ipv6 else tuple(services)
    more = extra or {}
    loopback = "::1/128" if ipv6 else "127.0.0.0/8"
    marker = MARKER.rstrip("\n")

    def table(name: str, groups: Iterable[str], lines: Iterable[str]) -> Iterator[str]:
        yield f"*{name}"
        yield from (f":{chain} - [0:0]" for chain in STATIC[name])
        yield from groups
        yield from lines
        yield from more.get(name, ())
        yield from JUMPS.get(name, ())
        yield "COMMIT"

    out = ["# a bundle made by hand", *table("mangle", (), ())]
    forward = (
        '-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT',
        '-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule"'
        " -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    )
    out += table("filter", (), (*forward, marker))
    dispatch = [
        f'-A KUBE-SERVICES -d {s.ip}/32 -p tcp -m comment --comment "{s.name} cluster IP"'
        f" -m tcp --dport {s.port} -j {s.chain}"
        for s in services
    ]
    nat = [
        *dispatch,
        f'-A KUBE-SERVICES ! -d {loopback} -m comment --comment "{NODEPORTS_LAST}"'
        " -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
        "-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
        "-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0",
        '-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully',
        "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
        marker,
    ]
    out += table("nat", (line for service in services for line in group(service)), nat)
    return "\n".join(out) + "\n"


def group(service: Service) -> Iterator[str]:
    """The chains of one service port."""
    n = len(service.endpoints)
    chains = [service.endpoint_chain(e) for e in service.endpoints]
    yield f"# {service.name} tcp"
    yield f":{service.chain} - [0:0]"
    yield from (f":{chain} - [0:0]" for chain in chains)
    yield (
        f'-A {service.chain} ! -s 10.244.0.0/16 -d {service.ip}/32 -p tcp -m comment --comment "{service.name} cluster IP"'
        f" -m tcp --dport {service.port} -j KUBE-MARK-MASQ"
    )
    for i, (endpoint, chain) in enumerate(zip(service.endpoints, chains, strict=True)):
        chance = f" -m statistic --mode random --probability {round(2**31 / (n - i)) / 2**31:.11f}" if i < n - 1 else ""
        yield f'-A {service.chain} -m comment --comment "{service.name} -> {endpoint}"{chance} -j {chain}'
    for endpoint, chain in zip(service.endpoints, chains, strict=True):
        address = endpoint.rpartition(":")[0]
        yield f'-A {chain} -s {address}/32 -m comment --comment "{service.name}" -j KUBE-MARK-MASQ'
        yield f'-A {chain} -p tcp -m comment --comment "{service.name}" -m tcp -j DNAT --to-destination {endpoint}'


def divided(text: str) -> list[str]:
    """The rules of a family as they stand in the three files: endpoints, dispatch, frontends."""
    files: list[list[str]] = [[], [], []]
    table, at = "", [False] * 3

    def add(index: int, line: str) -> None:
        if table and not at[index]:
            files[index].append(f"*{table}")
            at[index] = True
        files[index].append(line)

    for line in text.splitlines():
        if line.startswith("*"):
            table, at = line[1:], [False] * 3
        elif line == "COMMIT" and table:
            for index, begun in enumerate(at):
                if begun:
                    files[index].append(line)
            table = ""
        else:
            add(_kind(table, line), line)
            if line.startswith(":KUBE-MARK-MASQ "):
                add(0, line)
            elif line.startswith(":KUBE-FW-"):
                add(1, line)
    return ["".join(f"{line}\n" for line in lines) for lines in files]


def grouped(texts: Iterable[str]) -> str:
    """Restore files as one, with one transaction per table, as a node loads them."""
    tables: dict[str, list[str]] = {}
    for text in texts:
        for table, lines in re.findall(r"^\*(\w+)\n(.*?)^COMMIT\n", text, re.M | re.S):
            tables.setdefault(table, []).append(lines)
    return "".join(f"*{table}\n{''.join(lines)}COMMIT\n" for table, lines in tables.items())


def _kind(table: str, line: str) -> int:
    """In which of the three files a line stands."""
    words = line.removeprefix(":").split()
    chain = words[0] if line.startswith(":") else words[1] if line.startswith(("-A ", "-F ", "-X ")) else ""
    if (table == "nat" and re.match("KUBE-(SVC|SVL|SEP)-", chain)) or line.startswith("#"):
        return 0
    dispatch = {"nat": ("KUBE-SERVICES", "KUBE-NODEPORTS"), "filter": ("KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES")}
    if chain in dispatch.get(table, ()) or re.match("KUBE-(EXT|PROXY-GEN)-", chain):
        return 1
    return 2


def write(directory: Path, files: Mapping[str, str], **fields: str | int) -> Path:
    """A bundle directory from files: digests, manifest, program.

    `GENERATION` in a file becomes the generation, and the rules of a family are divided.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    generation = str(fields.pop("generation", "")) or sha256("\0".join(f"{k}\0{v}" for k, v in sorted(files.items())))
    mode = str(fields.get("mode", "iptables"))
    contents: dict[str, str] = {}
    for name, text in files.items():
        text = re.sub(
            r"\bGENERATION$", generation, text.replace("GEN-SHORT", f"GEN-{generation[:13].upper()}"), flags=re.M
        )
        if name in FILES and mode == "iptables":
            contents |= {file: part for file, part in zip(FILES[name], divided(text), strict=True) if part or text}
            contents |= {} if text else {FILES[name][0]: ""}
        else:
            contents[name] = text
    if fields.get("kind", "Bundle") == "Bundle":
        contents |= {"akp-leave": part_program("leave"), "akp-node": node_program(mode)}
    manifest = {
        "kind": "Bundle",
        "node": "n1",
        "mode": mode,
        "compat": "1.37",
        "generation": generation,
        **fields,
    }
    _seal(directory, manifest, contents)
    return directory


def _seal(directory: Path, manifest: Mapping[str, object], contents: Mapping[str, str]) -> None:
    for name, text in contents.items():
        (directory / name).write_text(text)
    rules = "".join(text for name, text in contents.items() if "-1-endpoints" in name)
    ports = len(re.findall("^# .* (?:tcp|udp|sctp)$", rules, re.M))
    totals = {"services": ports, "servicePorts": ports, "endpoints": rules.count(" -j DNAT ")}
    fields = {**manifest, **{key: manifest.get(key, number) for key, number in totals.items()}}
    text = manifest_text(fields, [(name, text.encode()) for name, text in contents.items()])
    (directory / "manifest.json").write_text(text)


def replace_file(directory: Path, name: str, text: str) -> Path:
    """The bundle with another text in a file, and a manifest that fits it."""
    manifest = json.loads((directory / "manifest.json").read_text())
    contents = {each: (directory / each).read_text() for each in manifest.pop("files")}
    if name in FILES and manifest["mode"] == "iptables":
        contents |= dict(zip(FILES[name], divided(text), strict=True))
    else:
        contents[name] = text
    program = {each: contents.pop(each) for each in ("akp-leave", "akp-node") if each in contents}
    del manifest["apiVersion"]
    _seal(directory, manifest, contents | program)
    return directory


def simple(directory: Path, services: Iterable[Service] | None = None, **files: str) -> Path:
    """A complete bundle of some services in both families; `files` replaces or adds files (`_` stands for `.`)."""
    chosen = shop() if services is None else services
    base = {"iptables.rules": rules(chosen), "ip6tables.rules": rules((), ipv6=True)}
    base |= {name.replace("_", "."): text for name, text in files.items()}
    return write(directory, base)


def delta(directory: Path, base: Path, new: Path, **files: str) -> Path:
    """What leads from one bundle of iptables mode to another; `files` replaces or adds files (`_` stands for `.`)."""
    then, now = (json.loads((each / "manifest.json").read_text()) for each in (base, new))
    contents: dict[str, str] = {}
    for names in FILES.values():
        if names[0] in now["files"]:
            contents |= dict(_family_delta(then["generation"], now["generation"], base, new, names))
    contents |= {name.replace("_", "."): text for name, text in files.items()}
    totals = {key: now[key] for key in ("services", "servicePorts", "endpoints")}
    return write(directory, contents, kind="Delta", base=then["generation"], generation=now["generation"], **totals)


def _family_delta(then: str, now: str, base: Path, new: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The files of one family, each with the chains that are others than before."""
    old, wanted = ([_chains((each / name).read_text()) for name in names] for each in (base, new))
    marks = [f"KUBE-PROXY-GEN-{each[:13].upper()}" for each in (then, now)]
    gone: dict[str, list[str]] = {"nat": [], "filter": []}
    jumps = {
        table: [f"-C{line[2:]}" for line in _chains((new / names[2]).read_text()).get((table, ""), ())]
        for table in gone
    }
    sections: list[dict[str, list[str]]] = []
    for before, after in zip(old, wanted, strict=True):
        section: dict[str, list[str]] = {"nat": [], "filter": []}
        for table, lines in section.items():
            here = {c: text for (t, c), text in after.items() if t == table and c and c not in marks}
            left = [c for t, c in before if t == table and c and c not in marks and (t, c) not in after]
            others = {c: text for c, text in here.items() if before.get((table, c)) != text and c != "KUBE-FIREWALL"}
            lines += [f":{chain} - [0:0]" for chain in (*others, *left)]
            lines += [rule for text in others.values() for rule in text]
            gone[table] += left
        sections.append(section)
    for table in gone:
        last = max((i for i, section in enumerate(sections) if section[table]), default=0)
        sections[last][table] += [f"-X {chain}" for chain in dict.fromkeys(gone[table])]
        head = [f"-F {marks[0]}", f"-X {marks[0]}", *jumps[table]]
        mark = [f":{marks[1]} - [0:0]", f"-A {marks[1]} -m comment --comment {now}"]
        sections[0][table] = [*head, *sections[0][table], *mark]
    for name, section in zip(names, sections, strict=True):
        tables = (
            f"*{table}\n" + "".join(f"{x}\n" for x in lines) + "COMMIT\n" for table, lines in section.items() if lines
        )
        if text := "".join(tables):
            yield name, text


def _chains(text: str) -> dict[tuple[str, str], list[str]]:
    """Table and chain -> its rules; the jumps of built-in chains have no chain here."""
    found: dict[tuple[str, str], list[str]] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":"):
            found.setdefault((table, line[1:].split()[0]), [])
        elif line.startswith("-A "):
            found[table, line.split()[1]].append(line)
        elif line.startswith("-I "):
            found.setdefault((table, ""), []).append(line)
    return found
