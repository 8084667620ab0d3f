"""With the key of the control host nothing can be done on a node but what the node program does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

from tests.conftest import unused_prefix
from tests.lab import Lab

from .account import Account
from .attempts import ATTEMPTS, DOCS, Attempt, groups, table

_MARKS = ("<!-- attempts -->\n", "<!-- end of attempts -->\n")
OUTCOMES: dict[str, str] = {}
# A few at a time: looking at the whole node takes longer than an attempt.
LIGHT = {group: [each for each in ATTEMPTS if each.group == group and not each.heavy] for group, _count in groups()}
PARTS = [attempts[start : start + 12] for attempts in LIGHT.values() for start in range(0, len(attempts), 12)]
HEAVY = [each for each in ATTEMPTS if each.heavy]


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    with Lab(unused_prefix(), 1) as lab:
        yield Account.install(lab, tmp_path_factory.mktemp("key"))


def outcome(code: int, said: bytes) -> str:
    """What the client is told, in few words."""
    text = said.decode(errors="replace")
    told = re.findall(r'^\{.*"error": "([^"]*)"', text, re.M)
    if told:
        return "refused by the forced command" if "this key may run" in told[-1] else "refused by the node program"
    if code == 0 and re.search(r'"verb": "(status|drain)", "ok": true', text):
        return "without effect"
    return "refused by sshd"


def test_the_account_can_do_what_it_is_for(account: Account) -> None:
    for words in ("ask --known x", "status --verify", "facts", "cleanup --dry-run", "drain"):
        done = account.says(f"akp-node {words}")
        assert done.returncode == 0, done
        assert json.loads(done.stdout.splitlines()[-1])["ok"] is True


@pytest.mark.parametrize("part", PARTS, ids=[f"{part[0].group} {number + 1}" for number, part in enumerate(PARTS)])
def test_attempts_to_escape_fail(part: list[Attempt], account: Account) -> None:
    hold(part, account)


@pytest.mark.soak
def test_attempts_to_fill_the_node_fail(account: Account) -> None:
    hold(HEAVY, account)


def hold(part: list[Attempt], account: Account) -> None:
    """Nothing happens but a refusal."""
    for attempt in part:
        code, said = attempt.run(account)
        told = outcome(code, said)
        assert code != 0 or "without effect" in told, (attempt.name, said)
        for secret in (b"uid=", b"root:", b"SSH-2.0"):
            assert secret not in said, (attempt.name, said)
        assert "escaped" not in account.node.run(["ls", "/tmp"]).stdout, attempt.name
        OUTCOMES[f"{attempt.group}: {attempt.name}"] = told
    assert account.trace() == account.clean, [attempt.name for attempt in part]


def test_the_table_in_the_docs_is_that_of_this_run() -> None:
    """AKP_WRITE_DOCS=1 writes it, where all attempts were made."""
    text = DOCS.read_text()
    head, _, rest = text.partition(_MARKS[0])
    old, _, tail = rest.partition(_MARKS[1])
    known = dict(re.findall(r"^(\| .* \| .* \|) (.*) \|$", old, re.M))
    assert OUTCOMES, "no attempt was made in this run"
    if os.environ.get("AKP_WRITE_DOCS"):
        assert len(OUTCOMES) == len(ATTEMPTS)
        DOCS.write_text(f"{head}{_MARKS[0]}{table(OUTCOMES)}{_MARKS[1]}{tail}")
        return
    assert list(known) == [f"| {each.group} | {each.name} |" for each in ATTEMPTS]
    made = [each for each in ATTEMPTS if f"{each.group}: {each.name}" in OUTCOMES]
    assert {each.name: known[f"| {each.group} | {each.name} |"] for each in made} == {
        each.name: OUTCOMES[f"{each.group}: {each.name}"] for each in made
    }
