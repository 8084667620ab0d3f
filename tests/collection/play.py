"""ansible-playbook as users run it, and what came of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .warm import Warm

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "examples" / "shop"
BIN = Path(sys.executable).parent
WARM = Warm()
_RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.M)


@dataclass(frozen=True)
class Result:
    """One task on one host."""

    outcome: str
    host: str
    action: str
    task: str
    result: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run of ansible-playbook."""

    code: int
    output: str
    results: tuple[Result, ...]

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        """Host -> ok, changed, unreachable, failed."""
        keys = ("ok", "changed", "unreachable", "failed")
        return {row[0]: dict(zip(keys, map(int, row[1:]), strict=True)) for row in _RECAP.findall(self.output)}

    @property
    def changed(self) -> dict[str, int]:
        """Host -> how many tasks changed something."""
        return {host: counts["changed"] for host, counts in self.recap.items()}

    def of(self, module: str, **fields: Any) -> Iterator[Result]:
        """The results of a module of the collection, or of those with these fields in their result."""
        for each in self.results:
            if each.action == f"agentless.kube_proxy.{module}" and fields.items() <= each.result.items():
                yield each

    def node(self, host: str) -> dict[str, Any]:
        """What the host was given, the last time."""
        return [each.result for each in self.of("node") if each.host == host and "changes" in each.result][-1]

    @property
    def summary(self) -> list[str]:
        """The lines at the end."""
        return list([each.result for each in self.of("summary")][-1]["lines"])


def playbook(
    name: str,
    inventory: Path,
    work: Path,
    *arguments: str,
    variables: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    check: bool = True,
) -> Run:
    """Runs a playbook of the collection, or one at a path, with its own working directory."""
    work.mkdir(exist_ok=True)
    record = work / "record.jsonl"
    record.unlink(missing_ok=True)
    path = name if "." in name else str(ROOT / "playbooks" / f"{name}.yml")
    chosen = {
        "kube_proxy_dir": str(work / "akp"),
        "kube_proxy_cluster_dir": str(SHOP),
        "kube_proxy_config": str(SHOP / "kube-proxy.yaml"),
        # All at once: most tests are not about batches, and have no time for them.
        "kube_proxy_batches": ["100%"],
        "kube_proxy_confirm_cleanup": "default",
        **(variables or {}),
    }
    argv = [str(BIN / "ansible-playbook"), "-i", str(inventory), path, "-e", json.dumps(chosen), *arguments]
    env = ansible_environment(record) | dict(environment or {})
    done = (None if prefix or environment else WARM.run(argv, work, env)) or subprocess.run(
        [*prefix, *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=work,
        stdin=subprocess.DEVNULL,
        env=env,
    )
    run = Run(done.returncode, done.stdout + done.stderr, tuple(_read(record)))
    if check:
        assert run.code == 0, run.output
    return run


def ansible_environment(record: Path) -> dict[str, str]:
    """What a user's shell would have, and our callback."""
    plugins = Path(__file__).parent / "plugins"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "K8S_"))}
    return clean | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "AKP_RECORD": str(record),
        "ANSIBLE_CALLBACK_PLUGINS": str(plugins / "callback"),
        "ANSIBLE_CALLBACKS_ENABLED": "record",
        "ANSIBLE_NOCOLOR": "1",
        # The tree that is worked on, which is on Python's path, and not what the user may have installed.
        "ANSIBLE_COLLECTIONS_PATH": "/nonexistent",
        "ANSIBLE_FORKS": "10",
        "ANSIBLE_HOST_KEY_CHECKING": "1",
    }


def _read(record: Path) -> Iterator[Result]:
    if record.exists():
        for line in record.read_text().splitlines():
            yield Result(**json.loads(line))
