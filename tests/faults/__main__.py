"""`python -m tests.faults MODE...` injects faults and prints what came of them; `make soak` writes the page."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.faults import table
from tests.faults.plan import MODES, inject


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="+", choices=MODES)
    parser.add_argument("--thin", type=int, default=1, help="take one of so many steps (default: all)")
    parser.add_argument("--shift", type=int, default=0, help="which of them")
    arguments = parser.parse_args()
    findings = []
    for mode in arguments.modes:
        with tempfile.TemporaryDirectory(prefix="akp-faults-") as directory:
            for finding in inject(mode, Path(directory), arguments.thin, arguments.shift):
                findings.append(finding)
                for line in finding.trouble:
                    print(line, file=sys.stderr, flush=True)
    print(table.table(findings))
    return 1 if any(finding.trouble for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
