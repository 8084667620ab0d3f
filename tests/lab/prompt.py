"""The screen of the demo: commands as an operator types them, what they say, and how long they take."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def type_in(*words: str | Path, expect: int = 0) -> None:
    """Prints a command and runs it in the project's directory, with its output on the screen."""
    argv = [_typed(word) for word in words]
    _echo(shlex.join(argv))
    sys.stdout.flush()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "K8S_"))}
    environment = own | SETTINGS | {"PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_NOCOWS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        argv, check=False, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    if done.returncode != expect:
        raise CommandError(f"{argv[0]} ended with {done.returncode} instead of {expect}")
    console.print(f"[dim]{time.monotonic() - began:.2f} s[/]\n")


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    console.print(f"{what} [dim]{time.monotonic() - began:.2f} s[/]")


def _echo(command: str) -> None:
    console.print(f"[bold]$ {escape(command)}[/]", soft_wrap=True)


def _typed(word: str | Path) -> str:
    return str(word.relative_to(ROOT) if isinstance(word, Path) and word.is_relative_to(ROOT) else word)
