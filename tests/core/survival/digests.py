"""Digests of worlds: equal for two states of a world only if their futures are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allfold_core.survival.records import Epoch
from allfold_core.survival.reports import Install, OpState, Report, Wishes

if TYPE_CHECKING:
    from tests.core.survival.world import World

HOLDS = (OpState.HELD, OpState.HANDED)


def digest_of(w: World) -> object:
    """Return everything in a world that its future can depend on."""
    again = frozenset(w.arrived) if w.budget["again"] else None
    return (
        tuple(_of_agent(w, n) for n in range(w.s.nodes)),
        tuple((t, *_of_leader(w, t)) for t in sorted(w.leaders)),
        tuple(w.terms),
        tuple(map(frozenset, w.announced)),
        (w.record, w.recalled, frozenset(w.reported), w.generation, w.orch),
        (frozenset(w.dead), frozenset(w.called), frozenset(w.inside)),
        _of_members(w) if w.s.max_world is not None else None,
        w.quorums.key() if w.s.quorum is not None else None,
        frozenset(w.told.items()),
        frozenset((key, frozenset(nodes)) for key, nodes in w.started.items()),
        frozenset((key, frozenset(nodes)) for key, nodes in w.closings.items()),
        frozenset((key, _of_report(report)) for key, report in w.reports.items()),
        frozenset((key, _of_install(install)) for key, install in w.installs.items()),
        (frozenset(w.sent), again),
        tuple(w.budget.values()),
    )


def _of_members(w: World) -> object:
    return (
        (frozenset(w.granted.items()), frozenset(w.ready), frozenset(w.left), w.wanted),
        (frozenset(w.at_boundary.items()), frozenset(w.passed), frozenset(w.past)),
        (frozenset(w.views.items()), frozenset(w.seats.items())),
    )


def _of_leader(w: World, t: int) -> tuple[object, ...]:
    leader = w.leaders[t]
    news = (tuple(leader._dead), tuple(leader._doubts), tuple(leader._later))
    layouts = (leader._layout, leader._later_layout)
    unwaited = (tuple(leader._unwaited), leader._has_unwaited)
    return (leader.round, leader.gathering, news, layouts, unwaited)


def _of_agent(w: World, n: int) -> object:
    a = w.agents[n]
    if not w.alive[n]:
        return tuple((k, e.state, e.stamp) for k, e in a.ops.items() if e.state in HOLDS)
    ops = tuple(
        (
            (k, e.state, e.stamp, e.started, e.complete, e.closed, e.forward),
            (e.fetch, e.fetching, e.doubted),
            tuple((session, call.view) for session, call in e.calls.items()),
        )
        for k, e in sorted(a.ops.items())
    )
    marks = tuple(a._watermarks.values()) if w.s.slow else None
    return (
        (a.term.number, a.term.generation, a.generation),
        (a.round, a.frozen, a.out, _of_epoch(a.epoch), a.floor, a.watermark, marks),
        ops,
        _of_wishes(a.wishes),
    )


def _of_epoch(epoch: Epoch) -> object:
    return (epoch.stamp, epoch.seats, epoch.waiting)


def _of_wishes(wishes: Wishes) -> object:
    return (wishes.join, wishes.leave, tuple(wishes.at_boundary.items()))


def _of_report(report: Report) -> object:
    """Return everything in a report that a decision can depend on."""
    if (known := report.__dict__.get("_content")) is None:
        ops = tuple(
            (seq, op.state, op.stamp, tuple((s, call.view) for s, call in op.calls.items()))
            for seq, op in report.ops.items()
        )
        numbers = report.floor, report.passed
        wishes = _of_wishes(report.wishes)
        known = hash((_of_epoch(report.epoch), tuple(report.dead), numbers, ops, wishes))
        report.__dict__["_content"] = known
    return known


def _of_install(install: Install) -> object:
    if (known := install.__dict__.get("_content")) is None:
        known = hash((install.epoch, install.floor, tuple(install.outcomes.items())))
        install.__dict__["_content"] = known
    return known
