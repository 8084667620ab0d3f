"""windows_node as a play runs it. There is no Windows: a script named powershell.exe starts akp-node.cs on mono.

So what is shown is which files arrive, what is started with which words, and what becomes of the answer. Connections of
Windows, PowerShell and scheduled tasks are not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.engine import Engine

from tests.conformance.windows import mono
from tests.conformance.windows.oracle import Store, line
from tests.unit.build import document, endpoint, node, service, slice_of, snapshot

from .play import Run, playbook

NETWORK = {"ID": "11111111-1111-1111-1111-111111111111", "Name": "pods", "Type": "L2Bridge"}
# As powershell.exe is called: -NoProfile -NonInteractive -ExecutionPolicy Bypass -File SCRIPT WORDS
# Version 5.1 of it loses words that are empty, and a word that is a dash alone ends it.
SHIM = """#!/bin/sh
[ "$1 $2 $3 $4 $5" = "-NoProfile -NonInteractive -ExecutionPolicy Bypass -File" ] || exit 64
[ -f "$6" ] || exit 66
script=${6##*/}
shift 6
for word; do
    shift
    [ "$word" != - ] || exit 65
    [ -z "$word" ] || set -- "$@" "$word"
done
echo "$script $*" >>"$AKP_STATE.calls"
case $script in akp-boot.ps1) echo '{"ok":true}' ;; *) exec mono "$LD_LIBRARY_PATH/akp-node.exe" "$@" ;; esac
"""


@dataclass
class Windows:
    folder: Path
    store: Store

    def play(self, *arguments: str, check: bool = True, **options: Any) -> Run:
        task = {"name": "Ask or change", "agentless.kube_proxy.windows_node": options}
        play = {"name": "A node", "hosts": "all", "gather_facts": False, "connection": "local", "tasks": [task]}
        file = self.folder / "play.yml"
        file.write_text(yaml.safe_dump([play]))
        environment = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(self.folder / "mono"),
            "HNS_STORE": str(self.store.file), "AKP_STATE": str(self.folder / "state"),
        }  # fmt: skip
        return playbook(
            str(file), Path("w1,"), self.folder / "work", *arguments, environment=environment, check=check
        )  # fmt: skip

    @property
    def calls(self) -> list[str]:
        return (self.folder / "state.calls").read_text().splitlines()


@pytest.fixture
def windows(tmp_path: Path) -> Windows:
    mono.build(tmp_path / "mono")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/powershell.exe").write_text(SHIM)
    (tmp_path / "bin/powershell.exe").chmod(0o755)
    store = Store(tmp_path / "store")
    store.file.write_text(f"version 13.2\n{line('network', NETWORK)}\n")
    return Windows(tmp_path, store)


def bundle(folder: Path) -> Path:
    made = node("w1")
    made["metadata"]["labels"]["kubernetes.io/os"] = "windows"
    config = document(mode="kernelspace", winkernel={"networkName": "pods"})
    engine = Engine(Choices.of({"config": config}), preview=True)
    engine.update(snapshot(made, service(), slice_of("web", endpoint("10.244.2.5", node="n2"))))
    write_bundle(engine.state("w1"), folder)
    return folder


def test_a_node_tells_its_facts_gets_its_bundle_and_is_cleaned(windows: Windows) -> None:
    for network in ("", "pods"):
        (told,) = windows.play(state="gathered", network=network).of("windows_node")
        assert told.result["answer"]["network"] == "pods"
        assert told.result["answer"]["hns"]["version"] == "13.2"
    made = str(bundle(windows.folder / "bundle"))

    would = windows.play("--check", bundle=made)
    assert would.changed == {"w1": 1}
    assert windows.store.documents().balancers == []
    assert windows.play(bundle=made, boot=True).changed == {"w1": 1}
    assert len(windows.store.documents().balancers) == 1
    assert windows.play(bundle=made).changed == {"w1": 0}

    assert windows.play(state="absent", boot=False).changed == {"w1": 1}
    assert windows.store.documents().balancers == []
    words = [call.split()[:2] for call in windows.calls]
    started = ["facts", "facts", "check", "apply", "apply", "cleanup"]
    assert [each[1] for each in words if each[0] == "akp-node.ps1"] == started
    assert [call for call in windows.calls if call.startswith("akp-boot")] == ["akp-boot.ps1 ", "akp-boot.ps1 -Remove"]


def test_what_the_program_refuses_fails_the_task_in_its_words(windows: Windows) -> None:
    run = windows.play(state="gathered", network="other", check=False)
    assert "HNS has no network other" in run.output
    assert "no bundle of a Windows node" in windows.play(bundle=str(windows.folder), check=False).output
    (windows.folder / "bin/powershell.exe").write_text("#!/bin/sh\necho '[1]'\n")
    assert "gave no answer" in windows.play(state="status", check=False).output
