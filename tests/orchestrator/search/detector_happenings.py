"""Everything that can happen between nodes and the failure detector."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.orchestrator.search.detector_world import (
    BEAT_TICKS,
    FAR,
    LAST_FAULT,
    LAST_TICK,
    SILENT_TICKS,
    Change,
    DetectorWorld,
    Trial,
)
from tests.support.state_search import Game

Action = tuple[str, bool, Change]


def game_of(trial: Trial) -> Game[DetectorWorld]:
    """Return the search of everything that can happen in a trial."""
    return Game(lambda: DetectorWorld(trial), actions, DetectorWorld.after)


def actions(w: DetectorWorld) -> Iterator[Action]:
    """Everything that can happen now."""
    yield from _faults(w)
    must = list(_messages(w))
    yield from must
    if w.decided < w.tick and w.detector.is_due(w.now):
        yield "the failure detector decides", False, DetectorWorld.decide
    elif not must and w.tick < LAST_TICK:
        yield "time passes", False, DetectorWorld.pass_time


def _faults(w: DetectorWorld) -> Iterator[Action]:
    budget = w.budget
    if budget["heals"]:
        for link in sorted(w.cut, key=sorted):
            yield (
                f"the link {sorted(link)} is well",
                True,
                _spend("heals", DetectorWorld.heal, link),
            )
    if w.trial.wake:
        for node in w.members():
            if w.status[node] == "stopped":
                yield f"{node} goes on", True, _do(DetectorWorld.wake, node)
    if w.trial.recovers:
        for node in w.stuck:
            yield f"{node} does its part again", True, _do(DetectorWorld.recover, node)
    if w.tick > LAST_FAULT:
        return
    for node in w.running():
        if budget["deaths"] and len(w.running()) > 1:
            yield f"{node} dies", True, _spend("deaths", DetectorWorld.end, node, "dead")
        if budget["stops"] and len(w.running()) > 1 and w.blamed.get(node) != w.tick:
            yield f"{node} stops", True, _spend("stops", DetectorWorld.end, node, "stopped")
        if budget["sticks"] and node not in w.stuck:
            yield f"{node} is stuck", True, _spend("sticks", DetectorWorld.stick, node)
        if budget["lonely"] and node not in w.lonely:
            yield f"{node} is cut off", True, _spend("lonely", DetectorWorld.cut_off, node)
        for by in w.running() if budget["false"] else ():
            # Of a dead link it would be no mistake.
            is_well = frozenset((by, node)) not in w.cut
            if by != node and is_well and (by, node) not in w.suspected:
                change = _spend("false", DetectorWorld.blame, by, node)
                yield f"{by} suspects {node} by mistake", True, change
    if budget["stalls"]:
        yield "the replica stands still", True, _spend("stalls", DetectorWorld.stall)


def _messages(w: DetectorWorld) -> Iterator[Action]:
    for node in w.members():
        if w.status[node] == "runs":
            yield from _said_by(w, node)
        if w.status[node] == "dead" and node not in w.noticed:
            yield f"the link of {node} ends", False, _do(DetectorWorld.notice, node)
        if node in w.dialled:
            refuses = w.status[node] == "dead" or node in w.trial.rejects
            if refuses:
                yield f"{node} refuses the dial", False, _do(DetectorWorld.refuse, node)
            elif w.status[node] == "runs" and node not in w.lonely:
                yield f"{node} answers the dial", False, _do(DetectorWorld.answer, node)


def _said_by(w: DetectorWorld, node: str) -> Iterator[Action]:
    if node in w.lonely:
        if node not in w.noticed:
            yield f"the link of {node} ends", False, _do(DetectorWorld.notice, node)
        return
    if node in w.probed:
        yield f"{node} answers", False, _do(DetectorWorld.answer, node)
    for by, other in sorted(w.called_stuck):
        if by == node and other not in w.stuck:
            yield f"{node} goes on with {other}", False, _do(DetectorWorld.go_on, node, other)
    for other, since in w.stuck.items():
        is_known = other == node or (node, other) in w.called_stuck
        if not is_known and w.tick - since >= SILENT_TICKS:
            yield f"{node} waits for {other}", False, _do(DetectorWorld.call_stuck, node, other)
    for by, other in sorted(w.back):
        if by == node:
            yield f"{node} hears {other} again", False, _do(DetectorWorld.take_back, node, other)
    is_due = w.tick - w.beaten[node] >= BEAT_TICKS
    if is_due or w.asked.get(node, FAR) <= w.tick:
        yield f"{node} beats", False, _do(DetectorWorld.beat, node)
    for other in w.members():
        if other == node or (node, other) in w.suspected or w.hears(node, other):
            continue
        if w.status[other] == "dead" and frozenset((node, other)) not in w.cut:
            change = _do(DetectorWorld.suspect, node, other, "refused")
            yield f"{node} is refused by {other}", False, change
        elif w.tick - w.heard[node, other] >= SILENT_TICKS:
            change = _do(DetectorWorld.suspect, node, other, "silent")
            yield f"{node} hears nothing of {other}", False, change


def _do(method: Callable[..., None], *args: object) -> Change:
    return lambda world: method(world, *args)


def _spend(what: str, method: Callable[..., None], *args: object) -> Change:
    def change(world: DetectorWorld) -> None:
        world.budget[what] -= 1
        method(world, *args)

    return change
