"""`python -m tests.bench [NAME …]`: every bar, or those of the named modules."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import Measure

_HELPERS = ("__main__", "cluster")


def main() -> int:
    """Measure, print a table, fail if a bar is missed."""
    known = sorted(
        each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)]) if each.name not in _HELPERS
    )
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*known, []], metavar="NAME", help=f"one of {', '.join(known)}")
    names = parser.parse_args().names or known
    console = Console()
    found: list[Measure] = []
    for name in names:
        module = importlib.import_module(f"{__package__}.{name}")
        with tempfile.TemporaryDirectory(prefix="akp-bench-") as tmp:
            for each in module.measures(Path(tmp)):
                console.print(f"{each.what}: {each.value:.2f} {each.unit} = {each.ratio:.2f} x {each.against}")
                found.append(each)
    table = Table("what", "measured", "compared with", "measured", "ratio", "bar", "")
    for each in found:
        values = (f"{each.value:.2f} {each.unit}", each.against, f"{each.reference:.2f} {each.unit}")
        verdict = "[green]met[/]" if each.met else "[red]missed[/]"
        table.add_row(each.what, *values, f"{each.ratio:.3f}", f"{each.limit:.3f}", verdict)
    console.print(table)
    return 0 if all(each.met for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
