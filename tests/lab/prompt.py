"""The screen of the demo: commands as an operator types them, what they say, and how long they take."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# Without them a reader has to look for what matters among skipped tasks and quotes.
SETTINGS = {"ANSIBLE_DISPLAY_SKIPPED_HOSTS": "no", "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml"}
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


class CommandError(Exception):
    """A command ended otherwise than the demo promises."""


def say_settings() -> None:
    """The environment that all commands of the demo have."""
    _echo(f"export {' '.join(f'{name}={value}' for name, value in SETTINGS.items())}")


@dataclass(frozen=True)
class Prompt:
    """Where an operator types. Commands run in the project's directory; `control_host` starts them where that is."""

    control_host: Sequence[str] = ()

    def type_in(self, *words: str | Path, expect: int = 0) -> None:
        """Prints a command and runs it, with its output on the screen."""
        argv = [_typed(word) for word in words]
        _echo(shlex.join(argv))
        sys.stdout.flush()
        began = time.monotonic()
        done = subprocess.run(
            [*self.control_host, *argv],
            check=False,
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        if done.returncode != expect:
            raise CommandError(f"{argv[0]} ended with {done.returncode} instead of {expect}")
        console.print(f"[dim]{time.monotonic() - began:.2f} s[/]\n")

    @contextlib.contextmanager
    def leave_running(self, *words: str | Path) -> Iterator[Running]:
        """Prints a command and lets it run until the block ends."""
        argv = [_typed(word) for word in words]
        _echo(f"{shlex.join(argv)} &")
        process = subprocess.Popen(
            [*self.control_host, *argv],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield Running(process)
        finally:
            process.terminate()
            process.communicate()


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]

    def show_until(self, *wanted: str) -> None:
        """Puts on the screen what it says, until it has said all of these."""
        assert self.process.stdout is not None
        missing = set(wanted)
        for line in self.process.stdout:
            console.print(escape(line.rstrip()), soft_wrap=True)
            missing -= {each for each in missing if each in line}
            if not missing:
                return
        raise CommandError(f"akp watch ended before it said {', '.join(sorted(missing))}")


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "K8S_"))}
    return own | SETTINGS | {"PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_NOCOWS": "1"}


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    console.print(f"{what} [dim]{time.monotonic() - began:.2f} s[/]")


def _echo(command: str) -> None:
    console.print(f"[bold]$ {escape(command)}[/]", soft_wrap=True)


def _typed(word: str | Path) -> str:
    return str(word.relative_to(ROOT) if isinstance(word, Path) and word.is_relative_to(ROOT) else word)
