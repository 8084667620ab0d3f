"""userspace mode under load beside kube-proxy 1.25, in short; `make bench ARGS=userspace` is the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from . import calls

pytestmark = pytest.mark.controlplane

CASES = [replace(case, calls=min(case.calls, 60)) for case in calls.CASES]
ROUND_ROBIN = next(i for i, case in enumerate(CASES) if case.name == "round robin")
AFFINITY = next(i for i, case in enumerate(CASES) if case.affinity)


def test_no_more_calls_fail_than_with_kube_proxy_and_none_with_a_live_pod() -> None:
    with calls.ours(CASES) as ours, calls.theirs(CASES) as theirs:
        mine = calls.outcomes(ours, CASES)
        for own, other in zip(mine, calls.outcomes(theirs, CASES), strict=True):
            assert own.failed <= other.failed, own.case.name
            assert own.failed == 0 or not own.case.live, own.case.name
            assert own.case.live or own.failed == own.case.calls
        assert mine[ROUND_ROBIN].pods == dict.fromkeys(calls.PODS, 20)
        # A client has one pod, even if its first calls come at once, and the next one in turn after the expiry.
        assert calls.followed(ours, AFFINITY)[0] == calls.followed(theirs, AFFINITY)[0] == 1
        assert calls.broken(ours, connections=50, changes=6, reloads=2) == 0
        assert ours.said["reloaded"] == 1 + 2
