"""Events of the Trace Event Format, which Perfetto and chrome://tracing read. Pure.

One :class:`Tracks` per trace gives nodes their process numbers and tracks their thread numbers.
Slices of one thread must lie inside each other or apart, so a rank that has several ops in flight
at once gets a thread for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

Json = dict[str, Any]
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TraceThread:
    """A thread of the trace, by its process and thread number."""

    pid: int
    tid: int


@dataclass
class _Track:
    """Slices that belong together.

    Attributes:
        threads: of each, when its last slice ends.
    """

    pid: int
    label: str
    threads: list[float] = field(default_factory=list)


class Tracks:
    """The processes and threads of a trace."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tracks: dict[tuple[int, Key], _Track] = {}
        self._tids: dict[tuple[int, Key, int], int] = {}

    def pid(self, node: str) -> int:
        """Return the number of a node."""
        return self._pids.setdefault(node, len(self._pids) + 1)

    def place(
        self, node: str, key: Key, label: str, start: float, end: float | None
    ) -> TraceThread:
        """Return a thread that is free for a slice; slices come in the order of their starts.

        Args:
            key: of the track on its node, by which tracks are sorted.
            label: the name of the track.
            end: ``None`` for a slice that is open.
        """
        pid = self.pid(node)
        track = self._tracks.setdefault((pid, key), _Track(pid, label))
        free = (index for index, ends in enumerate(track.threads) if ends <= start)
        index = next(free, len(track.threads))
        if index == len(track.threads):
            track.threads.append(-inf)
        track.threads[index] = inf if end is None else end
        slot = (pid, key, index)
        return TraceThread(pid, self._tids.setdefault(slot, len(self._tids) + 1))

    def metadata(self) -> Iterator[Json]:
        """Yield the names and the order of all processes and threads."""
        for node, pid in sorted(self._pids.items()):
            yield _named("process_name", TraceThread(pid, 0), {"name": f"node {node}"})
        for order, node in enumerate(sorted(self._pids)):
            where = TraceThread(self._pids[node], 0)
            yield _named("process_sort_index", where, {"sort_index": order})
        for order, slot in enumerate(sorted(self._tids)):
            pid, key, index = slot
            where = TraceThread(pid, self._tids[slot])
            label = self._tracks[pid, key].label + (f" ({index + 1})" if index else "")
            yield _named("thread_name", where, {"name": label})
            yield _named("thread_sort_index", where, {"sort_index": order})


def _named(what: str, where: TraceThread, args: Json) -> Json:
    return {"ph": "M", "name": what, "pid": where.pid, "tid": where.tid, "args": args}


class Events:
    """The events of a trace.

    Args:
        origin: the time that is 0 in the trace.
    """

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._all: list[Json] = []

    def slice(
        self, where: TraceThread, name: str, start: float, end: float | None, args: Json
    ) -> None:
        """Add what lasted from one time to another, or goes on (``end`` is ``None``)."""
        began = self._nanoseconds(start)
        event = self._event("B" if end is None else "X", name, where, began)
        if end is not None:
            event["dur"] = (max(began, self._nanoseconds(end)) - began) / 1000
        self._all.append(event | {"args": args})

    def instant(self, where: TraceThread, name: str, at: float, args: Json) -> None:
        """Add what happened at once."""
        event = self._event("i", name, where, self._nanoseconds(at))
        self._all.append(event | {"s": "t", "args": args})

    def flow(self, number: int, name: str, ends: Iterable[tuple[TraceThread, float]]) -> None:
        """Connect slices of two or more threads with arrows, in the order of the times."""
        places = sorted(ends, key=lambda each: each[1])
        for index, (where, at) in enumerate(places):
            phase = "s" if index == 0 else "f" if index == len(places) - 1 else "t"
            event = self._event(phase, name, where, self._nanoseconds(at))
            event |= {"cat": "flow", "id": number}
            self._all.append(event | ({"bp": "e"} if phase == "f" else {}))

    def counter(self, pid: int, name: str, at: float, series: Json) -> None:
        """Add the values of a counter from a time on."""
        event = self._event("C", name, TraceThread(pid, 0), self._nanoseconds(at))
        self._all.append(event | {"args": series})

    def in_order(self) -> list[Json]:
        """Return all events by time, those that hold others before them."""
        return sorted(self._all, key=lambda each: (each["ts"], _rank(each)))

    def _nanoseconds(self, at: float) -> int:
        return max(0, round((at - self._origin) * 1e9))

    def _event(self, phase: str, name: str, where: TraceThread, at: int) -> Json:
        return {
            "ph": phase,
            "name": name,
            "cat": "op",
            "ts": at / 1000,
            "pid": where.pid,
            "tid": where.tid,
        }


def _rank(event: Json) -> float:
    """Long slices first; what points into slices after them."""
    if event["ph"] == "B":
        return -inf
    return -float(event["dur"]) if event["ph"] == "X" else 1.0
