# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Who has to agree to what: plans with signatures, and changes of endpoints, which need no approval.

A plan lies in a few files: PLAN.json, what would be done; PLAN.snapshot.json, the cluster that it was computed from;
PLAN.txt, the same for people; PLAN.release, the bundles that it comes to. Approvers sign the last one, and the nodes
verify these very signatures. Plan and release name each other, so a signature is good for what its signer was shown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..bundle.manifest import bundle_digest, described
from ..bundle.release import NAMESPACE, Entry, new_release, parse_release, sign, write_release
from ..cluster.record import Record, peek, read_record
from ..errors import UserError
from ..files import write_atomic
from ..proxy.warned import Warned
from ..tasks.directory import WorkDirectory, read_json, write_json
from .bundles import Target
from .groups import Group, lines_of
from .progress import followed_now
from .removal_limit import Frontends, shown
from .report import plan_digest, plan_snapshot

AUTOMATION = "automation"  # signs what needs no approval; never an approver
POLICIES = ("none", "frontends", "all")
VALID_FOR = 7 * 24 * 3600
_SIGNED_FOR = 3600  # what is signed for one push need not be good for long


class NotApproved(UserError):
    """Something was to be done that too few have agreed to; the message says what, and what to do."""


def plan_file(plan: Path, ending: str) -> Path:
    """One of the files that belong to a plan."""
    return plan.with_name(f"{plan.stem}.{ending}")


def _entries(described: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """What a release says of bundles that manifests, or the hosts of a plan, describe."""
    found = {Entry(*(str(each.get(key)) for key in ("node", "generation", "digest"))) for each in described}
    return sorted(found, key=dataclasses.astuple)


def signatures(plan: Path) -> list[str]:
    """The signatures beside a plan, not yet checked: PLAN.release.sig, PLAN.release.NAME.sig."""
    release = plan_file(plan, "release")
    return [each.read_text(encoding="utf-8") for each in sorted(release.parent.glob(f"{release.name}*.sig"))]


def check_allowed(allowed: Path) -> None:
    """Whether there is a file of allowed signers; or NotApproved."""
    if not allowed.is_file():
        raise NotApproved(f"{allowed}: there are no allowed signers")


def signers(text: str, found: Sequence[str], allowed: Path) -> list[str]:
    """Whose good signatures of a text these are. Each counts once, automation does not count."""
    check_allowed(allowed)
    who: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, signature in enumerate(found):
            file = Path(folder) / f"{index}.sig"
            file.write_text(signature, encoding="utf-8")
            principals = _keygen("find-principals", "-f", str(allowed), "-s", str(file)).splitlines()
            name = principals[0].split(",")[0] if principals else ""
            arguments = ("-f", str(allowed), "-I", name, "-n", NAMESPACE, "-s", str(file))
            if name and name != AUTOMATION and _keygen("verify", *arguments, text=text):
                who[name] = None
    return list(who)


def _keygen(*arguments: str, text: str = "") -> str:
    """What ssh-keygen -Y says; empty if it does not agree."""
    try:
        done = subprocess.run(["ssh-keygen", "-Y", *arguments], input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotApproved("missing tool: ssh-keygen (package openssh-client), without it nothing is verified") from None
    return done.stdout if done.returncode == 0 else ""


@dataclasses.dataclass(frozen=True)
class Approval:
    """A plan that may be followed."""

    plan: Mapping[str, Any]
    approvers: tuple[str, ...]
    text: str = ""  # of the release
    signatures: tuple[str, ...] = ()


def read_plan(plan: Path) -> dict[str, Any]:
    """A plan as it was written, or NotApproved."""
    content = read_json(plan)
    if content is None or content.get("kind") != "Plan" or not isinstance(content.get("hosts"), dict):
        raise NotApproved(f"{plan}: {'is no plan' if plan.exists() else 'there is no plan'}")
    if content.get("digest") != plan_digest(content):
        raise NotApproved(f"{plan}: was changed, its digest does not fit")
    return content


def plan_release(plan: Path, content: Mapping[str, Any]) -> str:
    """The text to sign, if it belongs to what the plan says and has not expired; or NotApproved."""
    file = plan_file(plan, "release")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if content.get("release") != hashlib.sha256(text.encode()).hexdigest():
        raise NotApproved(f"{file}: is not the release that the plan names; make a new plan")
    release = parse_release(text)
    # A node takes whatever a line lets it take, so there may be no line that the plan does not speak of.
    named = list(release.bundles) == _entries(_changing(content))
    if release.notes != _notes(content) or not named or release.deltas or release.objects:
        raise NotApproved(f"{file}: is the release of another plan; make a new plan")
    if release.expires <= time.time():
        raise NotApproved(f"{plan}: was good until {_moment(release.expires)}, and has expired; make a new plan")
    return text


def release_line(text: str) -> str:
    """What a release says beside its bundles, for those who are to sign it."""
    release = parse_release(text)
    made, until = _moment(release.counter // 1000), _moment(release.expires)
    return f"for the cluster {release.cluster}, made at {made}, good until {until}"


def _moment(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def _changing(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a plan says of the hosts that it changes."""
    return [each for each in content["hosts"].values() if each.get("changed")]


def _notes(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Name in a release what its plan says; the plan names the release in turn."""
    said = plan_digest({key: value for key, value in content.items() if key != "release"})
    return f"snapshot {content.get('snapshot')}", f"plan {said}"


def approval_of(plan: Path, digest: str, allowed: Path | None, wanted: int) -> Approval:
    """Whether a plan was agreed to: by its digest, which the operator gives, or by signatures; or NotApproved."""
    content = read_plan(plan)
    if digest and content["digest"] != digest:
        raise NotApproved(f"{plan}: its digest is {content['digest']}, but {digest} was approved")
    if wanted < 1:
        raise NotApproved(f"kube_proxy_signatures is {wanted}: a plan needs one at least")
    text = plan_release(plan, content)
    found = signatures(plan)
    if allowed is None:
        if not digest:
            raise NotApproved(
                f"{plan}: who agreed to it? Give the digest that was approved in kube_proxy_plan_digest, or the keys "
                "of those who may sign in kube_proxy_allowed_signers"
            )
        return Approval(content, (), text if found else "", tuple(found))
    who = signers(text, found, allowed)
    if len(who) < wanted:
        raise NotApproved(
            f"{plan}: {len(who)} of {wanted} approvers have signed it ({', '.join(who) or 'none'}); it is signed "
            f"with: akp approve {plan} --key KEY"
        )
    return Approval(content, tuple(who), text, tuple(found))


def beside(plan: Mapping[str, Any], generations: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
    """Hosts for which following a plan would be something else than what was approved, and why.

    What an approver saw is a difference: it holds for a host that has what it had then, or what it would get.
    """
    wrong = {}
    for host, generation in generations.items():
        entry = plan["hosts"].get(host)
        if entry is None:
            wrong[host] = "is not in the plan; make a new plan"
            continue
        planned = entry["generation"]
        before = (entry.get("previous") or "") if entry.get("changed") else planned
        has = recorded.get(host, before)
        if planned != generation:
            wrong[host] = f"would get generation {generation}, but the plan says {planned}; make a new plan"
        elif has not in (before, planned):
            wrong[host] = (
                f"has {_generation(has)}, but the plan was made when it had {_generation(before)}, and says nothing of "
                "what changed since; make a new plan"
            )
    return wrong


def _generation(name: str) -> str:
    return f"generation {name}" if name else "nothing applied"


def uncovered(approval: Approval, bundles: Mapping[str, Path]) -> dict[str, str]:
    """Hosts whose bundle is not the one that was approved, and why."""
    wrong = {}
    for host, directory in bundles.items():
        planned = (approval.plan["hosts"].get(host) or {}).get("digest")
        if planned is None and approval.text:
            wrong[host] = "its bundle is not in the signed release; make a new plan"
        elif planned is not None and bundle_digest(directory) != planned:
            wrong[host] = (
                "would get another bundle of the generation that the plan says: other files, or another node program, "
                "as another version of the collection makes them; make a new plan"
            )
    return wrong


def lay_down(text: str, found: Sequence[str], directories: Iterable[Path]) -> None:
    """Put a release beside each of its bundles, for the nodes to verify."""
    for each in directories:
        write_release(each, text, found)


def sign_for(cluster: str, directories: Sequence[Path], key: Path) -> None:
    """Sign what is about to be pushed, with a key of the control host."""
    if directories:
        manifests = [described(each) for each in directories]
        text = new_release(cluster, _SIGNED_FOR, _entries(manifests)).text()
        lay_down(text, [sign(text, key)], directories)


# -- without a plan


def unapproved(
    policy: str, frontends: Frontends, steps: Mapping[str, tuple[str, str]], approved: Collection[str] = ()
) -> dict[str, str]:
    """Hosts whose change needs a plan, and why. What a node had already may be put back at any time.

    Approved: frontends that hosts were given by a plan. A host that was away meanwhile may have them as well.
    """
    wrong: dict[str, str] = {}
    if policy == "none":
        return wrong
    for host, (before, after) in steps.items():
        old, new = frontends.name(before), frontends.name(after)
        if before == after or (policy == "frontends" and new and (old == new or new in approved)):
            continue
        told = shown([f"{each.action} {each.title}" for each in frontends.changes(old, new)], 5) if new else ""
        why = f" ({told})" if policy == "frontends" and told else ""
        wrong[host] = (
            f"needs an approved plan{why}: run plan_services, have it approved, follow it with kube_proxy_plan"
        )
    return wrong


Clusters: TypeAlias = list[tuple[Path, Sequence[Target] | None]]


def approved_clusters(
    directory: WorkDirectory, snapshot: Path, targets: Sequence[Target] | None, frontends: Frontends
) -> tuple[Clusters, tuple[Warned, ...]]:
    """The Services that were approved with the endpoints of now, for which targets, and what waits for approval."""
    effective, waiting = _with_services(snapshot, directory.approved, directory.path / "effective.json")
    plan = followed_now(directory)
    ahead = [each for each in targets or () if plan and plan.took(each.host, frontends.name(each.recorded))]
    if not ahead:
        return [(effective, targets)], waiting
    newer, _waiting = _with_services(
        snapshot, plan_snapshot(directory.following), directory.path / "effective.following.json"
    )
    others = [each for each in targets or () if each not in ahead]
    return [*([(effective, others)] if others else []), (newer, ahead)], waiting


def _with_services(snapshot: Path, approved: Path, effective: Path) -> tuple[Path, tuple[Warned, ...]]:
    """A snapshot, with the Services of another, and how they differ."""
    if not peek(approved) or peek(approved) == peek(snapshot):
        return snapshot, ()
    now, then = read_record(snapshot), read_record(approved)
    waiting = tuple(_differences(_services(then), _services(now)))
    if not waiting:
        return snapshot, ()
    lists = [each if each.kind != "Service" else _services_of(then) for each in now.lists]
    dataclasses.replace(now, lists=tuple(lists)).write(effective)
    return effective, waiting


def _services_of(record: Record) -> Any:
    return next(each for each in record.lists if each.kind == "Service")


def _services(record: Record) -> dict[str, str]:
    found = {}
    for item in _services_of(record).items:
        metadata = json.loads(item)["metadata"]
        found[f"{metadata.get('namespace')}/{metadata.get('name')}"] = item
    return found


def _differences(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Warned]:
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            what = "is new" if name not in then else "is gone" if name not in now else "was changed"
            yield Warned("waiting for approval", f"Service/{name}: {what}, and waits for approval")


def write_plan(
    path: Path, content: Mapping[str, Any], snapshot: Path, cluster: str, told: Sequence[str]
) -> dict[str, Any]:
    """Write all files of a plan, and say what the plan itself came to be. Signatures of an earlier one go."""
    text = new_release(cluster, VALID_FOR, _entries(_changing(content)), notes=_notes(content)).text()
    plan = {**content, "release": hashlib.sha256(text.encode()).hexdigest()}
    plan["digest"] = plan_digest(plan)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in path.parent.glob(f"{plan_file(path, 'release').name}*.sig"):
        old.unlink()
    # The cluster as it was approved; by the time the plan is followed there may be a newer one.
    write_atomic(plan_snapshot(path), snapshot.read_bytes())
    write_atomic(plan_file(path, "release"), text, 0o644)
    write_atomic(plan_file(path, "txt"), (f"{line}\n" for line in told), 0o644)
    write_json(path, plan, indent=1)
    return plan


def plan_text(content: Mapping[str, Any]) -> list[str]:
    """All that a plan would do, for those who are to approve it; what happens on many nodes is told once."""

    def name(host: str) -> str:
        """What is signed is for the Node, whatever the host is called."""
        node = (content["hosts"].get(host) or {}).get("node")
        return host if node == host else f"{host} (Node {node})"

    groups = [Group.of(each) for each in content.get("changes") or ()]
    untold = {host for host, each in content["hosts"].items() if each.get("changed")}
    untold -= {host for each in groups for host in each.hosts}
    if untold:
        # A plan that was made otherwise; nothing may change that is not told.
        groups.append(Group(tuple(sorted(untold)), ()))
    return list(lines_of(groups, name)) or ["no node would change"]
