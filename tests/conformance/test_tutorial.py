"""docs/tutorial.md, followed command by command, on a cluster like one of kubeadm."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
import time
from pathlib import Path
from types import TracebackType

import pytest

from tests.conftest import unused_prefix
from tests.controlplane.kubeadm import cluster
from tests.lab import Lab
from tests.pages import ROOT, Block, blocks

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(900)]

PAGE = ROOT / "docs" / "tutorial.md"
MARK = "= the command ended with"


class Terminal:
    """A shell in a terminal, and a reader who types."""

    def __init__(self, argv: list[str], environment: dict[str, str], work: Path) -> None:
        self._typed = work / "typed"
        self._end, far = pty.openpty()
        settings = termios.tcgetattr(far)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(far, termios.TCSANOW, settings)
        environment = environment | {"PS1": "", "PS2": "", "TERM": "dumb", "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"}
        self._shell = subprocess.Popen(
            [*argv, "--noediting", "-i"],
            stdin=far,
            stdout=far,
            stderr=far,
            env=environment,
            cwd=environment["HOME"],
            start_new_session=True,
        )
        os.close(far)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._end)
        try:
            self._shell.wait(20)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()

    def type(self, command: str, within: float = 180) -> tuple[int, str]:
        """How the command ended, and what it printed. A question is answered with yes."""
        # All that the shell reads is one line, so that nothing is left for the command to read.
        self._typed.write_text(command)
        os.write(self._end, f"eval \"$(cat {self._typed})\"; echo '{MARK}' $?\n".encode())
        said, answered, deadline = "", False, time.monotonic() + within
        while (ended := re.search(rf"{MARK} (\d+)", said)) is None:
            assert time.monotonic() < deadline, f"{command}\n{said}"
            if select.select([self._end], [], [], 1)[0]:
                said += os.read(self._end, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
            if not answered and said.endswith("Sign it? [yes/no] "):
                answered, said = True, f"{said}yes\n"
                os.write(self._end, b"yes\n")
        return int(ended[1]), said[: ended.start()]


def pattern(line: str) -> re.Pattern[str]:
    """A line of the page: blanks are any blanks, and … is anything."""
    words = [r"\s+".join(map(re.escape, part.split())) for part in line.split("…")]
    return re.compile(r"\s*" + r".*".join(words) + r"\s*")


def follow(terminal: Terminal, block: Block) -> None:
    said = ""
    for command in block.commands:
        code, text = terminal.type(command)
        assert code == 0, f"{command}\n{text}"
        said += text
    lines = iter(said.splitlines())
    for line in block.shown:
        wanted = pattern(line)
        assert any(wanted.fullmatch(each) for each in lines), f"not printed: {line}\n{said}"


def test_the_tutorial_works_as_it_stands(tmp_path: Path) -> None:
    steps = [block for block in blocks(PAGE) if not block.illustration]
    assert len(steps) > 10
    with (
        cluster(unused_prefix(), tmp_path) as (lab, shell, environment),
        Terminal(shell, environment, tmp_path) as terminal,
    ):
        for block in steps:
            follow(terminal, block)
        assert served(lab)


def served(lab: Lab) -> bool:
    """The catalog answers on every node, without a kube-proxy anywhere."""
    assert not any(node.run(["pgrep", "-x", "kube-proxy"], check=False).stdout for node in lab.nodes)
    return all(node.call("tcp", "10.96.10.4", 80).who.startswith("catalog-") for node in lab.nodes)
