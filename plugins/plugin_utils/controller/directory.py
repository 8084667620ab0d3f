# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The working directory of the control host: how the tasks of a run hand things on without passing them through Jinja.

    snapshot.json     the cluster
    nodes/HOST.json   what the host answered last: its facts and what is applied there
    bundles/NODE/     what the node shall have
    bundles/index.json
    runs/RUN/         what the tasks of a run did, for its summary
    plan.json         what a run in check mode would do
    frontends/        what each generation serves, to tell what a change means before it is made
    ledger.jsonl      what was done to which node
    approved.json     the cluster of the last plan that was approved, and carried out on all of its hosts
    followed.json     what that plan gave them
    following.json    the plan that not all of its hosts have yet, and following.snapshot.json, its cluster

Runs may share one at the same time if each has hosts of its own and all are given the same snapshot; otherwise each run
needs its own. Clusters each have their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_KEPT_RUNS = 5


class WorkDirectory:
    """Paths, and small JSON files that are replaced in one step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshot = path / "snapshot.json"
        self.bundles = path / "bundles"
        self.index = self.bundles / "index.json"
        self.plan = path / "plan.json"
        self.frontends = path / "frontends"
        self.ledger = path / "ledger.jsonl"
        self.approved = path / "approved.json"
        self.followed = path / "followed.json"
        self.following = path / "following.json"

    def make(self) -> WorkDirectory:
        """Make it; only its owner may look into it."""
        for each in (self.path, self.path / "nodes", self.bundles, self.run):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    @property
    def run(self) -> Path:
        """The directory of this run of ansible-playbook."""
        return self.path / "runs" / run_id()

    def answer_file(self, host: str) -> Path:
        """What a host said last."""
        return self.path / "nodes" / f"{_file_name(host)}.json"

    def answer(self, host: str) -> dict[str, Any] | None:
        """What a host said last, if it ever did."""
        return read_json(self.answer_file(host))

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

    def note(self, phase: str, host: str, fields: Mapping[str, Any], run: str = "") -> None:
        """Remember what a task of this run did, or of another."""
        write_json(self._note_file(phase, host, run), {"phase": phase, "host": host, **fields})

    def noted(self, phase: str, host: str) -> dict[str, Any] | None:
        """What a task of this run did."""
        return read_json(self._note_file(phase, host))

    def _note_file(self, phase: str, host: str, run: str = "") -> Path:
        return (self.path / "runs" / run if run else self.run) / f"{phase}.{_file_name(host)}.json"

    def notes(self) -> Iterator[dict[str, Any]]:
        """Everything that this run noted."""
        for file in sorted(self.run.glob("*.json")):
            content = read_json(file)
            if content is not None:
                yield content

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


def _file_name(host: str) -> str:
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
    handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(f"{text}\n")
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
