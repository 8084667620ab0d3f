# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How fresh nodes were in the last day, and how fast changes of endpoints came to their kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plan.history import FILE, Segment, segments
from ..plan.metrics import PROGRAMMING, PROGRAMMING_BUCKETS
from .nodes import RANKS, STATES, NodeRow
from .words import age, counted, moment

SPAN = 86400.0
_COLUMNS = 96
_MOST_NODES = 20
_GOOD = ("current", "unknown")
_BARS = (0.25, 0.5, 1, 2, 3, 5, 10, 30)  # seconds; slower ones share the last bar


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A part of the picture of all nodes: some of them in one state for some columns."""

    x: int
    width: int
    y: int
    height: int
    state: str


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A node that had a bad moment."""

    name: str
    segments: tuple[tuple[float, float, str], ...]  # seconds since the beginning, seconds, state
    words: str


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """From a change of endpoints to the kernel of a node."""

    count: int
    median: float
    slowest: float  # 99 of 100 are as fast
    bars: tuple[tuple[str, int, float], ...]  # up to so long, how many, and in percent of the highest


@dataclasses.dataclass(frozen=True, slots=True)
class Freshness:
    """The last day."""

    known: bool  # whether anything was written down
    most: int  # nodes that were not as intended at one time
    blocks: tuple[Block, ...]
    lines: tuple[Line, ...]
    rest: str  # about the nodes that have no line
    axis: tuple[str, ...]
    speed: Speed | None


def freshness_of(
    path: Path | None, rows: Sequence[NodeRow], histograms: Mapping[str, Mapping[str, Any]], now: float
) -> Freshness:
    """The day that ends now."""
    names = [each.place.name for each in rows]
    states = {each.place.name: each.state for each in rows}
    found = segments(path / FILE, names, now - SPAN, now) if path else {}
    known = any(each.state != "unknown" for parts in found.values() for each in parts)
    blocks, most = _blocks(found, now) if known else ((), 0)
    bad = [(name, parts) for name, parts in found.items() if any(each.state not in _GOOD for each in parts)]
    bad.sort(key=lambda item: (-RANKS[states[item[0]]], -_lost(item[1]), item[0]))
    lines = tuple(_line(name, parts, now) for name, parts in bad[:_MOST_NODES])
    axis = tuple(moment(now - SPAN + part * SPAN / 4, "%H:%M") for part in range(5))
    return Freshness(known, most, blocks, lines, _rest(len(bad), len(names)), axis, speed_of(histograms))


def _rest(bad: int, total: int) -> str:
    told = f"{counted(bad - _MOST_NODES, 'more node')} had a bad moment. " if bad > _MOST_NODES else ""
    good = total - bad
    if not bad:
        return "No node was otherwise, as far as is known."
    return told + (f"{counted(good, 'other node')} had no bad moment." if good else "")


def _line(name: str, parts: Sequence[Segment], now: float) -> Line:
    last = parts[-1]
    if last.state not in _GOOD:
        words = f"{STATES[last.state].word} since {moment(last.began, '%H:%M')}"
    else:
        worst = max((each for each in parts if each.state not in _GOOD), key=lambda each: RANKS[each.state])
        words = f"{STATES[worst.state].word}, {age(_lost(parts))} in all"
    shown = tuple((each.began - now + SPAN, each.ended - each.began, each.state) for each in parts)
    return Line(name, shown, words)


def _lost(parts: Sequence[Segment]) -> float:
    return sum(each.ended - each.began for each in parts if each.state not in _GOOD)


def _blocks(found: Mapping[str, Sequence[Segment]], now: float) -> tuple[tuple[Block, ...], int]:
    """How many nodes were in which bad state, column by column; equal neighbours are one block."""
    width = SPAN / _COLUMNS
    counts: list[dict[str, int]] = [{} for _column in range(_COLUMNS)]
    for parts in found.values():
        worst: dict[int, str] = {}
        for began, ended, state in parts:
            if state in _GOOD:
                continue
            start, end = (int((each - now + SPAN) / width) for each in (began, ended))
            for column in range(max(0, start), min(_COLUMNS - 1, end) + 1):
                worst[column] = max(state, worst.get(column, state), key=RANKS.__getitem__)
        for column, state in worst.items():
            counts[column][state] = counts[column].get(state, 0) + 1
    blocks: list[Block] = []
    for state in reversed(RANKS):
        for column, count in enumerate(counts):
            height = count.get(state, 0)
            below = sum(number for other, number in count.items() if RANKS[other] > RANKS[state])
            if not height:
                continue
            last = blocks[-1] if blocks else None
            if last and (last.state, last.y, last.height, last.x + last.width) == (state, below, height, column):
                blocks[-1] = dataclasses.replace(last, width=last.width + 1)
            else:
                blocks.append(Block(column, 1, below, height, state))
    return tuple(blocks), max(sum(count.values()) for count in counts)


def speed_of(histograms: Mapping[str, Mapping[str, Any]]) -> Speed | None:
    """How fast changes were so far; None if none was measured."""
    known = histograms.get(PROGRAMMING)
    if not known or not known.get("count") or len(known["buckets"]) != len(PROGRAMMING_BUCKETS):
        return None
    total, up_to = int(known["count"]), dict(zip(PROGRAMMING_BUCKETS, known["buckets"], strict=True))
    counts, before = [], 0
    for bound in _BARS:
        counts.append(up_to[bound] - before)
        before = up_to[bound]
    counts.append(total - before)
    top = max(counts)
    titles = [f"≤ {_BARS[0]:g} s", *(f"{each:g}" for each in _BARS[1:]), "more"]
    bars = tuple((title, count, 100 * count / top) for title, count in zip(titles, counts, strict=True))
    return Speed(total, _quantile(up_to, total, 0.5), _quantile(up_to, total, 0.99), bars)


def _quantile(up_to: Mapping[float, int], total: int, share: float) -> float:
    return next((bound for bound, count in up_to.items() if count >= share * total), max(up_to))
