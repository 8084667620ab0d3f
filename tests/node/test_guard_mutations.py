"""Ten thousand bundles gone wrong: each is refused, or changes nothing that is not ours."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.write import write_bundle

from .guarding import HERE, foreign, furnish, guarded, speaks_of_others
from .host import Host
from .mutations import Mutation, mutations

# A stolen control host would try this often; a different range each time is a matter of the variable.
FIRST = int(os.environ.get("AKP_FIRST_SEED", "0"))
BATCH = 250
AWKS = {"dash": "mawk", "busybox": "busybox"}


@pytest.fixture(params=["dash", "busybox"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    each = Host(tmp_path, "nft", request.param)
    try:
        yield each
    finally:
        each.close()


def hold(host: Host, first: int, count: int, applied: int) -> Counter[str]:
    """Guard them all, apply so many of those that pass, and see that nothing foreign has changed."""
    furnish(host)
    before = foreign(host)
    told: Counter[str] = Counter()
    for start in range(first, first + count, BATCH):
        made = list(mutations(start, min(BATCH, first + count - start)))
        directories = [each.write(host.directory / "bundles" / str(each.seed)) for each in made]
        verdicts = guarded(directories, AWKS[host.shell])
        for each, directory, verdict in zip(made, directories, verdicts, strict=True):
            code = verdict.code
            assert code in (0, 2), f"{each}: {verdict}"
            told["refused" if code else "passed"] += 1
            told[each.original.mode] += 1
            if code == 0:
                assert speaks_of_others(each.files) == [], each
            if code == 0 and each.original.mode != "ipvs" and told["applied"] + told["not applied"] < applied:
                told[apply(host, each, directory)] += 1
                assert foreign(host) == before, f"{each}: something that is not ours has changed"
    assert foreign(host) == before
    assert host.akp("cleanup").code == 0
    assert foreign(host) == before
    return told


def apply(host: Host, mutation: Mutation, directory: Path) -> str:
    """Through the program as it is; a delta comes on top of what it was made for."""
    if mutation.original.base is not None and mutation.fields["kind"] == "Delta":
        base = host.directory / "base"
        write_bundle(mutation.original.base, base)
        host.apply(base)
    result = host.akp("apply", directory)
    assert result.code in (0, 2, 3, 4), f"{mutation}: {result.stdout}{result.stderr}"
    return "applied" if result.code == 0 and "need" not in result.json else "not applied"


def test_a_mutated_bundle_is_refused_or_stays_within_our_objects(host: Host) -> None:
    told = hold(host, FIRST, 150, 6)
    assert told["refused"] > 75
    assert told["applied"] > 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_mutated_bundles(part: int, host: Host) -> None:
    first = FIRST + 1000 * part + (0 if host.shell == "dash" else 500)
    told = hold(host, first, 500, 10)
    print(f"\nmutated bundles {first}-{first + 499} under {host.shell}: {dict(told)}")
    assert told["refused"] + told["passed"] == 500
    assert told["applied"] > 3


@pytest.mark.parametrize("awk", [each for each in HERE if each != "mawk"])
def test_every_awk_says_the_same(awk: str, tmp_path: Path) -> None:
    made = [each.write(tmp_path / str(each.seed)) for each in mutations(FIRST, 150)]
    verdicts = {each: [verdict.code for verdict in guarded(made, each)] for each in (awk, "mawk")}
    assert verdicts[awk] == verdicts["mawk"]
