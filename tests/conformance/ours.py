"""Our side of the twins: from the API server to a bundle, in a process of its own inside the control plane's namespace.

It reads the cluster with the rights of a snapshot and nothing more, writes the snapshot down, reads it back and
renders: the same way, through the same functions, as the collection goes. A bundle is full, or the delta from the one
before. One request a line, as JSON; one answer.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.controlplane import netns


class Refused(RuntimeError):
    """One of our programs failed; its own words are the message."""


class Renderer:
    """The process, seen from outside."""

    def __init__(self, namespace: str, kubeconfig: Path) -> None:
        argv = [sys.executable, "-m", "tests.conformance.ours", str(kubeconfig)]
        self._process = subprocess.Popen(
            netns.command(namespace, argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip

    def render(self, **request: str) -> str:
        """Write a node's bundle; returns its generation."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the rendering process died"}
        if "error" in answer:
            raise Refused(answer["error"])
        return str(answer["generation"])

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(kubeconfig: str) -> None:
    from agentless_kube_proxy.backends.state import State, delta
    from agentless_kube_proxy.bundle.write import write_bundle, write_delta
    from agentless_kube_proxy.choices import Choices
    from agentless_kube_proxy.cluster.access import Access
    from agentless_kube_proxy.cluster.api import connect
    from agentless_kube_proxy.cluster.record import read_record, snapshot_of
    from agentless_kube_proxy.engine import Engine

    last: dict[str, State] = {}

    def answer(request: dict[str, str]) -> dict[str, Any]:
        with connect(Access(kubeconfig=kubeconfig)) as api:
            record = api.record()
        snapshot_file = Path(request["snapshot"])
        record.write(snapshot_file)
        snapshot = snapshot_of(read_record(snapshot_file))
        engine = Engine(Choices.of({"config": request["config"], "compat": request["compat"]}))
        engine.update(snapshot)
        state = engine.state(request["node"], json.loads(Path(request["facts"]).read_text()))
        output, base = Path(request["output"]), last.get(request["node"])
        last[request["node"]] = state
        change = delta(base, state) if base is not None and request["kind"] == "delta" else None
        if change is None or change.needs_full or change.base == change.generation:
            write_bundle(state, output)
        else:
            write_delta(change, state, output)
        return {"generation": state.generation}

    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
