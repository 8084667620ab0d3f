# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The rules of a node as texts: of a bundle, or as its own tools print them. Which file is read by what."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..addresses import Family
from ..errors import UserError
from .packet import Host
from .walk import Walker

_IPTABLES = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
_NFT = {Family.IPV4: "ip", Family.IPV6: "ip6"}


class NoRules(UserError):
    """Texts without rules of kube-proxy; the message says what was looked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ruleset:
    """Texts by the names that they have in a bundle, such as iptables.rules, ip6tables-1-endpoints.rules, ip.batch."""

    files: Mapping[str, str]
    told: str = ""  # the mode, where it is known

    @property
    def mode(self) -> str:
        """What the rules are for; otherwise the files tell."""
        if self.told:
            return self.told
        if any(self._lines("ipvs", ".rules")):
            return "ipvs"
        if any(self._lines("nftables", ".nft")):
            return "nftables"
        return "userspace" if "haproxy.cfg" in self.files else "iptables"

    def walker(self, family: Family, addresses: frozenset[str]) -> Walker:
        """What follows packets of a family on a host with these addresses; only readers of the mode are loaded."""
        mode = self.mode
        if mode == "nftables":
            return self._nft_walker(family, addresses)
        from .iptables import read_tables
        from .iptables_walk import IptablesWalker, IpvsWalker

        read = read_tables(self._lines(_IPTABLES[family], ".rules"))
        if not read:
            raise NoRules(f"there are no rules of {_IPTABLES[family]}")
        if mode == "iptables":
            return IptablesWalker(Host(addresses), read)
        if mode == "userspace":
            from .proxies import UserspaceWalker, read_proxies

            proxies = read_proxies(self._lines("haproxy", ".cfg"), self._lines("nginx", ".conf"))
            return UserspaceWalker(Host(addresses), read, proxies)
        from .ipset import read_sets
        from .ipvs import read_servers

        sets = read_sets(self._lines("ipset", ".rules"))
        servers = read_servers(self._lines("ipvs", ".rules"))
        return IpvsWalker(Host(addresses | self.bound()), read, sets, servers)

    def _nft_walker(self, family: Family, addresses: frozenset[str]) -> Walker:
        from .nft_text import read_nft
        from .nft_walk import NftWalker

        tables = read_nft(self._lines("nftables", ".nft"))
        if _NFT[family] not in tables:
            raise NoRules(f"there is no table {_NFT[family]} kube-proxy")
        return NftWalker(Host(addresses), tables[_NFT[family]])

    def bound(self) -> frozenset[str]:
        """The addresses of Services that the host holds itself, in ipvs mode."""
        from .ipvs import read_addresses

        return read_addresses(self._lines("ip", ".batch"))

    def _lines(self, tool: str, suffix: str) -> Iterator[str]:
        """The lines of a tool's file, or of its files in the order of their names."""
        for name in sorted(self.files):
            if name == f"{tool}{suffix}" or (name.startswith(f"{tool}-") and name.endswith(suffix)):
                yield from self.files[name].splitlines()


def read_directory(path: Path) -> Ruleset:
    """The texts of a bundle, or of a directory into which a node's own tools printed theirs."""
    names = ("iptables", "ip6tables", "nftables", "ipset", "ipvs", "ip.batch", "haproxy.cfg", "nginx.conf")
    files = {
        each.name: each.read_text(encoding="utf-8")
        for each in sorted(path.iterdir())
        if each.is_file() and each.name.startswith(names)
    }
    if not files:
        raise NoRules(f"{path}: holds no rules: neither iptables.rules nor nftables.nft, nor a bundle's files")
    return Ruleset(files)
