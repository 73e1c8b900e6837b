"""Faults that take nobody away: what the ops beside them take."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random

from allfold_cluster.processes import Child, stop_all
from allfold_core.group_options import GroupOptions
from allfold_core.plan import Plan
from allfold_core.pricing.slow_links import bandwidth_bound
from allfold_core.topology import LinkModel, Member, SlowLink
from benchmarks.children import environment
from benchmarks.faults.allfold_contestant import PROGRAM, VARIABLES
from benchmarks.faults.changes import ALL_VARIABLE, BYTES_VARIABLE, read_changes
from benchmarks.faults.measuring import Row, await_all, statistics_of
from benchmarks.faults.options import Options
from benchmarks.plan import MIB
from chaos.fleet import Fleet, fleet
from chaos.records import RankLog

_BEGIN_SECONDS = 60.0
_RESET_BYTES = 16 * MIB
_LINK_BYTES = 4 * MIB
_LINK_RATE = 10e6
_SLOWER = 10
_LINK_OPS = 6
_LOOK_SECONDS = 0.2
# The first order may be that of a first impression: then another one comes 10 s after it.
_SETTLED_SECONDS = 15.0
_BUSY_PER_CORE = 4


def resets(options: Options) -> Iterator[Row]:
    """All connections between two nodes are reset, at a random moment of an op."""
    what, target = f"reset inside an op of {_RESET_BYTES // MIB} MiB", "<= 100 ms more, no error"
    with _playing(2, 1, _RESET_BYTES, options) as found:
        random = Random(options.seed)
        moments: list[float] = []
        op = _typical_op(found)
        for _ in range(options.faults):
            # Far enough apart that an op has at most one, and most have none.
            time.sleep(op * (3 + random.random()))
            moments.append(time.monotonic())
            found.proxy.ask("reset", list(permutations(found.nodes, 2)))
        _await_ops(found, 1, since=moments[-1])
        logs = _logs(found)
    usual = statistics.median(_times(logs, moments, hit=False))
    hit = [max(0.0, each - usual) for each in _times(logs, moments, hit=True)]
    errors = sum(not record.ok for log in logs for record in log.records)
    note = f"more than the usual {usual * 1e3:.0f} ms of an op; {errors} errors"
    yield Row(what, "allfold", "2x1", target, len(hit), **statistics_of(hit), note=note)


def slow_link(options: Options) -> Iterator[Row]:
    """One direction between two nodes has a tenth of the rate of all others."""
    nodes = 4
    with _playing(nodes, 1, _LINK_BYTES, options) as found:
        found.proxy.ask("rate", list(permutations(found.nodes, 2)), rate=_LINK_RATE)
        alike = _next_ops(found)
        slowed = (found.nodes[1], found.nodes[2])
        found.proxy.ask("rate", [slowed], rate=_LINK_RATE / _SLOWER)
        began = time.monotonic()
        before = _next_ops(found)
        order = _await_layout(found, options.patience)
        slow = _next_ops(found)
    bound = _bound(found.nodes, slowed)
    over = statistics.median(slow) / bound - 1
    note = (
        f"{over:+.0%} over the bound of {bound * 1e3:.0f} ms; "
        f"{statistics.median(alike) * 1e3:.0f} ms with all links alike, "
        f"up to {max(before) * 1e3:.0f} ms before that; {_planned(order, began)}"
    )
    what, target = f"a link at a tenth of its rate, {_LINK_BYTES // MIB} MiB", "<= +10 %"
    shape = f"{nodes}x1"
    yield Row(what, "allfold", shape, target, len(slow), **statistics_of(slow), note=note)


def _bound(names: Sequence[str], slow: tuple[str, str]) -> float:
    """The seconds for which the busiest link sends in the best schedule for these links.

    Here every pair of nodes has a line of its own, so that a node sends at the rate of all of them.
    """
    port = LinkModel(seconds_per_byte=1 / (_LINK_RATE * (len(names) - 1)))
    plan = Plan(
        group="",
        opening=0,
        world_size=len(names),
        members=tuple(Member(name, "", "", (rank,)) for rank, name in enumerate(names)),
        tree_order=tuple(range(len(names))),
        links=port,
        options=GroupOptions(1.0),
    )
    measured = (SlowLink(*slow, _SLOWER / _LINK_RATE),)
    return bandwidth_bound(plan, 1 / _LINK_RATE, measured, _LINK_BYTES)


@dataclass(frozen=True)
class Order:
    """The order in which all nodes say that they stand, and the time of the first such answer."""

    layout: str
    since: float


def _planned(order: Order | None, began: float) -> str:
    if order is None:
        return "it was not planned around"
    return f"it was planned around after {order.since - began:.0f} s: {order.layout}"


def _await_layout(found: Fleet, patience: float) -> Order | None:
    """Return the order of all nodes once it stays as it is; ``None`` if it never does."""
    since, before = time.monotonic(), ""
    deadline = since + patience
    while time.monotonic() < deadline:
        groups = [each for node in found.nodes for each in found.cluster.status(node)["groups"]]
        layouts = {str(each["layout"]) for each in groups}
        told = layouts.pop() if len(layouts) == 1 else ""
        if told != before:
            since, before = time.monotonic(), told
        if told and time.monotonic() > since + _SETTLED_SECONDS:
            return Order(told, since)
        time.sleep(_LOOK_SECONDS)
    return None


def false_evictions(options: Options) -> Iterator[Row]:
    """Nothing happens, but that four busy processes per core want the processor as well."""
    count = _BUSY_PER_CORE * len(os.sched_getaffinity(0))
    with _playing(4, 1, 0, options) as found, ExitStack() as stack:
        busy = [_busy(number) for number in range(count)]
        stack.callback(stop_all, busy)
        time.sleep(options.seconds)
        logs = _logs(found)
    changes = sum(len(log.records) - 1 for log in logs)
    note = f"{changes} changes of outcome in {options.seconds:g} s with {count} busy processes"
    yield Row("false evictions", "allfold", "4x1", "0", note=note)


@contextmanager
def _playing(nodes: int, ranks: int, nbytes: int, options: Options) -> Iterator[Fleet]:
    """A fleet whose ranks do ops of a size, all of which are logged; of 0 bytes, changes alone."""
    everything = {BYTES_VARIABLE: str(nbytes), ALL_VARIABLE: "1"} if nbytes else {}
    with fleet(nodes, ranks, VARIABLES | everything, PROGRAM) as found:
        found.start_ranks("steady", options.seed, options.timeout * 10, options.on_loss)
        _await_ops(found, 1)
        yield found


def _logs(found: Fleet) -> list[RankLog]:
    return [read_changes(Path(rank.orders.log), rank.orders.seat) for rank in found.ranks]


def _await_ops(found: Fleet, count: int, since: float = 0.0) -> None:
    """Wait until every rank has finished so many ops that it called after a moment."""

    def finished() -> bool:
        return all(
            sum(record.called > since for record in log.records) >= count for log in _logs(found)
        )

    await_all(finished, _BEGIN_SECONDS, f"{count} ops")


def _next_ops(found: Fleet) -> list[float]:
    """Return what the next ops take, each on its slowest rank."""
    since = time.monotonic()
    _await_ops(found, _LINK_OPS, since)
    by_rank = [[r for r in log.records if r.called > since] for log in _logs(found)]
    return [
        max(record.ended - record.called for record in each)
        for each in zip(*(records[:_LINK_OPS] for records in by_rank), strict=True)
    ]


def _typical_op(found: Fleet) -> float:
    return statistics.median(_next_ops(found))


def _times(logs: Sequence[RankLog], moments: Sequence[float], *, hit: bool) -> list[float]:
    """Return the seconds of the ops that had a moment in them, or of those that had none."""
    longest: dict[int, tuple[float, float]] = {}
    for log in logs:
        for record in log.records:
            began, ended = longest.get(record.number, (record.called, record.ended))
            longest[record.number] = min(began, record.called), max(ended, record.ended)
    return [
        ended - began
        for began, ended in longest.values()
        if any(began < at < ended for at in moments) == hit
    ]


def _busy(number: int) -> Child:
    command = [sys.executable, "-c", "while True: pass"]
    return Child(f"busy {number}", command, env=environment())
