"""What a node answers, read as what a stranger says."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.carry import answers
from agentless_kube_proxy.carry.answers import NoAnswer, parse_answer
from agentless_kube_proxy.carry.time_limit import LateAnswer, limit_of, time_limit
from agentless_kube_proxy.texts import visible, visible_lines

STEERING = "\x1b[2J\x1b]0;title\x07\u009b1m\u202e\u2028\x00\ud800"


def said(**fields: Any) -> str:
    return json.dumps({"verb": "ask", "ok": True, **fields})


REFUSED: dict[str, str] = {
    "digits": said(seconds=1).replace("1", "9" * 5000),
    "digits within": said(facts={"cpus": 7}).replace("7", "9" * 21),
    "fraction": '{"ok": true, "seconds": 0.' + "1" * 5000 + "}",
    "infinite": '{"ok": true, "seconds": 1e999}',
    "NaN": '{"ok": true, "seconds": NaN}',
    "Infinity": '{"ok": true, "x": Infinity}',
    "negative": said(seconds=-1),
    "truth for a number": said(flows=True),
    "text for truth": said(changed="yes"),
    "number for ok": '{"ok": 1}',
    "text for cpus": said(facts={"cpus": "many"}),
    "cpus": said(facts={"cpus": 10**6}),
    "facts": said(facts=[1]),
    "status": said(status="applied"),
    "null status": said(status=None),
    "a generation that is a path": said(status={"generation": "../../x"}),
    "a generation that is an option": said(generation="-x"),
    "a token that is a command": said(confirm="$(id)"),
    "a token of two words": said(confirm="a b"),
    "a long word": said(generation="a" * 1000),
    "a word with a null byte": said(mode="ipvs\x00"),
    "a state beyond ASCII": said(status={"state": "²"}),
    "a time beyond all": said(status={"appliedAt": 10**18}),
    "a prefix": said(addresses=[{"interface": "eth0", "address": "10.0.0.1", "prefix": 1000}]),
    "addresses": said(addresses="x"),
    "addresses of facts": said(facts={"addresses": {"a": 1}}),
    "nested": '{"ok": true, "x": ' + "[" * 50 + "]" * 50 + "}",
    "nested beyond all": '{"ok": true, "x": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "nothing": "",
    "a list": "[]",
    "no result": "{}",
    "text": f"Welcome {STEERING}",
}


@pytest.mark.parametrize("sort", REFUSED)
def test_what_no_node_program_says_is_no_answer(sort: str) -> None:
    with pytest.raises(NoAnswer) as refused:
        parse_answer(0, REFUSED[sort], STEERING)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 3 * answers.LONGEST_SAID


def test_texts_are_kept_and_steer_nothing() -> None:
    text = f"iptables-restore: line 3 failed\n\tat {STEERING}"
    result = parse_answer(4, said(error=text, warnings=[text], facts={"kernel": text}, x={text: [text]}), "").result
    for found in (
        result["error"],
        result["warnings"][0],
        result["facts"]["kernel"],
        *result["x"],
        *result["x"].values(),
    ):
        for line in (found[0] if isinstance(found, list) else found).replace("\t", "").split("\n"):
            assert line.isprintable()
    assert result["error"].startswith("iptables-restore: line 3 failed\n\tat \\x1b[2J")


def test_a_long_text_is_cut_and_a_long_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(parse_answer(0, said(error="x" * 10**6), "").result["error"]) < 30_000
    monkeypatch.setattr(answers, "LONGEST_RESULT", 1000)
    with pytest.raises(NoAnswer, match="1000 are the most"):
        parse_answer(0, said(error="x" * 2000), "")
    monkeypatch.setattr(answers, "MOST_CHARACTERS", 1000)
    with pytest.raises(NoAnswer, match="1000 are the most"):
        parse_answer(0, "x\n" * 2000 + said(), "")


def test_a_word_may_be_empty() -> None:
    assert parse_answer(0, said(flavour="", status={"flavour": ""}), "").result["flavour"] == ""


def test_what_is_left_of_a_term_may_be_less_than_nothing() -> None:
    term = {"generation": "a", "previous": None, "seconds": -5, "overdue": True}
    assert parse_answer(0, said(status={"unconfirmed": term}), "").result["status"]["unconfirmed"] == term


def test_after_a_change_in_ipvs_mode_addresses_are_counts() -> None:
    counts = {"added": 1, "removed": 0}
    assert parse_answer(0, said(addresses=counts), "").result["addresses"] == counts


def test_keys_that_are_not_known_are_kept() -> None:
    assert parse_answer(0, said(new={"a": [1, None, True, 1.5, "x"]}), "").result["new"] == {
        "a": [1, None, True, 1.5, "x"]
    }


def test_a_key_that_must_be_there_is_asked_for() -> None:
    answer = parse_answer(0, said(changed=False), "")
    assert answer.required("changed") is False
    with pytest.raises(NoAnswer, match="has no status"):
        answer.required("status")


# The limit of a test would be the limit of a task, which holds.
@pytest.mark.timeout(0)
def test_a_host_that_does_not_answer_in_time_fails_and_its_commands_end(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(LateAnswer, match=r"n1 did not answer within 0\.5 s"), time_limit(0.5, "n1"):
        subprocess.run(["sh", "-c", f"echo $$ >{tmp_path}/pid; sleep 100 & wait"], check=False)
    assert time.monotonic() - began < 10
    shell = int((tmp_path / "pid").read_text())
    for _each in range(100):
        if not Path(f"/proc/{shell}").exists() or "Z" in Path(f"/proc/{shell}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the command goes on")
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.timeout(0)
def test_what_tries_again_after_errors_does_not_outlive_the_limit() -> None:
    """As Ansible's ssh does, which catches every Exception."""

    def stubborn() -> None:
        for _each in range(100):
            try:
                time.sleep(1)
            except Exception:
                continue

    with pytest.raises(LateAnswer), time_limit(0.3, "n1"):
        stubborn()


@pytest.mark.timeout(0)
def test_a_limit_of_the_task_itself_holds() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    try:
        with time_limit(0.05, "n1"):
            time.sleep(0.2)
        assert signal.alarm(0) > 50
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 375),
        ({"task_timeout": "20", "confirm_within": 0}, 35),
        ({"task_timeout": 20, "confirm_within": 10, "probes": [{"port": 1}, {"port": 2, "timeout": 7}]}, 57),
        ({"task_timeout": "x", "confirm_within": None, "probes": "x"}, 375),
    ],
)
def test_a_carrier_waits_a_little_longer_than_the_task(settings: dict[str, Any], seconds: float) -> None:
    assert limit_of(settings) == seconds


@pytest.mark.parametrize("text", ["plain", "ünï ☃ 😀", "a\\nb"])
def test_what_has_a_shape_is_shown_as_it_is(text: str) -> None:
    assert visible(text) == visible_lines(text) == text


def test_every_character_that_steers_is_shown_by_an_escape() -> None:
    marks = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    for each in map(chr, range(0x110000)):
        if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(each) in marks:
            assert visible(each).isprintable(), ascii(each)
