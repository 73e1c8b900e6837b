"""A strict reader of the Trace Event Format, as far as Allfold writes it.

It refuses what Perfetto or chrome://tracing would drop without a word: events without a key that
their phase needs, slices of one thread that overlap, arrows that begin or end outside of a slice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from math import inf
from typing import Any, NoReturn

Json = dict[str, Any]

# Sub-nanosecond: the sum of a time and a duration, both of whole nanoseconds, in microseconds.
_ROUNDING = 1e-3 / 2
_KEYS: dict[str, set[str]] = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "B": {"name", "cat", "ts", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "pid", "tid", "s", "args"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "t": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
    "C": {"name", "cat", "ts", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
}
_METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


class Invalid(AssertionError):
    """A trace that a viewer would not show as it is meant."""


def parse(text: str) -> Json:
    """Return a trace; ``Invalid`` says what is wrong with it."""

    def no_constant(constant: str) -> NoReturn:
        raise Invalid(f"{constant} is not JSON")

    trace = json.loads(text, parse_constant=no_constant)
    check(trace)
    return dict(trace)


def check(trace: Json) -> None:
    """Raise ``Invalid`` for a trace that is not valid."""
    events = trace["traceEvents"]
    for event in events:
        _check_event(event)
    _check_order(events)
    _check_names(events)
    slices = _slices(events)
    for thread, found in slices.items():
        _check_nesting(thread, found)
    _check_flows(events, slices)


def _require(holds: object, event: object, what: str) -> None:
    if not holds:
        raise Invalid(f"{what}: {event}")


def _check_event(event: Json) -> None:
    phase = event.get("ph")
    _require(phase in _KEYS, event, "unknown phase")
    keys = event.keys() - {"ph"}
    _require(keys == _KEYS[str(phase)], event, f"keys {sorted(keys)}")
    _require(isinstance(event["name"], str) and event["name"], event, "no name")
    _require(type(event["pid"]) is int and type(event["tid"]) is int, event, "pid, tid")
    if phase != "M":
        _require(event["ts"] >= 0, event, "negative time")
    match phase:
        case "X":
            _require(event["dur"] >= 0, event, "negative duration")
        case "i":
            _require(event["s"] in ("g", "p", "t"), event, "scope")
        case "f":
            _require(event["bp"] == "e", event, "binding point")
        case "C":
            values = event["args"].values()
            _require(values and all(type(each) is int for each in values), event, "no numbers")
        case "M":
            _require(set(event["args"]) == {_METADATA[event["name"]]}, event, "metadata")


def _check_order(events: Iterable[Json]) -> None:
    timed = False
    last = 0.0
    for event in events:
        if event["ph"] == "M":
            _require(not timed, event, "metadata behind other events")
            continue
        timed = True
        _require(event["ts"] >= last, event, f"before {last}")
        last = event["ts"]


def _check_names(events: list[Json]) -> None:
    """Every process and every thread with slices has one name, and no two have the same."""
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in events:
        if event["ph"] != "M":
            continue
        if event["name"] == "process_name":
            _require(event["pid"] not in processes, event, "named twice")
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            thread = (event["pid"], event["tid"])
            _require(thread not in threads, event, "named twice")
            threads[thread] = event["args"]["name"]
    _require(len(set(processes.values())) == len(processes), processes, "names of processes")
    named = {(pid, name) for (pid, _), name in threads.items()}
    _require(len(named) == len(threads), threads, "names of threads")
    for event in events:
        _require(event["pid"] in processes, event, "process without a name")
        if event["ph"] in "XBistf":
            _require((event["pid"], event["tid"]) in threads, event, "thread without a name")


Slices = dict[tuple[int, int], list[tuple[float, float]]]


def _slices(events: Iterable[Json]) -> Slices:
    found: Slices = defaultdict(list)
    for event in events:
        if event["ph"] in "XB":
            ends = event["ts"] + event["dur"] if event["ph"] == "X" else inf
            found[event["pid"], event["tid"]].append((event["ts"], ends))
    return found


def _check_nesting(thread: tuple[int, int], slices: list[tuple[float, float]]) -> None:
    """In the order of the file, each slice lies in the one that is open, or behind it."""
    for before, after in pairwise(slices):
        _require(before[0] <= after[0], thread, f"{after} after {before}")
    stack: list[float] = []
    for start, end in slices:
        while stack and stack[-1] <= start + _ROUNDING and stack[-1] < end:
            stack.pop()
        _require(not stack or end <= stack[-1] + _ROUNDING, thread, f"{start} to {end} overlaps")
        stack.append(end)


def _check_flows(events: Iterable[Json], slices: Slices) -> None:
    flows: dict[int, list[Json]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            at, thread = event["ts"], (event["pid"], event["tid"])
            inside = any(start <= at <= end + _ROUNDING for start, end in slices[thread])
            _require(inside, event, "an arrow outside of a slice")
    for number, parts in flows.items():
        phases = "".join(each["ph"] for each in parts)
        _require(phases == "s" + "t" * (len(parts) - 2) + "f", parts, f"flow {number}")
        _require(len({each["name"] for each in parts}) == 1, parts, f"names of flow {number}")
