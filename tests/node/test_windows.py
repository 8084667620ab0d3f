"""akp-node.cs, the program of Windows nodes, on mono and a simulated Host Networking Service."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tree_sitter
import tree_sitter_powershell
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.engine import Engine

from tests.conformance.windows import goldens, mono
from tests.conformance.windows.oracle import Documents, Store, line
from tests.conformance.windows.run import differences
from tests.unit.build import document, endpoint, node, port, service, slice_of, snapshot

Object = dict[str, Any]

NETWORK: Object = {"ID": "11111111-1111-1111-1111-111111111111", "Name": "pods", "Type": "L2Bridge"}
POD = "10.244.1.5"
POD_ID = "22222222-2222-2222-2222-222222222222"
FOREIGN: Object = {
    "ID": "33333333-3333-3333-3333-333333333333",
    "HostComputeEndpoints": [POD_ID],
    "PortMappings": [{"Protocol": 6, "InternalPort": 9, "ExternalPort": 9}],
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program, compiled as C# 5, and the library that it calls."""
    return mono.build(tmp_path_factory.mktemp("mono"))


@dataclass
class Windows:
    """A node with one pod, and a load balancer that is not ours."""

    built: Path
    folder: Path
    version: str = "13.2"

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.store = Store(self.folder / "store", frozenset({POD_ID}))
        self.store.file.write_text(f"version {self.version}\n")
        self.add("network", NETWORK)
        pod = {"HostComputeNetwork": NETWORK["ID"], "IpConfigurations": [{"IpAddress": POD}]}
        self.add("endpoint", {"ID": POD_ID} | pod)
        self.add("loadbalancer", FOREIGN)
        self.node = mono.AkpNode(self.built, self.store.file, self.folder / "state")
        self.akp, self.apply = self.node.run, self.node.apply

    def add(self, kind: str, obj: Object) -> None:
        with self.store.file.open("a") as file:
            file.write(f"{line(kind, obj)}\n")

    def differs_from(self, bundle: Path) -> list[str]:
        """What HNS has beyond the bundle, the pod and the foreign load balancer, or lacks."""
        held = self.store.read()
        assert held["loadbalancer"].pop(FOREIGN["ID"]) == FOREIGN, "the foreign load balancer is not what it was"
        assert POD_ID in held["endpoint"], "the pod is gone"
        made = self.store.documents()
        others = [each for each in made.balancers if each["PortMappings"] != FOREIGN["PortMappings"]]
        return differences(Documents(made.endpoints, others), goldens.read(bundle / "hns.json"))

    def copy(self, folder: Path) -> Windows:
        """Another node in the same state."""
        made = Windows(self.built, folder, self.version)
        shutil.copy(self.store.file, made.store.file)
        if self.node.state.exists():
            shutil.copytree(self.node.state, made.node.state)
        return made


@pytest.fixture
def windows(built: Path, tmp_path: Path) -> Windows:
    return Windows(built, tmp_path / "node")


def bundle(folder: Path, *objects: Object) -> Path:
    made = node("w1")
    made["metadata"]["labels"]["kubernetes.io/os"] = "windows"
    settings = {"config": document(mode="kernelspace", winkernel={"networkName": "pods"})}
    engine = Engine(Choices.of(settings), preview=True)
    engine.update(snapshot(made, *objects))
    write_bundle(engine.state("w1"), folder)
    return folder


@pytest.fixture
def bundles(tmp_path: Path) -> tuple[Path, Path]:
    """Two bundles: one endpoint leaves and another comes, a Service goes and another comes."""
    here, there = endpoint(POD, node="w1"), endpoint("10.244.2.5", node="n2")
    web = service(type="NodePort", ports=[port(nodePort=30080)])
    other = service("other", clusterIP="10.96.7.8")
    new = service("new", clusterIP="10.96.7.9")
    first = bundle(tmp_path / "a", web, slice_of("web", here, there), other, slice_of("other", there))
    third = endpoint("10.244.3.5", node="n3")
    return first, bundle(tmp_path / "b", web, slice_of("web", here, third), new, slice_of("new", here))


def test_what_is_applied_is_what_the_bundle_says_and_nothing_of_others_changes(
    windows: Windows, bundles: tuple[Path, Path]
) -> None:
    first, second = bundles
    assert windows.akp("check", first)[1]["changed"] is True
    assert windows.store.documents().endpoints == []
    assert windows.apply(first)["changed"] is True
    assert windows.differs_from(first) == []
    assert windows.apply(first)["changed"] is False
    assert windows.akp("status")[1]["state"] == "applied"
    assert windows.apply(second)["changed"] is True
    assert windows.differs_from(second) == []


def test_rollback_restore_and_cleanup(windows: Windows, bundles: tuple[Path, Path]) -> None:
    first = bundles[0]
    for each in bundles:
        windows.apply(each)
    assert windows.akp("rollback")[0] == 0
    assert windows.differs_from(first) == []
    windows.store.file.write_text(
        "".join(line for line in windows.store.file.read_text().splitlines(keepends=True)[:4])
    )
    assert windows.akp("status")[1]["state"] == "differs"
    assert windows.akp("restore")[0] == 0
    assert windows.differs_from(first) == []
    assert windows.akp("cleanup")[0] == 0
    assert windows.store.documents().endpoints == []
    assert len(windows.store.documents().balancers) == 1
    assert windows.akp("status")[1]["state"] == "none"
    assert windows.akp("rollback")[0] == windows.akp("restore")[0] == 2


PROGRAMS = ("akp-node.cs", "akp-node.ps1")


def test_what_starts_at_boot_is_the_program_of_the_bundle_that_was_applied_last(
    windows: Windows, bundles: tuple[Path, Path]
) -> None:
    """Also after a run that ended while it wrote the program, and with a newer program of the same generation."""
    first, state = bundles[0], windows.node.state

    def whole() -> bool:
        return all((state / each).read_bytes() == (first / each).read_bytes() for each in PROGRAMS)

    blocked = state / "akp-node.ps1.new"
    blocked.mkdir(parents=True)
    assert windows.akp("apply", first)[0] == 3
    blocked.rmdir()
    windows.apply(first)
    assert whole()
    (state / PROGRAMS[0]).unlink()
    (state / PROGRAMS[1]).write_text("an older one")
    assert windows.apply(first)["changed"] is False
    assert whole()


# Prints how safe a state directory is: as it is made, and with each of the changes that the words name.
JUDGE = """
using System;
using System.Security.AccessControl;
using System.Security.Principal;

static class Judge
{
    static void Main(string[] words)
    {
        foreach (var word in words)
        {
            var has = StateDirectory.Closed();
            var change = word.Split(' ');
            var who = change.Length > 1 ? new SecurityIdentifier(change[1]) : null;
            if (change[0] == "inherits") has.SetAccessRuleProtection(false, false);
            if (change[0] == "owner") has.SetOwner(who);
            var type = change[0] == "denies" ? AccessControlType.Deny : AccessControlType.Allow;
            if (change[0] == "grants" || change[0] == "denies")
                has.AddAccessRule(new FileSystemAccessRule(who, FileSystemRights.Write, type));
            Console.WriteLine(StateDirectory.Objection(has) ?? "safe");
        }
    }
}
"""


def test_a_state_directory_that_others_own_or_may_write_is_refused(tmp_path: Path) -> None:
    """The decision alone: mono has no such rights on files, so none are set or read here."""
    (tmp_path / "judge.cs").write_text(JUDGE)
    mcs = ["mcs", "-langversion:5", "-r:System.Web.Extensions.dll", "-main:Judge", f"-out:{tmp_path}/judge.exe"]
    subprocess.run([*mcs, str(mono.PROGRAM), str(tmp_path / "judge.cs")], check=True)
    system, users, someone = "S-1-5-18", "S-1-5-32-545", "S-1-5-21-1-2-3-1001"
    cases = {
        "closed": "safe",
        f"owner {system}": "safe",
        f"denies {users}": "safe",
        f"owner {someone}": f"it belongs to {someone}",
        f"owner {users}": f"it belongs to {users}",
        f"grants {users}": f"{users} has rights there",
        f"grants {someone}": f"{someone} has rights there",
        "grants S-1-1-0": "S-1-1-0 has rights there",
        "inherits": "it inherits rights from the directory above",
    }
    argv = ["mono", str(tmp_path / "judge.exe"), *cases]
    told = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    assert dict(zip(cases, told, strict=True)) == cases


def test_the_task_of_the_boot_is_registered_after_the_state_directory_was_judged() -> None:
    text = mono.PROGRAM.with_name("akp-boot.ps1").read_text()
    gone, judged, made = (
        text.index(each) for each in ("| Unregister-", "[StateDirectory]::Secure($state)", "\n    Register-")
    )
    assert gone < judged < made


# What a run is doing when it is killed, and on which version of the service; only the newer one modifies.
WALKS = [
    pytest.param("apply", "13.2", id="apply"),
    pytest.param("apply", "15.5", id="apply-and-modify"),
    pytest.param("restore", "13.2", id="restore"),
    pytest.param("cleanup", "13.2", id="cleanup"),
    pytest.param("rollback", "13.2", id="rollback", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("verb", "version"), WALKS)
def test_a_run_that_is_killed_at_any_call_is_completed_by_the_next(
    built: Path, bundles: tuple[Path, Path], tmp_path: Path, verb: str, version: str
) -> None:
    """Each change is a chance to be killed twice: before it is made, and after it and before the answer."""
    first, second = bundles
    base = Windows(built, tmp_path / "base", version)
    base.apply(first)
    if verb == "rollback":
        base.apply(second)
    if verb == "restore":  # Windows has started anew: HNS has lost all, the CNI plugin has made the pod again
        base.store.file.write_text("".join(base.store.file.read_text().splitlines(keepends=True)[:4]))
    words = ("apply", second) if verb == "apply" else (verb,)
    wanted = {"apply": second, "rollback": first, "restore": first}.get(verb)
    for number in count(1):
        each = base.copy(tmp_path / f"copy{number}")
        code, answer = each.akp(*words, HNS_DIE_AFTER=str(number))
        whole = code == 0
        if not whole:
            assert code == 137
            code, answer = each.akp(*words)
            assert code == 0, (number, answer)
        if wanted is None:
            assert each.store.documents().endpoints == []
            assert [one["ID"] for one in each.store.read()["loadbalancer"].values()] == [FOREIGN["ID"]]
        else:
            assert each.differs_from(wanted) == [], number
        if whole:
            break
    assert number - 1 == 2 * (answer["created"] + answer["modified"] + answer["deleted"]) > 0


def test_a_call_that_is_refused_ends_the_run_and_the_next_one_completes_it(
    built: Path, bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = bundles
    base = Windows(built, tmp_path / "base")
    base.apply(first)
    refused = 0
    for number in count(1):
        each = base.copy(tmp_path / f"copy{number}")
        code, answer = each.akp("apply", second, HNS_REFUSE=str(number))
        if code != 0:
            assert (code, "Hcn" in answer["error"], "0x80070005" in answer["error"]) == (4, True, True), answer
            refused += 1
            each.apply(second)
        assert each.differs_from(second) == [], number
        changes = answer.get("created", 0) + answer.get("deleted", 0)
        if code == 0 and number > changes:
            break
    # Deletions are tried twice, so only creations end a run.
    assert refused == answer["created"] > 0


def test_a_load_balancer_whose_endpoints_change_is_modified_where_hns_can_do_that(
    built: Path, bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = bundles
    for version, modified in (("13.2", 0), ("15.4", 0), ("15.5", 2)):
        node = Windows(built, tmp_path / version, version)
        node.apply(first)
        before = node.store.read()["loadbalancer"].keys()
        assert node.apply(second)["modified"] == modified, version
        assert len(before & node.store.read()["loadbalancer"].keys()) == 1 + modified
        assert node.differs_from(second) == []


def test_what_hns_adds_to_a_document_is_no_difference(windows: Windows, bundles: tuple[Path, Path]) -> None:
    windows.apply(bundles[0])
    for each in [*windows.store.read()["loadbalancer"].values()]:
        if each["ID"] != FOREIGN["ID"]:
            windows.add("loadbalancer", {"Flags": 0, "SourceVIP": "", **each, "State": 1, "Health": {"Extra": {}}})
    assert windows.apply(bundles[0])["changed"] is False


def test_the_program_tells_what_a_bundle_is_made_of(windows: Windows, bundles: tuple[Path, Path]) -> None:
    """Pods of the CNI plugin are told; what this program made and pods of other networks are not."""
    route = {"DestinationPrefix": "10.244.2.0/24", "ProviderAddress": "172.18.0.12"}
    windows.add(
        "network", NETWORK | {"Type": "Overlay", "Policies": [{"Type": "RemoteSubnetRoute", "Settings": route}]}
    )
    other = {"ID": "44444444-4444-4444-4444-444444444444", "Name": "nat", "Type": "NAT"}
    windows.add("network", other)
    for number, (network, name) in enumerate(((NETWORK, "cbr0"), (other, "x"))):
        address = {"IpConfigurations": [{"IpAddress": f"10.244.1.{number + 1}"}]}
        identity = {"ID": f"55555555-5555-5555-5555-55555555555{number}", "Name": name}
        windows.add("endpoint", identity | {"HostComputeNetwork": network["ID"]} | address)
    windows.apply(bundles[0])
    code, answer = windows.akp("facts")
    assert (code, answer["network"]) == (0, "pods")
    assert answer["hns"] == {
        "version": "13.2", "networkType": "Overlay", "endpoints": ["10.244.1.1", POD], "rootEndpoint": "10.244.1.1",
        "remoteSubnets": [{"destinationPrefix": "10.244.2.0/24", "providerAddress": "172.18.0.12"}],
    }  # fmt: skip
    assert "127.0.0.1" in [each["address"] for each in answer["addresses"]]
    assert {"address", "interface", "mac"} == answer["addresses"][0].keys()
    windows.add("network", NETWORK | {"ID": "66666666-6666-6666-6666-666666666666", "Name": "more"})
    assert "one of pods, more" in windows.akp("facts")[1]["error"]
    assert windows.akp("facts", "more")[1]["network"] == "more"


@pytest.mark.parametrize("none", ["", "*"])
def test_a_root_endpoint_can_be_named_without_a_network(windows: Windows, none: str) -> None:
    gateway = {"ID": "55555555-5555-5555-5555-555555555555", "Name": "root", "HostComputeNetwork": NETWORK["ID"]}
    windows.add("endpoint", gateway | {"IpConfigurations": [{"IpAddress": "10.244.1.1"}]})
    code, answer = windows.akp("facts", none, "root")
    assert (code, answer.get("network")) == (0, "pods"), answer
    assert answer["hns"]["rootEndpoint"] == "10.244.1.1"


def test_a_byte_that_was_changed_is_refused(windows: Windows, bundles: tuple[Path, Path]) -> None:
    file = bundles[0] / "hns.json"
    file.write_text(file.read_text().replace("10.244.2.5", "10.244.2.6", 1))
    code, answer = windows.akp("apply", bundles[0])
    assert (code, "not what manifest.json says" in answer["error"]) == (2, True)
    assert windows.store.documents().endpoints == []


def test_a_pod_that_has_no_endpoint_yet_is_named_and_keeps_no_service_from_its_others(
    windows: Windows, tmp_path: Path
) -> None:
    late = "10.244.1.9"
    both = slice_of("web", endpoint(POD, node="w1"), endpoint(late, node="w1"))
    alone = service("alone", clusterIP="10.96.7.8")
    made = bundle(tmp_path / "c", service(), both, alone, slice_of("alone", endpoint(late, node="w1")))
    answer = windows.apply(made)
    assert (answer["missing"], answer["created"]) == ([late], 1)
    pod = {"HostComputeNetwork": NETWORK["ID"], "IpConfigurations": [{"IpAddress": late}]}
    windows.add("endpoint", {"ID": "77777777-7777-7777-7777-777777777777"} | pod)
    windows.store.given |= {"77777777-7777-7777-7777-777777777777"}
    assert windows.apply(made)["missing"] == []
    assert windows.differs_from(made) == []


def test_a_network_that_is_not_there_is_named(windows: Windows, bundles: tuple[Path, Path]) -> None:
    windows.store.file.write_text("version 13.2\n")
    code, answer = windows.akp("apply", bundles[0])
    assert (code, "HNS has no network pods" in answer["error"]) == (3, True)


def test_a_wrong_command_line_is_explained(windows: Windows) -> None:
    assert windows.akp("apply")[0] == 2
    assert windows.akp("fly")[0] == 2


@pytest.mark.parametrize("name", ["akp-boot.ps1", "akp-node.ps1"])
def test_the_lines_of_powershell_can_be_parsed(name: str) -> None:
    """They are not executed here: no PowerShell is there."""
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_powershell.language()))
    text = mono.PROGRAM.with_name(name).read_bytes()
    assert not parser.parse(text).root_node.has_error
    assert parser.parse(text.replace(b")", b"")).root_node.has_error
    assert b"never run on Windows" in text
