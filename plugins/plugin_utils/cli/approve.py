# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp approve: read a plan, and sign it."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from ..bundle.release import sign
from ..files import write_atomic
from ..plan.approval import (
    check_allowed,
    plan_file,
    plan_release,
    plan_text,
    read_plan,
    release_line,
    signatures,
    signers,
)
from ..texts import visible
from .console import UsageError

_DESCRIPTION = """\
Shows what a plan of the playbook plan_services would do and asks whether to sign it. The signature lies beside the
plan; once there are enough of them, sync_services follows the plan, and the nodes verify the same signatures.
The same by hand: ssh-keygen -Y sign -n akp-release -f KEY PLAN.release
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of approve."""
    parser = commands.add_parser(
        "approve",
        help="read a plan, and sign it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the file that plan_services named")
    parser.add_argument("--key", type=Path, metavar="KEY", help="an SSH key, or a public one if an agent has the other")
    parser.add_argument("--yes", action="store_true", help="sign without asking")
    parser.add_argument(
        "--allowed-signers", type=Path, metavar="FILE", help="say as well who has signed it, according to this file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show, ask, sign."""
    if args.allowed_signers:
        check_allowed(args.allowed_signers)
    plan = read_plan(args.plan)
    text = plan_release(args.plan, plan)
    # What is signed, and not the file beside it with the same words. It must not tell a terminal to hide anything.
    print("\n".join(map(visible, (*plan_text(plan), release_line(text), f"digest of the plan: {plan['digest']}"))))
    print(f"SHA-256 of what is signed, {plan_file(args.plan, 'release').name}: {plan['release']}")
    if args.key:
        if not args.yes and not _asked():
            print("not signed")
            return 1
        signature = sign(text, args.key)
        name = hashlib.sha256(signature.encode()).hexdigest()[:12]
        file = plan_file(args.plan, f"release.{name}.sig")
        write_atomic(file, signature, 0o644)
        print(f"signed: {file}")
    if args.allowed_signers:
        who = signers(text, signatures(args.plan), args.allowed_signers)
        print(visible(f"signed by {len(who)}: {', '.join(who) or 'none'}"))
    return 0


def _asked() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask at; sign with --yes once the plan was read")
    return input("Sign it? [yes/no] ").strip() == "yes"
