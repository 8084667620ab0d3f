# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The working directory of the control host: how the tasks of a run hand things on without passing them through Jinja.

    snapshot.json     the cluster
    nodes/HOST.json   what the host answered last: its facts and what is applied there
    bundles/NODE/     the bundle that is meant for the node
    bundles/index.json
    runs/RUN/         what the tasks of a run did, for its summary
    plan.json         what a run in check mode would do
    config.json       the configuration of the last run, for the next one
    held/HOST.jsonl   the Services of what the host was given last
    frontends/        what each generation serves, to tell what a change means before it is made
    freshness.json    when nodes were last confirmed, and history.jsonl, how that changed
    ledger.jsonl      what was done to which node
    approved.json     the cluster of the last plan that was approved, and carried out on all of its hosts
    followed.json     what that plan gave them
    following.json    the plan that not all of its hosts have yet, and following.snapshot.json, its cluster

Runs may share one at the same time if each has hosts of its own and all are given the same snapshot; otherwise each run
needs its own. Clusters each have their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..bundle.compare import Change
from ..files import check_owned, write_atomic
from .notes import SORTS, Note

AnyNote = TypeVar("AnyNote", bound=Note)
_KEPT_RUNS = 5
_KEPT_SECONDS = 24 * 3600  # changes, within a run


class WorkDirectory:
    """Paths, and small JSON files that are replaced in one step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshot = path / "snapshot.json"
        self.bundles = path / "bundles"
        self.index = self.bundles / "index.json"
        self.plan = path / "plan.json"
        self.config = path / "config.json"
        self.frontends = path / "frontends"
        self.held = path / "held"
        self.ledger = path / "ledger.jsonl"
        self.approved = path / "approved.json"
        self.followed = path / "followed.json"
        self.following = path / "following.json"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> WorkDirectory:
        """That of the kube_proxy_* variables, named without that prefix."""
        cluster = settings.get("cluster_name") or "default"
        return cls(Path(settings.get("dir") or f"~/.akp/{cluster}").expanduser())

    def make(self) -> WorkDirectory:
        """Make it; only its owner may look into it. PermissionError if another user may write to it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owned(self.path)
        for each in (self.path / "nodes", self.bundles, self.run):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    @property
    def config_stamp(self) -> int:
        """Another number whenever a run left another configuration; 0 if none ever did."""
        try:
            return self.config.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @property
    def run(self) -> Path:
        """The directory of this run of ansible-playbook."""
        return self.path / "runs" / run_id()

    def answer_file(self, host: str) -> Path:
        """What a host said last."""
        return self.path / "nodes" / f"{file_name(host)}.json"

    def answer(self, host: str) -> dict[str, Any] | None:
        """What a host said last, if it ever did."""
        return read_json(self.answer_file(host))

    def host_of(self, node: str) -> str | None:
        """The host that answered as this node last."""
        answers = (read_json(file) or {} for file in sorted((self.path / "nodes").glob("*.json")))
        return next((str(each["host"]) for each in answers if str(each.get("node")).lower() == node), None)

    def gathered(self) -> dict[str, dict[str, Any]]:
        """The facts that hosts answered last, by node."""
        answers = (read_json(file) for file in sorted((self.path / "nodes").glob("*.json")))
        return {
            str(each["node"]): dict(each["facts"])
            for each in answers
            if each and each.get("node") and each.get("facts")
        }

    def recorded(self) -> set[str]:
        """The generations that all hosts said they have."""
        answers = (read_json(file) or {} for file in (self.path / "nodes").glob("*.json"))
        found = {str((each.get("status") or {}).get("generation") or "") for each in answers}
        return found - {""}

    def note(self, note: Note, host: str) -> None:
        """Remember what a task of this run did; of each sort, the last for a host counts."""
        content: dict[str, Any] = {each.name: getattr(note, each.name) for each in dataclasses.fields(note)}
        shared = {name: self._share(content[name]) for name in note.SHARED if content[name]}
        write_json(self._note_file(note.SORT, host), {"sort": note.SORT, "host": host, **content, **shared})

    def _share(self, changes: Sequence[Change]) -> str:
        """Write changes down, once for all hosts that have the same, and name them."""
        text = json.dumps([(e.action, e.service, e.port, e.protocol, e.family, e.details) for e in changes])
        file = self.run / "changes" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(file, text)
            # A run that goes on for days is akp watch, and no summary is made of it.
            for old in file.parent.iterdir():
                # Tasks of other hosts write and rename files there at the same time.
                with contextlib.suppress(FileNotFoundError):
                    if old.stat().st_mtime < time.time() - _KEPT_SECONDS:
                        old.unlink()
        return file.stem

    def _shared(self, name: str, known: dict[str, tuple[Change, ...]]) -> tuple[Change, ...]:
        """The changes of that name; equal ones are the same object."""
        if name not in known:
            content = json.loads((self.run / "changes" / f"{name}.json").read_text(encoding="utf-8"))
            known[name] = tuple(
                Change(action, service, port, protocol, family, tuple(details))
                for action, service, port, protocol, family, details in content
            )
        return known[name]

    def _of(self, content: Mapping[str, Any], known: dict[str, tuple[Change, ...]]) -> Note:
        sort = SORTS[content["sort"]]
        shared = {name: self._shared(content[name], known) for name in sort.SHARED if content.get(name)}
        return sort.of({**content, **shared})

    def noted(self, sort: type[AnyNote], host: str) -> AnyNote | None:
        """What a task of this run did."""
        content = read_json(self._note_file(sort.SORT, host))
        found = None if content is None else self._of(content, {})
        return found if isinstance(found, sort) else None

    def forget(self, sort: type[Note], host: str) -> None:
        """A note of this run is gone, if there was one."""
        self._note_file(sort.SORT, host).unlink(missing_ok=True)

    def _note_file(self, sort: str, host: str) -> Path:
        return self.run / f"{sort}.{file_name(host)}.json"

    def notes(self) -> Iterator[tuple[str, Note]]:
        """Everything that this run noted, each with its host."""
        known: dict[str, tuple[Change, ...]] = {}
        for file in sorted(self.run.glob("*.json")):
            content = read_json(file)
            if content is not None:
                yield str(content["host"]), self._of(content, known)

    def keep_lines(self, lines: Iterable[str]) -> Path:
        """Write down all that this run changed, and say where."""
        file = self.run / "changes.txt"
        write_atomic(file, (f"{line}\n" for line in lines))
        return file

    def forget_old_runs(self) -> None:
        """Keep the notes of the last few runs only, and of those that still go on."""
        ended = []
        for each in self.run.parent.iterdir():
            with contextlib.suppress(OSError):  # another run may be tidying up as well
                if not goes_on(each.name):
                    ended.append((each.stat().st_mtime, each))
        for _time, each in sorted(ended)[:-_KEPT_RUNS]:
            shutil.rmtree(each, ignore_errors=True)


class Stopwatch:
    """When something began and ended, on the clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.began = time.time()

    def fields(self) -> dict[str, float]:
        """For a note."""
        return {"began": round(self.began, 3), "ended": round(time.time(), 3)}


def run_id() -> str:
    """Names the run: tasks are processes that ansible-playbook started, so its process names them all."""
    return run_of(os.getppid())


def run_of(process: int | str) -> str:
    """The run of the tasks that a process starts, by its number and the moment it began: numbers are used again."""
    started = ""
    with contextlib.suppress(OSError, IndexError):
        started = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{process}-{started}" if started else str(process)


def goes_on(run: str) -> bool:
    """Whether a run has not ended."""
    process, dash, _started = run.partition("-")
    return bool(dash) and run_of(process) == run


def file_name(host: str) -> str:
    """A name for a file of a host."""
    return urllib.parse.quote(host, safe="")


def read_json(file: Path) -> dict[str, Any] | None:
    """A file that one of us wrote; what cannot be read is as good as not there."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(file: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace a file in one step. With an indent it is for people, and takes ten times as long."""
    text = json.dumps(content, indent=indent, sort_keys=True)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(file, f"{text}\n")
