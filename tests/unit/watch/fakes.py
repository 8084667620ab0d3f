"""A cluster that changes when a test says so, and a carrier whose nodes keep no rules, only what they are called."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from agentless_kube_proxy.bundle.archive import lines_of
from agentless_kube_proxy.carry.workers import CarrierGone
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.cluster.watch import ObjectChange, Update
from agentless_kube_proxy.plan.consent import Consent
from agentless_kube_proxy.tasks.directory import WorkDirectory
from agentless_kube_proxy.watch.loop import Follower
from agentless_kube_proxy.watch.measured import Measured

from ..build import document

Result = dict[str, Any]
DEADLINE = 60.0


class FakeWatch:
    """A cluster."""

    url, trouble, malformed, last_malformed = "https://203.0.113.5:6443", "", 0, ""

    def __init__(self) -> None:
        self._updates: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self._told = 0

    def tell(self, snapshot: Snapshot) -> str:
        """The cluster is like this now; the name of what changed, as the log has it."""
        self._told += 1
        change = ObjectChange("Service", "shop", f"change-{self._told}", "changed")
        self._updates.put(Update(self._told == 1, (change,), snapshot, time.time(), {}, str(self._told)))
        return f"Service shop/change-{self._told}"

    def next(self) -> Update | None:
        return self._updates.get()

    def close(self) -> None:
        self._updates.put(None)


@dataclasses.dataclass
class FakeNode:
    """What a node has, and how it behaves."""

    has: str = ""
    confirm_within: float = 0.0  # if it is not 0, pushes are to be confirmed
    going_back_to: str | None = None
    away: bool = False
    held_up: threading.Event | None = None  # tasks wait for this

    def do(self, arguments: Mapping[str, Any], bundle: Path) -> Result:
        if self.held_up is not None:
            self.held_up.wait(DEADLINE)
        if self.away:
            return {"unreachable": True, "msg": "no route to host"}
        if arguments["state"] == "gathered":
            unconfirmed = {"unconfirmed": {"generation": self.has}} if self.going_back_to is not None else {}
            return {"facts": {}, "state": "applied" if self.has else "absent", "generation": self.has, **unconfirmed}
        if arguments["state"] == "confirmed":
            confirmed, self.going_back_to = self.going_back_to is not None, None
            return {"changed": True} if confirmed else {"failed": True, "msg": "there is nothing to confirm"}
        delta = arguments.get("delta")
        text = "".join(lines_of(Path(delta).read_bytes(), "manifest.json")) if delta else bundle.read_text()
        manifest = json.loads(text)
        if delta and manifest["base"] != self.has:
            return {"need": "full", "reason": "the node has another generation"}
        previous, self.has = self.has, manifest["generation"]
        result = {"changed": previous != self.has, "generation": self.has, "previous": previous}
        if self.confirm_within and arguments.get("confirm_within") != 0:
            self.going_back_to = previous
            result |= {"confirm": "token", "confirm_within": self.confirm_within}
        return result


class FakeCarrier:
    """A carrier with a thread for each task."""

    def __init__(self, directory: WorkDirectory, nodes: Mapping[str, FakeNode], settings: Mapping[str, Any]) -> None:
        self._directory, self.nodes = directory, dict(nodes)
        self.variables: dict[str, Any] = dict(settings)
        self.tasks: list[tuple[str, str, float]] = []  # host, what, patience
        self._answers: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        self.refresh()

    def submit(self, host: str, arguments: Mapping[str, Any], *, patience: float = 0.0, **_about: Any) -> None:
        what = "delta" if arguments.get("delta") else arguments["state"]
        self.tasks.append((host, what, patience))
        threading.Thread(target=self._run, args=(host, dict(arguments)), daemon=True).start()

    def _run(self, host: str, arguments: Mapping[str, Any]) -> None:
        result = self.nodes[host].do(arguments, self._directory.bundles / host / "manifest.json")
        self._answers.put({"host": host, "result": result})

    def what(self, host: str) -> list[str]:
        """The tasks of a host so far."""
        return [what for name, what, _patience in self.tasks if name == host]

    def cancel(self) -> None:
        """All have begun."""

    def refresh(self) -> None:
        self._answers.put({"settings": {name: dict(self.variables) for name in self.nodes}})

    def say(self, answer: Result) -> None:
        self._answers.put(answer)

    def answers(self) -> Iterator[Result]:
        while (answer := self._answers.get()) is not None:
            yield answer
        raise CarrierGone("the process that carries to the nodes has ended")

    def close(self, _patience: float) -> None:
        self._answers.put(None)


class Running:
    """A follower in a thread of its own."""

    def __init__(self, path: Path, nodes: Mapping[str, FakeNode], election: Any = None, **settings: Any) -> None:
        self.directory = WorkDirectory(path).make()
        self.watch, self.said = FakeWatch(), list[tuple[str, dict[str, Any]]]()
        self.carrier = FakeCarrier(self.directory, nodes, settings)
        self.error: BaseException | None = None
        config = document(clusterCIDR="10.244.0.0/16", iptables={"minSyncPeriod": "50ms", "syncPeriod": "2s"})
        self.follower = Follower(
            self.watch,  # type: ignore[arg-type,unused-ignore]
            self.carrier,  # type: ignore[arg-type,unused-ignore]
            self.directory,
            choices=lambda settings: Choices.of({"config": config, **settings}),
            consent=Consent(self.directory, {}),
            measured=Measured(self.directory, "default", path),
            election=election,
            say=lambda event, **fields: self.said.append((event, fields)),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.follower.run()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, and wait for that."""
        self.follower.stop()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def ended(self) -> BaseException | None:
        """Wait until it ends by itself; the reason."""
        self._thread.join(DEADLINE)
        return self.error

    @property
    def place(self) -> int:
        return len(self.said)

    def wait(self, event: str, start: int = 0, **fields: Any) -> dict[str, Any]:
        """Until it says something with these fields."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            for name, said in self.said[start:]:
                if name == event and all(said.get(key) == value for key, value in fields.items()):
                    return said
            assert self.error is None, self.error
            time.sleep(0.01)
        raise AssertionError(f"no {event} {fields}: {self.said}")

    def told(self, event: str, start: int = 0) -> list[dict[str, Any]]:
        return [said for name, said in self.said[start:] if name == event]


@contextlib.contextmanager
def held(node: FakeNode) -> Iterator[None]:
    """A node takes no task to its end meanwhile."""
    node.held_up = threading.Event()
    try:
        yield
    finally:
        node.held_up.set()
        node.held_up = None
