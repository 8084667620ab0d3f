"""What tells of a kube-proxy on a node, by what the node answers."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.carry.rival import runs, signs, told

STALE = {"kind": "stale-chain", "family": "ipv4", "table": "nat"}


def status(*differences: dict[str, Any], state: str = "applied") -> dict[str, Any]:
    return {"status": {"state": state, "generation": "g", "differences": list(differences)}}


def test_a_process_is_named_and_a_port_where_none_is_seen() -> None:
    assert signs({"kubeProxy": [7, 8], "kubeProxyPort": True}) == ["process 7, 8"]
    assert signs({"kubeProxy": [], "kubeProxyPort": True}) == [
        "no process of that name is seen, but its metrics port 10249 is taken"
    ]
    assert signs({"kubeProxy": [], "kubeProxyPort": False, **status()}) == []


@pytest.mark.parametrize("chain", ["KUBE-SVC-ABCDEFGH234567AB", "service-ABCDEFGH-shop/web/tcp/http"])
def test_chains_of_services_that_nothing_here_made_are_fresh_writes(chain: str) -> None:
    (sign,) = signs(status({**STALE, "chain": chain}))
    assert sign == f"since the last apply, something wrote {chain}"
    assert "kubectl label node n1" in told("h1", "n1", [sign])


@pytest.mark.parametrize(
    ("server", "entry"),
    [
        ("-t 10.96.0.9:80", "10.96.0.9,tcp:80"),
        ("-u [fd00:10:96::9]:53", "fd00:10:96::9,udp:53"),
        ("--sctp-service 10.96.0.9:9", "10.96.0.9,sctp:9"),
    ],
)
def test_a_virtual_server_that_stands_in_a_set_too_is_a_fresh_write_of_ipvs_mode(server: str, entry: str) -> None:
    made = {"kind": "extra-server", "table": "ipvs", "name": server}
    listed = {"kind": "extra-entry", "table": "ipset", "name": "KUBE-CLUSTER-IP", "value": entry}
    assert signs(status(made, listed)) == [f"since the last apply, something wrote ipvs {server}"]
    assert signs(status(made)) == signs(status(listed)) == [], "made by hand"


def test_what_it_wrote_does_not_say_that_it_runs_now() -> None:
    written = status({**STALE, "chain": "KUBE-SEP-ABCDEFGH234567AB"})
    assert signs(written) != []
    assert not runs(written)
    assert runs({**written, "kubeProxy": [7]})
    assert runs({**written, "kubeProxyPort": True})


def test_many_are_counted() -> None:
    chains = [{**STALE, "chain": f"KUBE-SEP-ABCDEFGH2345672{each}"} for each in "ABCDE"]
    (sign,) = signs(status(*chains))
    assert sign.endswith("KUBE-SEP-ABCDEFGH2345672C and 2 more")


@pytest.mark.parametrize(
    "answer",
    [
        status({**STALE, "chain": "KUBE-SVC-ABCDEFGH234567AB"}, state="partial"),
        status({**STALE, "chain": "KUBE-SVC-ABCDEFGH234567AB"}, state="foreign"),
        status({**STALE, "chain": "KUBE-MINE"}),
        status({"kind": "missing-rule", "chain": "KUBE-SVC-ABCDEFGH234567AB"}),
        {"status": {"state": "foreign", "generation": None, "differences": None}},
    ],
    ids=["a run that was cut short", "old rules", "made by hand", "removed by hand", "before the first sync"],
)
def test_other_differences_are_for_a_sync_to_mend(answer: dict[str, Any]) -> None:
    assert signs(answer) == []
