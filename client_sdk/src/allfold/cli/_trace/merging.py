"""From the ops of all nodes to one trace. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from allfold.cli._trace.asking import Flights, Opening, SeenOp
from allfold.cli._trace.events import Events, Key, TraceThread, Tracks
from allfold_core.agent_answers import Json, RecordedCall, RecordedOp

MOST_EVENTS = 500_000
_EXCHANGE = -1  # its track comes before those of the ranks


def newest_ops(ops: Sequence[SeenOp], most_events: int = MOST_EVENTS) -> list[SeenOp]:
    """Return the newest ops that fit into a trace of a bounded size."""
    total, kept = 0, 0
    for op in reversed(ops):
        total += _most_events(op)
        if total > most_events:
            break
        kept += 1
    return list(ops[len(ops) - kept :])


def _most_events(op: SeenOp) -> int:
    return 2 * len(op.arrivals) + len(op.missing) + len(op.heard) + 8


def merged(ops: Sequence[SeenOp], flights: Flights, our_wall: float) -> Json:
    """Return the trace of all nodes.

    Args:
        ops: in the order of their starts.
        our_wall: the seconds since 1970 at which our monotonic clock was 0.
    """
    origin = min((op.start for op in ops), default=0.0)
    drawing = _Drawing(origin, {op.opening for op in ops})
    for op in ops:
        drawing.draw(op)
    drawing.connect()
    drawing.count(ops)
    for flight in flights.found:
        drawing.tracks.pid(flight.node)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "origin": our_wall + origin,
            "clocks": {
                flight.node: {
                    "ahead": flight.wall_ahead,
                    "uncertainty": flight.offset.uncertainty,
                }
                for flight in flights.found
            },
            "problems": flights.problems,
        },
        "traceEvents": [*drawing.tracks.metadata(), *drawing.events.in_order()],
    }


class _Drawing:
    """Draws ops: a thread per rank, one for what a node does, and arrows between nodes."""

    def __init__(self, origin: float, openings: Iterable[Opening]) -> None:
        self.tracks = Tracks()
        self.events = Events(origin)
        self._labels = dict(_labels(openings))
        # By op, of each node the slice that shows it best.
        self._ends: dict[tuple[str, int, int], list[tuple[TraceThread, float]]] = defaultdict(list)

    def draw(self, op: SeenOp) -> None:
        calls = sorted(op.arrivals.items(), key=lambda each: each[1])
        drawn = [(self._draw_call(op, rank, at), at) for rank, at in calls]
        for rank in op.missing:
            self._draw_missing(op, rank)
        exchange = self._draw_exchange(op)
        if exchange is not None:
            drawn.append(exchange)
        self._ends[op.key] += drawn[-1:]

    def _track(self, op: SeenOp, rank: int) -> tuple[str, Key, str]:
        label = self._labels[op.opening]
        name = "exchange" if rank == _EXCHANGE else f"rank {rank}"
        return op.node, (*op.opening, rank), f"{label}{name}"

    def _draw_call(self, op: SeenOp, rank: int, at: float) -> TraceThread:
        """Draw the call of a rank, and its wait for the other ranks of the node."""
        record = op.record
        end = op.end if op.is_over else None
        where = self.tracks.place(*self._track(op, rank), at, end)
        call = record["other_calls"].get(str(rank), record)
        self.events.slice(where, call["kind"], at, end, _args(record, call))
        last = op.phase("called")
        if op.missing:
            awaited = f"wait for {_ranks(op.missing)}"
            self.events.slice(where, awaited, at, end, {})
        elif last is not None and last > at:
            latest = [each for each, when in op.arrivals.items() if when == last]
            self.events.slice(where, f"wait for {_ranks(latest)}", at, min(last, op.end), {})
        if record["error"]:
            error = {"code": record["error"], "reason": record["reason"]}
            self.events.instant(where, f"failed: {record['error']}", op.end, error)
        return where

    def _draw_missing(self, op: SeenOp, rank: int) -> None:
        """Say on the track of a rank that it has not called an op that others wait in, or did."""
        where = self.tracks.place(*self._track(op, rank), op.end, op.end)
        text = "did not call" if op.is_over else "has not called"
        what = {"seq": op.seq, "what": op.record["what"]}
        self.events.instant(where, f"{text} op {op.seq}", op.end, what)

    def _draw_exchange(self, op: SeenOp) -> tuple[TraceThread, float] | None:
        """Draw the work of a node; return where its slice begins, if it has done any."""
        began, exchanged, settled = map(op.phase, ("began", "exchanged", "settled"))
        if began is None:
            return None
        on_one_node = settled is not None and exchanged is None and not op.heard
        end = op.end if op.is_over else None
        where = self.tracks.place(*self._track(op, _EXCHANGE), began, end)
        args = {"seq": op.seq, "strategy": op.record["strategy"], "bytes": op.record.get("bytes")}
        if on_one_node:
            self.events.slice(where, "fold", began, end, args)
            return where, began
        self.events.slice(where, op.record["kind"], began, end, args)
        self.events.slice(where, "exchange", began, end if exchanged is None else exchanged, {})
        limit = op.end if exchanged is None else exchanged
        for node, at in op.heard.items():
            self.events.slice(where, f"until data of node {node}", began, min(at, limit), {})
        if settled is not None and settled != end:  # in the lane ranks take the result themselves
            self.events.slice(where, "hand out", settled, end, {})
        return where, began

    def connect(self) -> None:
        """Connect the slices of each op on all nodes."""
        for number, (key, ends) in enumerate(self._ends.items(), 1):
            if len({where.pid for where, _ in ends}) > 1:
                self.events.flow(number, f"op {key[-1]}", ends)

    def count(self, ops: Iterable[SeenOp]) -> None:
        """Count the bytes of the ops in flight, by node and group."""
        changes: dict[tuple[str, Opening], list[tuple[float, int]]] = defaultdict(list)
        for op in ops:
            nbytes = op.record.get("bytes", 0)
            changes[op.node, op.opening].append((op.start, nbytes))
            if op.is_over:
                changes[op.node, op.opening].append((op.end, -nbytes))
        for (node, opening), steps in changes.items():
            name, total = f"{self._labels[opening]}bytes in flight", 0
            for at, change in sorted(steps):
                total += change
                self.events.counter(self.tracks.pid(node), name, at, {"bytes": total})


def _labels(openings: Iterable[Opening]) -> Iterator[tuple[Opening, str]]:
    """Yield what the tracks of a group are called by; nothing where there is only one."""
    known = sorted(openings)
    names = [name for name, _ in known]
    for name, opening in known:
        number = f" opening {opening}" if names.count(name) > 1 else ""
        yield (name, opening), "" if len(known) == 1 else f"{name}{number} "


def _args(record: RecordedOp, call: RecordedCall) -> Json:
    shown = {name: record[name] for name in ("seq", "epoch", "strategy", "lane", "state")}
    round_ = {"round": record["round"]} if record.get("round") else {}
    return {"what": call["what"], "bytes": call["bytes"], **shown, **round_}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
