"""Bundles: native files, a manifest that a shell can read, digests over all of it, and the same bytes every time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agentless_kube_proxy.backends.state import FrameObject, State, delta
from agentless_kube_proxy.bundle.manifest import manifest_digest, manifest_text
from agentless_kube_proxy.bundle.program import node_program
from agentless_kube_proxy.bundle.write import bundle_parts, sealed, write_bundle, write_delta

from tests.unit.build import port, render, service, slice_of


def shop(*endpoints: str) -> State:
    ports = [port(53, "dns", "UDP"), port(80)]
    return render(
        service(ports=ports),
        slice_of("web", *(endpoints or ("10.244.1.1",)), ports=ports),
        service("api", clusterIP="10.96.0.8"),
    )


def written(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_bundle_holds_a_file_for_every_tool(tmp_path: Path) -> None:
    write_bundle(shop(), tmp_path / "n1")
    assert sorted(written(tmp_path / "n1")) == [
        "akp-leave",
        "akp-node",
        "conntrack.udp",
        "frontends.allow",
        "health.conf",
        "health.counts",
        "ip6tables-1-endpoints.rules",
        "ip6tables-2-dispatch.rules",
        "ip6tables-3-frontends.rules",
        "iptables-1-endpoints.rules",
        "iptables-2-dispatch.rules",
        "iptables-3-frontends.rules",
        "manifest.json",
        "nfacct.rules",
        "services.jsonl",
        "sysctls.conf",
    ]


def test_the_manifest_says_what_it_is_and_holds_digest_and_size_of_every_file(tmp_path: Path) -> None:
    state = shop()
    write_bundle(state, tmp_path / "n1")
    files = written(tmp_path / "n1")
    manifest = json.loads(files.pop("manifest.json"))
    listed = manifest.pop("files")
    assert listed == {name: f"{hashlib.sha256(content).hexdigest()} {len(content)}" for name, content in files.items()}
    assert [*listed][-1] == "akp-node"
    assert manifest == {
        "apiVersion": "akp/v2",
        "kind": "Bundle",
        "node": "n1",
        "mode": "iptables",
        "compat": "1.37",
        "generation": state.generation,
        "services": 2,
        "servicePorts": 3,
        "endpoints": 2,
    }


def test_the_digest_of_a_bundle_is_that_of_its_manifest(tmp_path: Path) -> None:
    write_bundle(shop(), tmp_path / "n1")
    manifest = tmp_path / "n1" / "manifest.json"
    # As a shell computes it.
    told = subprocess.run(["sha256sum", manifest], capture_output=True, text=True, check=True).stdout.split()[0]
    assert manifest_digest(manifest.read_text()) == told
    digest, files = sealed(bundle_parts(shop()))
    assert digest == hashlib.sha256(dict(files)["manifest.json"]).hexdigest()


def test_a_manifest_has_one_key_a_line() -> None:
    assert manifest_text({"kind": "Bundle"}, [("a", b"b\n"), ("c", b"")]).splitlines() == [
        "{",
        '  "apiVersion": "akp/v2",',
        '  "kind": "Bundle",',
        '  "files": {',
        f'    "a": "{hashlib.sha256(b"b" + bytes([10])).hexdigest()} 2",',
        f'    "c": "{hashlib.sha256(b"").hexdigest()} 0"',
        "  }",
        "}",
    ]


def test_the_program_comes_along_and_can_be_run(tmp_path: Path) -> None:
    write_bundle(shop(), tmp_path / "n1")
    program = tmp_path / "n1" / "akp-node"
    assert program.read_text() == node_program("iptables")
    assert os.access(program, os.X_OK)
    assert (tmp_path / "n1").stat().st_mode & 0o777 == 0o755


def test_the_same_input_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    write_bundle(shop(), tmp_path / "here")
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.unit.bundle.test_write import shop, write_bundle\n"
        "write_bundle(shop(), Path(sys.argv[1]))"
    )
    for seed in ("0", "1", "2"):
        there = tmp_path / f"there-{seed}"
        subprocess.run([sys.executable, "-c", program, str(there)], env={"PYTHONHASHSEED": seed}, check=True)
        assert written(there) == written(tmp_path / "here")


def test_a_new_bundle_replaces_the_old_one_whole(tmp_path: Path) -> None:
    write_bundle(shop(), tmp_path / "n1")
    (tmp_path / "n1" / "stray").write_text("left over")
    write_bundle(shop("10.244.1.2"), tmp_path / "n1")
    assert "stray" not in written(tmp_path / "n1")
    assert b"10.244.1.2:80" in written(tmp_path / "n1")["iptables-1-endpoints.rules"]
    assert [path.name for path in tmp_path.iterdir()] == ["n1"]


def test_a_bundle_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    write_bundle(shop(), tmp_path / "n1")
    before = written(tmp_path / "n1")
    state = shop("10.244.1.2")
    unwritable = dataclasses.replace(state, frame={**state.frame, ("file", "no/such/directory"): FrameObject()})
    with pytest.raises(FileNotFoundError):
        write_bundle(unwritable, tmp_path / "n1")
    assert written(tmp_path / "n1") == before
    assert [path.name for path in tmp_path.iterdir()] == ["n1"]


def test_a_delta_bundle_names_the_generation_that_it_is_made_for(tmp_path: Path) -> None:
    old, new = shop(), shop("10.244.1.1", "10.244.1.2")
    write_delta(delta(old, new), new, tmp_path / "n1")
    manifest = json.loads((tmp_path / "n1" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["base"], manifest["generation"]) == ("Delta", old.generation, new.generation)
    assert set(manifest["files"]) == {
        "conntrack.udp.diff",
        "ip6tables-1-endpoints.rules",
        "iptables-1-endpoints.rules",
        "services.jsonl.diff",
    }
    assert (manifest["services"], manifest["servicePorts"], manifest["endpoints"]) == (2, 3, 4)


def test_services_are_told_one_a_line(tmp_path: Path) -> None:
    write_bundle(shop(), tmp_path / "n1")
    lines = (tmp_path / "n1" / "services.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"service": "shop/api", "port": "http", "protocol": "tcp", "family": "IPv4", "clusterIP": "10.96.0.8:80"},
        {
            "service": "shop/web",
            "port": "dns",
            "protocol": "udp",
            "family": "IPv4",
            "clusterIP": "10.96.7.7:53",
            "endpoints": ["10.244.1.1:53"],
        },
        {
            "service": "shop/web",
            "port": "http",
            "protocol": "tcp",
            "family": "IPv4",
            "clusterIP": "10.96.7.7:80",
            "endpoints": ["10.244.1.1:80"],
        },
    ]


def test_no_delta_leads_to_another_mode(tmp_path: Path) -> None:
    old, new = render(service()), render(service(), mode="nftables")
    with pytest.raises(ValueError, match="only a full bundle"):
        write_delta(delta(old, new), new, tmp_path / "n1")
    assert not (tmp_path / "n1").exists()
