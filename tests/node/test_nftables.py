"""nftables mode on a real kernel: what a bundle becomes, what it leaves alone, and what is found and put right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node.host import Host
from tests.node.nftables import by_hand, foreign, listing, shop, state, wrap_nft, write
from tests.unit.build import endpoint, node, port, service, slice_of
from tests.unit.clusters import cluster

CART = "cart/tcp/http"


@pytest.fixture(params=["dash", "busybox"])
def host(request: pytest.FixtureRequest, new_host: Callable[..., Host]) -> Host:
    """A host under each shell."""
    made = new_host("nft", request.param)
    made.mode = "nftables"
    return made


def affinity_set(host: Host, ip: str) -> str:
    found = re.findall(rf"set (affinity-\S+__{re.escape(ip)}/\d+) ", host.sh("nft list table ip kube-proxy"))
    return str(found[0]) if found else ""


# ------------------------------------------------------------------ apply


def test_a_bundle_applied_is_the_bundle_loaded_by_hand(
    host: Host, new_host: Callable[..., Host], tmp_path: Path
) -> None:
    bundle = write(shop("10.244.1.1", "10.244.2.1", sticky=("10.244.1.2",)), tmp_path / "a")
    answer = host.apply(bundle)
    assert answer["changed"] is True
    assert answer["chains"]["ipv4"]["added"] == 23
    other = new_host()
    by_hand(other, bundle)
    assert listing(host) == listing(other)
    by_hand(other, bundle)
    assert listing(host) == listing(other)


def test_a_second_apply_changes_nothing(host: Host, tmp_path: Path) -> None:
    bundle = write(shop("10.244.1.1", sticky=("10.244.1.2",)), tmp_path / "a")
    host.apply(bundle)
    before = host.sh("nft -a list ruleset")
    for options in ((), ("--verify",)):
        answer = host.apply(bundle, *options)
        assert answer["changed"] is False
        assert host.sh("nft -a list ruleset") == before


@pytest.mark.parametrize("seed", range(3))
def test_one_cluster_after_another_is_the_second_alone(
    host: Host, new_host: Callable[..., Host], tmp_path: Path, seed: int
) -> None:
    one, two = (write(state(*cluster(8, number)), tmp_path / str(number)) for number in (seed, seed + 100))
    alone = new_host()
    alone.apply(two)
    host.apply(one)
    answer = host.apply(two)
    assert any(counts["removed"] for counts in answer["chains"].values())
    assert listing(host) == listing(alone)
    # and from a kernel that nobody recorded, by comparing listings
    host.apply(one)
    (host.state / "record").unlink()
    host.apply(two)
    assert listing(host) == listing(alone)
    assert host.akp("status", "--verify").json["drift"] == 0


def test_only_what_differs_is_touched(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1", "10.244.2.1"), tmp_path / "a"))
    handles = re.compile(r"chain ((?!gen-)\S+) .*# handle (\d+)|^\t\t(.*) # handle (\d+)", re.M)
    before = set(handles.findall(host.sh("nft -a list ruleset")))
    answer = host.apply(write(shop("10.244.1.1", "10.244.2.2"), tmp_path / "b"))
    after = set(handles.findall(host.sh("nft -a list ruleset")))
    counts = answer["chains"]["ipv4"]
    assert counts == {"added": 0, "changed": 2, "removed": 0, "same": 19, "elementsAdded": 2, "elementsRemoved": 2}
    assert len(before - after) == len(after - before) == 2


def test_sessions_survive_changes_of_everything_else(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1", sticky=("10.244.1.1", "10.244.1.2")), tmp_path / "a"))
    for ip in ("10.244.1.1", "10.244.1.2"):
        host.sh(f"nft add element ip kube-proxy {affinity_set(host, ip)} '{{ 192.0.2.77 }}'")
    bundle = write(shop("10.244.1.9", sticky=("10.244.1.2", "10.244.1.3")), tmp_path / "b")
    host.apply(bundle)
    assert affinity_set(host, "10.244.1.1") == ""
    kept = affinity_set(host, "10.244.1.2")
    for verb in (("apply", "--verify", str(bundle)), ("restore",), ("status", "--verify")):
        assert host.akp(*verb).code == 0
        assert "192.0.2.77" in host.sh(f"nft list set ip kube-proxy {kept}")
    assert host.akp("status", "--verify").json["drift"] == 0


def test_a_new_affinity_timeout_takes_effect_and_keeps_sessions(host: Host, tmp_path: Path) -> None:
    def timeout(seconds: int) -> Path:
        affinity = {"clientIP": {"timeoutSeconds": seconds}}
        cart = service("cart", sessionAffinity="ClientIP", sessionAffinityConfig=affinity)
        return write(state(cart, slice_of("cart", "10.244.1.1")), tmp_path / str(seconds))

    host.apply(timeout(600))
    name = affinity_set(host, "10.244.1.1")
    host.sh(f"nft add element ip kube-proxy {name} '{{ 192.0.2.77 }}'")
    host.apply(timeout(7200))
    text = host.sh(f"nft list set ip kube-proxy {name}")
    assert "timeout 2h" in text
    assert "192.0.2.77" in text


def test_foreign_tables_stay_byte_for_byte(host: Host, tmp_path: Path) -> None:
    host.sh(
        "nft add table inet filter; nft add set inet filter allowed '{ type ipv4_addr; elements = { 192.0.2.1 }; }';"
        "nft add chain inet filter input '{ type filter hook input priority 0; }';"
        "nft add rule inet filter input ip saddr @allowed counter accept;"
        "nft add table ip nat; nft add table ip kube-proxy-not; nft add chain ip kube-proxy-not services;"
        "iptables-nft -A INPUT -s 192.0.2.2 -j ACCEPT"
    )
    before = foreign(host)
    host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    host.apply(write(shop("10.244.1.2"), tmp_path / "b"))
    host.akp("rollback")
    assert foreign(host) == before
    host.akp("cleanup")
    assert host.sh("nft list ruleset") == before


def test_a_family_that_is_no_longer_wanted_is_gone(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    host.apply(write(shop("10.244.1.1", facts={"capabilities": {"ipv6": False}}), tmp_path / "b"))
    assert "table ip6" not in host.sh("nft list ruleset")
    assert host.akp("status").json["state"] == "applied"


def test_node_port_addresses_come_and_go(host: Host, new_host: Callable[..., Host], tmp_path: Path) -> None:
    some = write(shop("10.244.1.1", nodePortAddresses=["172.18.0.0/16"]), tmp_path / "some")
    every = write(shop("10.244.1.1", nodePortAddresses=["0.0.0.0/0", "::/0"]), tmp_path / "every")
    alone = new_host()
    alone.apply(every)
    host.apply(some)
    host.apply(every)
    assert listing(host) == listing(alone)


def test_names_of_any_length_load(host: Host, tmp_path: Path) -> None:
    name, namespace, ports = "s" * 63, "n" * 63, [port(80, "p" * 15)]
    v6 = "fd00:1111:2222:3333:4444:5555:6666:7777"
    long = service(
        name,
        namespace,
        ports=ports,
        sessionAffinity="ClientIP",
        ipFamilies=["IPv4", "IPv6"],
        clusterIPs=["10.96.7.7", "fd00:10:96::7"],
    )
    host.apply(
        write(
            state(
                long,
                slice_of(name, "10.244.111.111", namespace=namespace, ports=ports),
                slice_of(name, v6, namespace=namespace, ports=ports),
                service("t" * 63, namespace, clusterIP="10.96.7.8", ports=ports),
            ),
            tmp_path / "a",
        )
    )
    text = host.sh("nft list ruleset")
    cut = f"{namespace}/{'t' * 63}:"[:128]
    assert f'comment "{cut}"' in text
    assert f"__{v6.replace(':', '.')}/80" in text


def test_claimed_twice_is_no_reason_to_refuse_the_rest(host: Host, tmp_path: Path) -> None:
    twice = [
        service(
            name,
            clusterIP=f"10.96.7.{i}",
            externalIPs=["192.0.2.1", "192.0.2.1"],
            type="LoadBalancer",
            ingress=("192.0.2.1",),
        )
        for i, name in enumerate(("a", "b", "c"), 1)
    ]
    host.apply(write(state(*twice, slice_of("a", "10.244.1.1"), slice_of("c", "10.244.1.3")), tmp_path / "a"))
    text = host.sh("nft list map ip kube-proxy service-ips")
    assert text.count("192.0.2.1 . tcp . 80") == 1
    assert "shop/a/tcp/http" in next(line for line in text.splitlines() if "192.0.2.1" in line)


def test_node_ports_that_are_rejected_on_localhost_load_and_leave(host: Host, tmp_path: Path) -> None:
    gate = {"KubeProxyNFTablesLocalhostNodePorts": True}
    host.apply(write(shop("10.244.1.1", featureGates=gate), tmp_path / "a"))
    assert "tcp . 31080 : goto localhost-nodeport-reject-tcp" in host.sh("nft list ruleset")
    assert host.akp("status", "--verify").json["drift"] == 0
    host.apply(write(shop("10.244.1.1"), tmp_path / "b"))
    assert "localhost-nodeport" not in host.sh("nft list ruleset")


def test_many_services_are_staged_before_one_switch(host: Host, new_host: Callable[..., Host], tmp_path: Path) -> None:
    services = [service(f"s{i}", clusterIP=f"10.96.{i // 250}.{i % 250}") for i in range(700)]
    slices = [slice_of(f"s{i}", f"10.244.{i // 250}.{i % 250}", f"10.245.{i // 250}.{i % 250}") for i in range(700)]
    bundle = write(state(*services, *slices), tmp_path / "a")
    log = host.directory / "log"
    env = wrap_nft(host, f'case $1 in -f) printf "%s %s\\n" "${{2##*/}}" "$(grep -c " element " "$2")" >>{log} ;; esac')
    env |= {"AKP_CHUNK": "1000"}
    assert host.akp("apply", bundle, **env).code == 0
    calls = [line.split() for line in log.read_text().splitlines()]
    stages = [count for name, count in calls if name.startswith("stage.")]
    assert stages == ["0"] * len(stages)
    assert len(stages) == 2
    # a cluster IP and a destination each, the connections of their endpoints to themselves, and the node's address
    assert [count for name, count in calls if name == "switch"] == [str(700 + 700 + 1400 + 1)]
    other = new_host()
    by_hand(other, bundle)
    assert listing(host) == listing(other)
    # and all of them leave again
    host.apply(write(state(), tmp_path / "b"))
    assert "/" not in "".join(re.findall(r"chain (\S+) ", host.sh("nft list ruleset")))


# ------------------------------------------------------------------ status, drift, repair

DAMAGE = {
    "a rule too many": ("nft add rule ip kube-proxy services accept", "partial|applied", "extra-rule"),
    "a rule missing": ("nft flush chain ip kube-proxy masquerading", "applied", "missing-rule"),
    "a jump missing": ("nft flush chain ip6 kube-proxy nat-postrouting", "partial", "missing-rule"),
    "an element too many": ("nft add element ip kube-proxy cluster-ips '{ 192.0.2.9 }'", "applied", "extra-element"),
    "an element missing": (
        "nft delete element ip kube-proxy cluster-ips '{ 10.96.7.7 }'",
        "applied",
        "missing-element",
    ),
    "an element that leads elsewhere": (
        "nft delete element ip kube-proxy no-endpoint-services '{ 10.96.7.8 . tcp . 80 }';"
        "nft add element ip kube-proxy no-endpoint-services '{ 10.96.7.8 . tcp . 80 : drop }'",
        "applied",
        "extra-element",
    ),
    "a chain too many": (
        "nft add chain ip kube-proxy mine; nft add rule ip kube-proxy mine accept",
        "applied",
        "stale-chain",
    ),
    "a base chain of another priority": (
        "nft delete chain ip kube-proxy nat-output;"
        "nft add chain ip kube-proxy nat-output '{ type nat hook output priority 5 ; }';"
        "nft add rule ip kube-proxy nat-output jump services",
        "applied",
        None,
    ),
    "a table put to sleep": ("nft add table ip kube-proxy '{ flags dormant ; }'", "applied", "attributes"),
    "all rules gone": ("nft flush table ip kube-proxy", "partial", "missing-rule"),
    "a table gone": ("nft delete table ip6 kube-proxy", "partial", "missing-chain"),
    "the marker gone": (
        "nft delete chain ip kube-proxy $(nft list table ip kube-proxy | sed -n 's/.*chain \\(gen-.*\\) {/\\1/p')",
        "partial",
        None,
    ),
    "everything gone": ("nft flush ruleset", "flushed", "missing-chain"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_seen_named_and_repaired(host: Host, tmp_path: Path, case: str) -> None:
    script, seen, kind = DAMAGE[case]
    bundle = write(shop("10.244.1.1", "10.244.1.2"), tmp_path / "a")
    host.apply(bundle)
    before = listing(host)
    host.sh(script)
    assert re.fullmatch(seen, host.akp("status").json["state"])
    answer = host.akp("status", "--verify").json
    kinds = {each["kind"] for each in answer["differences"]}
    assert kind in kinds if kind else answer["drift"] >= 0
    check = host.akp("check", "--verify", bundle).json
    assert check["changed"] is True
    host.apply(bundle, "--verify")
    assert listing(host) == before
    assert host.akp("status", "--verify").json["drift"] == 0


def test_a_kernel_that_is_not_what_was_recorded_takes_the_next_bundle_all_the_same(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    # The next bundle deletes this element; the marker does not tell that it is gone.
    host.sh("nft delete element ip kube-proxy hairpin-connections '{ 10.244.1.1 . 10.244.1.1 . tcp . 8080 }'")
    host.apply(write(shop("10.244.1.2"), tmp_path / "b"))
    assert host.akp("status", "--verify").json["drift"] == 0


def test_differences_name_family_chain_and_rule(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1", "10.244.1.2"), tmp_path / "a"))
    chain = re.findall(r"chain (service-\S+/web/tcp/http) ", host.sh("nft list ruleset"))[0]
    host.sh(f"nft insert rule ip kube-proxy {chain} drop")
    host.sh("nft delete element ip kube-proxy service-nodeports '{ tcp . 31080 }'")
    differences = host.akp("status", "--verify").json["differences"]
    common = {"family": "ipv4", "table": "kube-proxy"}
    assert sorted(differences, key=lambda each: str(each["kind"])) == [
        {**common, "kind": "extra-rule", "chain": chain, "rule": "drop"},
        {
            **common,
            "kind": "missing-element",
            "chain": "service-nodeports",
            "rule": f"tcp . 31080 : goto {chain.replace('service-', 'external-', 1)}",
        },
    ]


def test_another_bundle_loaded_by_hand_is_found_and_replaced(host: Host, tmp_path: Path) -> None:
    """The markers of both are there, so a look is not enough; where the recorded one is gone, it is."""
    bundle, other = (write(shop(ip), tmp_path / ip) for ip in ("10.244.1.1", "10.244.1.2"))
    host.apply(bundle)
    before = listing(host)
    by_hand(host, other)
    assert host.akp("status", "--verify").json["drift"] > 0
    assert host.apply(bundle, "--verify")["changed"] is True
    assert listing(host) == before
    host.sh("nft delete table ip kube-proxy; nft delete table ip6 kube-proxy")
    by_hand(host, other)
    assert host.akp("status").json["state"] == "foreign"
    assert host.apply(bundle)["changed"] is True
    assert listing(host) == before


def test_check_says_what_apply_would_do_and_does_nothing(host: Host, tmp_path: Path) -> None:
    one, two = (write(shop(ip), tmp_path / ip) for ip in ("10.244.1.1", "10.244.1.2"))
    assert host.akp("check", one).json["changed"] is True
    assert host.sh("nft list ruleset") == ""
    assert not host.state.exists()
    host.apply(one)
    before = host.sh("nft -a list ruleset")
    told = host.akp("check", two).json
    assert host.sh("nft -a list ruleset") == before
    done = host.apply(two)
    assert told["chains"] == done["chains"]
    assert host.akp("check", two).json["changed"] is False


def test_a_table_of_another_layout_is_made_anew(host: Host, tmp_path: Path) -> None:
    host.sh(
        "nft add table ip kube-proxy; nft add map ip kube-proxy service-ips '{ type ipv4_addr : verdict; }';"
        "nft add chain ip kube-proxy services; nft add rule ip kube-proxy services ip daddr vmap @service-ips;"
        "nft add chain ip kube-proxy nat-output '{ type nat hook output priority 0; }';"
        "nft add rule ip kube-proxy nat-output jump services"
    )
    host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    assert host.akp("status", "--verify").json["drift"] == 0


def test_rollback_and_restore(host: Host, tmp_path: Path) -> None:
    one, two = (write(shop(ip), tmp_path / ip) for ip in ("10.244.1.1", "10.244.1.2"))
    host.apply(one)
    before = listing(host)
    host.apply(two)
    assert host.akp("rollback").json["changed"] is True
    assert listing(host) == before
    host.sh("nft flush ruleset")
    assert host.akp("restore").json["changed"] is True
    assert listing(host) == before


def test_cleanup_leaves_nothing(host: Host, tmp_path: Path) -> None:
    before = host.kernel()
    host.apply(write(shop("10.244.1.1", sticky=("10.244.1.2",)), tmp_path / "a"))
    assert host.akp("cleanup", "--dry-run").json["changed"] is True
    assert host.akp("cleanup").json["changed"] is True
    assert host.kernel() == before
    assert host.akp("status").json["state"] == "absent"
    assert host.akp("cleanup").json["changed"] is False


def test_status_tells_of_tables_that_nobody_recorded(host: Host, tmp_path: Path) -> None:
    by_hand(host, write(shop("10.244.1.1"), tmp_path / "a"))
    assert host.akp("status").json["state"] == "foreign"
    host.akp("cleanup")
    assert host.sh("nft list ruleset") == ""


def test_ask_tells_the_state_by_a_look_and_the_facts_once(host: Host, tmp_path: Path) -> None:
    made = shop("10.244.1.1", sticky=("10.244.1.2",))
    host.apply(write(made, tmp_path / "a"))
    # With so many service ports ask no longer compares every rule.
    record = host.state / "record"
    record.write_text(re.sub(r"^ports=\d+$", "ports=301", record.read_text(), flags=re.M))
    listed = 'case "$1 $2" in "list table"*) echo listed >&2; exit 1 ;; esac'
    stranger = host.akp("ask", **wrap_nft(host, listed)).json
    assert (stranger["status"]["state"], stranger["status"]["generation"]) == ("applied", made.generation)
    assert stranger["facts"]
    known = host.akp("ask", "--known", stranger["key"]).json
    assert (known["key"], known["facts"], known["status"]) == (stranger["key"], None, stranger["status"])
    host.sh(f"nft add element ip kube-proxy {affinity_set(host, '10.244.1.2')} '{{ 192.0.2.77 }}'")
    assert host.akp("ask").json["status"]["state"] == "applied"
    host.sh("nft flush chain ip kube-proxy nat-postrouting")
    assert host.akp("ask").json["status"]["state"] == "partial"


def test_nodes_other_endpoints_make_other_hairpins(host: Host, tmp_path: Path) -> None:
    objects = (service(), slice_of("web", endpoint("10.244.1.1", node="n1"), endpoint("10.244.2.1", node="n2")))
    host.apply(write(state(*objects, node("n1"), node("n2"), on="n2"), tmp_path / "a"))
    assert "10.244.2.1 . 10.244.2.1 . tcp . 8080 }" in host.sh("nft list set ip kube-proxy hairpin-connections")
