"""Where endpoints and frontends may be: in every mode, in both families, and within what node.conf pins."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.write import write_bundle

from tests.node.bundles import replace_file
from tests.node.guarding import HERE, Verdict, guarded
from tests.unit.build import dual_stack, node, port, render, service, slice_of

MODES = ("iptables", "nftables", "ipvs")
ENDPOINTS = {4: "10.244.1.3", 6: "fd00:10:244:1::3"}
FRONTENDS = {4: "10.96.7.9", 6: "fd00:10:96::9"}
# Addresses that no packet is for, and texts that are no address.
NEVER = {
    4: (
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "169.254.169.254", "224.0.0.1", "239.255.255.255"),
        *("255.255.255.255", "10.244.1.256", "10.244.01.3", "10.244.1.03", "010.244.1.3", "10.244.1", "10.244.1.3.4"),
        *("10.244.1.0x3", "10.244..3", "fd00::1", "10.244.1.3/24", "10.244.1.1-10.244.1.9", "localhost", "1e1.2.3.4"),
    ),
    6: (
        *("::1", "::", "0:0:0:0:0:0:0:1", "0:0:0:0:0:0:0:0", "0::1", "::0:1", "0:0::1", "::ffff:127.0.0.1"),
        *("::ffff:7f00:1", "::7f00:1", "::ffff:0:7f00:1", "0:0:0:0:0:ffff:7f00:1", "2002:7f00:1::1", "fe80::1"),
        *("febf:ffff::1", "ff02::1", "ff00::", "FD00::1", "fd00:::1", "fd00::1::2", "fd00:1:2:3:4:5:6:7:8", "fd00:1"),
        *(
            "fd00::12345",
            "fd00::0001",
            "00fd::1",
            "fd00::g",
            "fd00::1%eth0",
            "fd00:1:2:3:4:5:6:7:",
            ":fd00::1",
            "10.0.0.1",
        ),
    ),
}
FINE = {
    4: ("10.0.0.0", "126.255.255.255", "128.0.0.1", "169.253.0.1", "223.255.255.255", "240.0.0.1", "255.1.1.1"),
    6: ("fd00::", "2001:db8::1", "fd00:1:2:3:4:5:6:7", "1::2", "64:ff9b::a00:1", "fec0::1", "fe00::1", "fd00:0:0:1::1"),
}  # fmt: skip


@pytest.fixture(scope="module", params=HERE)
def awk(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bundle(directory: Path, mode: str, old: str = "", new: str = "") -> Path:
    """A bundle of both families, with another address in place of one."""
    both = dual_stack("both", clusterIP=FRONTENDS[4], clusterIPs=[*FRONTENDS.values()])
    objects = (node("n1", "172.18.0.11", "fd00:18::11"), both, *(slice_of("both", ip) for ip in ENDPOINTS.values()))
    write_bundle(render(*objects, mode=mode), directory)
    found = 0
    for file in sorted(directory.iterdir()) if old else ():
        text = file.read_text()
        if old in text and file.name.endswith((".rules", ".nft", ".batch")):
            replace_file(directory, file.name, text.replace(old, new))
            found += 1
    assert found or not old
    return directory


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [4, 6])
def test_nothing_leads_to_where_no_endpoint_is(awk: str, tmp_path: Path, mode: str, family: int) -> None:
    made = [bundle(tmp_path / str(i), mode, ENDPOINTS[family], ip) for i, ip in enumerate(NEVER[family])]
    verdicts = dict(zip(NEVER[family], guarded(made, awk), strict=True))
    assert {ip: each.code for ip, each in verdicts.items()} == dict.fromkeys(NEVER[family], 2)
    bad = NEVER[family][0]
    assert f"{bad} is no address for a destination" in verdicts[bad].reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [4, 6])
def test_no_frontend_is_where_none_can_be(awk: str, tmp_path: Path, mode: str, family: int) -> None:
    made = [bundle(tmp_path / str(i), mode, FRONTENDS[family], ip) for i, ip in enumerate(NEVER[family])]
    verdicts = dict(zip(NEVER[family], guarded(made, awk), strict=True))
    assert {ip: each.code for ip, each in verdicts.items()} == dict.fromkeys(NEVER[family], 2)
    bad = NEVER[family][0]
    assert f"{bad} is no address for a frontend" in verdicts[bad].reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [4, 6])
def test_other_addresses_are_fine(awk: str, tmp_path: Path, mode: str, family: int) -> None:
    made = [
        bundle(tmp_path / f"{number}-{i}", mode, old, ip)
        for number, old in enumerate((ENDPOINTS[family], FRONTENDS[family]))
        for i, ip in enumerate(FINE[family])
    ]
    assert guarded(made, awk) == [Verdict(0, "")] * len(made)


RANGES = {
    "endpoints elsewhere": (
        {"endpoint_ranges": "10.245.0.0/16,fd00:10:244::/48"},
        "10.244.1.3 is no address for",
    ),
    "endpoints of one family": ({"endpoint_ranges": "10.244.0.0/16"}, "fd00:10:244:1::3 is no address for a dest"),
    "endpoints beside a small range": ({"endpoint_ranges": "10.244.1.4/30,fd00::/16"}, "10.244.1.3 is no address"),
    "endpoints beside a bit": ({"endpoint_ranges": "10.244.2.0/23,fd00::/16"}, "10.244.1.3 is no address"),
    "frontends elsewhere": ({"vip_ranges": "10.97.0.0/16,fd00:10:96::/108"}, "10.96.7.9 is no address for a frontend"),
    "frontends of one family": ({"vip_ranges": "fd00:10:96::/108"}, "10.96.7.9 is no address for a frontend"),
    "a range that is none": ({"vip_ranges": "10.96.0.0"}, "are networks"),
    "a range with an odd address": ({"vip_ranges": "10.96.0.300/16"}, "are networks"),
}
WIDE = {
    "endpoint_ranges": "192.0.2.0/24,10.244.1.0/30,fd00:10:244::/48",
    "vip_ranges": "10.96.0.0/12,fd00:10:96::8/127",
}


@pytest.mark.parametrize("mode", MODES)
def test_node_conf_pins_ranges_that_no_bundle_can_widen(awk: str, tmp_path: Path, mode: str) -> None:
    made = bundle(tmp_path / "b", mode)
    assert guarded([made], awk, **WIDE) == [Verdict(0, "")]
    for settings, message in RANGES.values():
        (verdict,) = guarded([made], awk, **settings)
        assert (verdict.code, message in verdict.reason) == (2, True), verdict


def test_ipvs_serves_node_ports_on_addresses_outside_of_the_ranges(awk: str, tmp_path: Path) -> None:
    web = service(type="NodePort", ports=[port(nodePort=30080)])
    made = tmp_path / "b"
    write_bundle(render(node("n1", "172.18.0.11"), web, slice_of("web", "10.244.1.3"), mode="ipvs"), made)
    assert "-A -t 172.18.0.11:30080" in (made / "ipvs-1-frontends.rules").read_text()
    ranges = {"vip_ranges": "10.96.0.0/12,fd00::/8"}
    assert guarded([made], awk, **ranges) == [Verdict(0, "")]
    text = (made / "ipvs-1-frontends.rules").read_text()
    replace_file(made, "ipvs-1-frontends.rules", text + "-A -t 172.18.0.11:22 -s rr\n")
    (verdict,) = guarded([made], awk, **ranges)
    assert "172.18.0.11 is no address for a frontend" in verdict.reason
