# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a node answers, read as what a stranger says: every key has a type, every value a limit.

    answer = parse_answer(code, stdout, stderr)     # or NoAnswer, which concerns this node and no other
    answer.required("generation")                   # a key that this answer must have, or NoAnswer
    answer.result.get("warnings")                   # any key: of its type, or not there

Words (generations, tokens, states) hold letters, digits and a few marks, and can be parts of file names and arguments.
Texts for people have escapes in place of what could steer a terminal. Keys that are not known here are kept, within the
same limits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..texts import shortened, visible, visible_lines

# A table of 10,000 Services with their endpoints has some 10 MB, a list of all their rules 30 MB.
MOST_CHARACTERS = 256 * 1024 * 1024
LONGEST_RESULT = 64 * 1024 * 1024
LONGEST_TEXT = 20_000
LONGEST_WORD = 512
LONGEST_SAID = 1500
MOST_DIGITS = 20
DEEPEST = 12
MOST_ENTRIES = 1_000_000
LATEST = 253_402_300_799  # seconds: the end of the year 9999
# Empty where there is nothing to say, such as the flavour of iptables in another mode.
_WORD = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._:+-]*)?")

Check: TypeAlias = Callable[[str, Any], Any]


class NoAnswer(Exception):
    """The node did not say what a node says; the message holds what it said instead."""


class _Wrong(Exception):
    """A value that no node program prints: where it stands, and what is wrong with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What the program printed: its result, and the lines before it."""

    result: dict[str, Any]
    lines: tuple[str, ...] = ()  # what `akp-node show` printed
    installed: bool = False

    @property
    def ok(self) -> bool:
        """Whether the program did what it was asked."""
        return bool(self.result["ok"])

    @property
    def needs_program(self) -> bool:
        """Whether the node has to be given the program first."""
        return self.result.get("need") == "program"

    @property
    def as_before(self) -> bool:
        """Whether a failure left the kernel as it was. An older program does not say so: then it is not known."""
        return self.result.get("asBefore") is True

    @property
    def error(self) -> str:
        """Why it did not do what it was asked."""
        return str(self.result.get("error") or json.dumps(self.result))

    def required(self, key: str) -> Any:
        """A key without which the answer is none."""
        if self.result.get(key) is None:
            raise NoAnswer(f"the answer of the node program has no {key}: {_said(json.dumps(self.result))}")
        return self.result[key]


def parse_answer(code: int, stdout: str, stderr: str) -> Answer:
    """The answer in a command's output, or NoAnswer."""
    if len(stdout) > MOST_CHARACTERS:
        raise NoAnswer(f"the node printed {len(stdout)} characters, and {MOST_CHARACTERS} are the most that are read")
    lines = stdout.replace("\r\n", "\n").rstrip("\n").split("\n")
    try:
        result = _result(lines[-1])
    except _Wrong as error:
        raise NoAnswer(f"the node program gave no answer that can be used (exit {code}): {error}") from None
    except (ValueError, RecursionError) as error:
        said = " / ".join(line for line in (*stderr.splitlines()[-50:], *lines[-50:]) if line.strip())
        raise NoAnswer(f"the node program gave no answer (exit {code}): {_said(said) or 'no output at all'}") from error
    return Answer(
        result=result,
        lines=tuple(line for line in lines[:-1] if line.startswith(("{", "-{", "+{"))),
        installed='{"installed": true}' in lines[:-1],
    )


def settled(status: Mapping[str, Any]) -> bool:
    """Whether a node has the generation that it names, and keeps it: what is not confirmed goes by itself."""
    return status.get("state") == "applied" and not status.get("drift") and not status.get("unconfirmed")


def _said(text: str) -> str:
    """The end of what a node said, for a message."""
    return visible(text[-LONGEST_SAID:])


def _result(line: str) -> dict[str, Any]:
    if len(line) > LONGEST_RESULT:
        raise _Wrong(f"its last line has {len(line)} characters, and {LONGEST_RESULT} are the most that are read")
    found = json.loads(line, parse_int=_digits, parse_float=_fraction, parse_constant=_constant)
    if not isinstance(found, dict) or "ok" not in found:
        raise ValueError("no result")
    checked: dict[str, Any] = _RESULT("", found)
    return checked


# ---- numbers, as they are parsed: the text of one may have millions of digits


def _digits(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise _Wrong(f"a number of {len(text)} digits")
    return int(text)


def _fraction(text: str) -> float:
    value = float(text) if len(text) <= 40 else math.inf
    if not math.isfinite(value):
        raise _Wrong(f"a number of {len(text)} characters that is none")
    return value


def _constant(text: str) -> float:
    raise _Wrong(f"{text} is no number")


# ---- values by type


def _refuse(path: str, value: Any, wanted: str) -> _Wrong:
    return _Wrong(f"{path.lstrip('.') or 'it'} must be {wanted}, not {visible(shortened(repr(value), 80))}")


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(path, value, "a text")
    return visible_lines(shortened(value, LONGEST_TEXT))


def _word(path: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_WORD or not _WORD.fullmatch(value):
        raise _refuse(path, value, "a word of letters, digits and . _ : + -")
    return value


def _truth(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(path, value, "true or false")
    return value


def _seconds(path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise _refuse(path, value, "a number of seconds")
    return value


def _left(path: str, value: Any) -> float:
    """Seconds until something; below zero if that is over."""
    return _seconds(path, abs(value)) and value if isinstance(value, int | float) else _seconds(path, value)


def _whole(most: int) -> Check:
    def check(path: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise _refuse(path, value, f"a number from 0 to {most}")
        return value

    return check


def _or_null(check: Check) -> Check:
    return lambda path, value: None if value is None else check(path, value)


def _list_of(check: Check, most: int) -> Check:
    def checked(path: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise _refuse(path, value, f"a list of at most {most} entries")
        return [check(f"{path}[{index}]", each) for index, each in enumerate(value)]

    return checked


def _mapping(keys: Mapping[str, Check]) -> Check:
    """A mapping with these keys, of these types, where it has them, and others of no type in particular."""

    def check(path: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MOST_ENTRIES:
            raise _refuse(path, value, "a mapping")
        return {
            visible(shortened(key, LONGEST_WORD)): keys.get(key, _anything)(f"{path}.{visible(key[:60])}"[-200:], each)
            for key, each in value.items()
        }

    return check


def _anything(path: str, value: Any, depth: int = 0) -> Any:
    """A value of a key that is not known here."""
    if depth > DEEPEST:
        raise _Wrong(f"{path[:60]} is nested more than {DEEPEST} deep")
    if isinstance(value, str):
        return visible_lines(shortened(value, LONGEST_TEXT))
    if isinstance(value, list):
        return [_anything(path, each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {visible(shortened(key, LONGEST_WORD)): _anything(path, each, depth + 1) for key, each in value.items()}
    return value


_COUNT = _whole(1_000_000_000)
_TEXTS = _list_of(_text, 10_000)
_GENERATION = _or_null(_word)
_ADDRESSES = _list_of(_mapping({"interface": _text, "address": _text, "prefix": _whole(128)}), 200_000)


def _addresses(path: str, value: Any) -> Any:
    """Those of a node; or, after a change in ipvs mode, how many came and went."""
    return _or_null(_mapping({}) if isinstance(value, dict) else _ADDRESSES)(path, value)


_FACTS = _mapping(
    {
        "hostname": _text,
        "kernel": _text,
        "cpus": _whole(65_536),
        "addresses": _ADDRESSES,
        "capabilities": _mapping({"ipv4": _truth, "ipv6": _truth, "nfacct": _truth, "ipvs": _truth}),
        "tcpBeLiberal": _COUNT,
        "tools": _mapping({}),
        "akpNode": _text,
        "seconds": _seconds,
        "warnings": _TEXTS,
    }
)
_UNCONFIRMED = _mapping(
    {"generation": _GENERATION, "previous": _GENERATION, "seconds": _or_null(_left), "overdue": _truth}
)
_DIFFERENCE = _mapping(dict.fromkeys(("kind", "family", "table", "chain", "name", "service", "rule"), _or_null(_text)))
_STATUS = _mapping(
    {
        "state": _word,
        "generation": _GENERATION,
        "mode": _or_null(_word),
        "node": _GENERATION,
        "flavour": _or_null(_word),
        "appliedAt": _or_null(_seconds),
        "drift": _or_null(_COUNT),
        "differences": _or_null(_list_of(_DIFFERENCE, MOST_ENTRIES)),
        "kept": _or_null(_list_of(_word, 10_000)),
        "unconfirmed": _or_null(_UNCONFIRMED),
        "undone": _or_null(_mapping({"generation": _GENERATION, "reason": _or_null(_text), "at": _or_null(_seconds)})),
        "since": _or_null(_mapping({"generation": _GENERATION, "appliedAt": _or_null(_seconds)})),
        "deltas": _COUNT,
        "servicePorts": _COUNT,
        "seconds": _or_null(_seconds),
        "warnings": _TEXTS,
    }
)
_RESULT = _mapping(
    {
        "verb": _word,
        "ok": _truth,
        "code": _whole(255),
        "asBefore": _truth,
        "error": _or_null(_text),
        "warnings": _TEXTS,
        "need": _or_null(_word),
        "reason": _or_null(_text),
        "probe": _truth,
        "key": _or_null(_word),
        "facts": _or_null(_FACTS),
        "addresses": _addresses,
        "tcpBeLiberal": _COUNT,
        "routeLocalnetLeft": _truth,
        "kubeProxy": _list_of(_whole(1_000_000_000), 20),
        "kubeProxyPort": _truth,
        "status": _STATUS,
        "changed": _truth,
        "node": _or_null(_word),
        "mode": _or_null(_word),
        "flavour": _or_null(_word),
        "generation": _GENERATION,
        "previous": _GENERATION,
        "deltas": _COUNT,
        "chains": _or_null(_mapping({})),
        "sysctls": _or_null(_COUNT),
        "flows": _or_null(_COUNT),
        "seconds": _or_null(_seconds),
        "confirm": _or_null(_word),
        "confirmWithin": _or_null(_seconds),
        "files": _TEXTS,
        "removed": _truth,
        "akpNode": _text,
    }
)
