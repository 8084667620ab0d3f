"""Going back: what is kept, and what is before what."""

from __future__ import annotations

from pathlib import Path

from tests.node import bundles
from tests.node.host import Host


def apply(host: Host, directory: Path, *names: str) -> dict[str, str]:
    """Apply a bundle of each name, in this order; their generations by name."""
    made = {}
    for name in names:
        number = ord(name)
        made[name] = host.apply(bundles.simple(directory / name, bundles.shop(f"10.244.1.{number}:80")))["generation"]
    return made


def test_after_a_rollback_the_next_bundle_stands_on_what_was_in_force(nft_host: Host, tmp_path: Path) -> None:
    made = apply(nft_host, tmp_path, "a", "b", "c")
    assert nft_host.akp("rollback", made["a"]).json["generation"] == made["a"]
    made |= apply(nft_host, tmp_path, "d")
    assert nft_host.akp("rollback").json["generation"] == made["a"]


def test_as_many_are_kept_as_the_node_says(nft_host: Host, tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "node.conf").write_text("keep 2\n")
    made = apply(nft_host, tmp_path, "a", "b")
    answer = nft_host.akp("apply", bundles.simple(tmp_path / "c", bundles.shop("10.244.1.9:80")), AKP_ETC=str(etc))
    assert answer.code == 0, answer.stderr
    assert nft_host.akp("status").json["kept"] == [made["b"], answer.json["generation"]]
    gone = nft_host.akp("rollback", made["a"])
    assert (gone.code, "is not kept here" in gone.json["error"]) == (2, True)
    assert all(kept in gone.json["error"] for kept in (made["b"], answer.json["generation"]))
    # What a carrier asks for comes first.
    four = nft_host.akp("apply", bundles.simple(tmp_path / "d"), AKP_ETC=str(etc), AKP_KEEP="1")
    assert nft_host.akp("status").json["kept"] == [four.json["generation"]]
    (etc / "node.conf").write_text("keep none\n")
    refused = nft_host.akp("apply", bundles.simple(tmp_path / "e"), AKP_ETC=str(etc), AKP_KEEP="")
    assert refused.code == 2
