"""`python -m tests.bench [NAME …]`: every bar, or those of the named modules."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pkgutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import Measure

_HELPERS = ("__main__", "cluster", "kernels")


def main() -> int:
    """Measure, print a table, fail if a bar is missed."""
    known = sorted(
        each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)]) if each.name not in _HELPERS
    )
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*known, []], metavar="NAME", help=f"one of {', '.join(known)}")
    parser.add_argument("--large", action="store_true", help="last_mile: also 10,000 Services")
    parser.add_argument("--nodes", type=int, default=0, help="last_mile: also so many nodes, say 50")
    options = vars(parser.parse_args())
    names = options.pop("names") or known
    console = Console()
    found: list[Measure] = []
    for name in names:
        module = importlib.import_module(f"{__package__}.{name}")
        with tempfile.TemporaryDirectory(prefix="akp-bench-") as tmp:
            taken = inspect.signature(module.measures).parameters
            for each in module.measures(Path(tmp), **{key: options[key] for key in options if key in taken}):
                console.print(_line(each), highlight=False, soft_wrap=True)
                found.append(each)
    table = Table("what", "measured", "compared with", "measured", "ratio", "bar", "")
    for each in found:
        values = (f"{each.value:.3f} {each.unit}", each.against, f"{each.reference:.3f} {each.unit}")
        table.add_row(each.what, *values, f"{each.ratio:.2f}", f"{each.limit:.2f}", _verdict(each))
    console.print(table)
    return 0 if all(each.met for each in found) else 1


def _line(measure: Measure) -> str:
    """As it is measured: the ratio, the bar, and how busy the machine was, which other programs may be the cause of."""
    values = f"{measure.value:.3f} {measure.unit}, {measure.against} {measure.reference:.3f} {measure.unit}"
    ratio = f"{measure.ratio:.2f} times, at most {measure.limit:.2f}: {_verdict(measure)}"
    return f"{measure.what}: {values}: {ratio} (load {os.getloadavg()[0]:.1f})"


def _verdict(measure: Measure) -> str:
    return "[green]ok[/]" if measure.met else "[red]missed[/]"


if __name__ == "__main__":
    raise SystemExit(main())
