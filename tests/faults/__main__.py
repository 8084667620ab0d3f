"""`python -m tests.faults MODE...` injects faults; `python -m tests.faults table` writes the page."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.faults import table
from tests.faults.plan import MODES, inject


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="+", choices=[*MODES, "table"])
    parser.add_argument("--thin", type=int, default=1, help="take one of so many steps (default: all)")
    parser.add_argument("--shift", type=int, default=0, help="which of them")
    parser.add_argument("--name", default="", help="keep the findings beside those of earlier runs, under this name")
    arguments = parser.parse_args()
    bad = 0
    for mode in arguments.modes:
        if mode == "table":
            table.write(table.load())
            continue
        findings = []
        with tempfile.TemporaryDirectory(prefix="akp-faults-") as directory:
            for finding in inject(mode, Path(directory), arguments.thin, arguments.shift):
                findings.append(finding)
                for line in finding.trouble:
                    bad += 1
                    print(line, file=sys.stderr, flush=True)
                table.save(mode + arguments.name, findings)
        print(table.table(findings))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
