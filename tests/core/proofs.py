"""Proofs of many schedules, one per structure."""

from __future__ import annotations

from allfold_core.schedules.schedule import Await, Fold, Receive, Schedule, Send, Signal, Step
from allfold_core.schedules.verify import ScheduleError, verify

_SIGNALS = (Signal, Await)
_proved: set[int] = set()


def prove(schedule: Schedule) -> None:
    """Verify a schedule, unless one that differs from it in sizes alone has been.

    The verifier cuts the tensor at the bounds of all slices, and it does not matter to a proof how
    many elements lie between two of them. So a ring of 64 nodes is proved once for 64 elements and
    for a million; whoever asks for every size still has every schedule compiled and compared.
    """
    found = hash(structure(schedule))
    if found in _proved:
        return
    try:
        verify(schedule)
    except ScheduleError as error:
        error.add_note(
            f"{schedule.kind.label} by {schedule.strategy}, {schedule.nodes} nodes, "
            f"{schedule.numel} elements, root {schedule.root}, "
            f"blocks of {[len(block) for block in schedule.blocks]}"
        )
        raise
    _proved.add(found)


def structure(schedule: Schedule) -> tuple[object, ...]:
    """Return a schedule without the distances between its bounds."""
    bounds = {0, schedule.numel}
    for block in schedule.blocks:
        bounds.update((block.start, block.stop))
    for program in schedule.programs:
        for step in program:
            if not isinstance(step, _SIGNALS):
                bounds.add(step.slice.start)
                bounds.add(step.slice.stop)
    index = {bound: position for position, bound in enumerate(sorted(bounds))}
    return (
        schedule.kind,
        schedule.root,
        index[schedule.numel],
        tuple((index[block.start], index[block.stop]) for block in schedule.blocks),
        tuple(tuple(_step(step, index) for step in program) for program in schedule.programs),
    )


def _step(step: Step, index: dict[int, int]) -> tuple[object, ...]:
    if isinstance(step, Signal):
        return "signal", step.to
    if isinstance(step, Await):
        return "await", step.source
    start, stop = index[step.slice.start], index[step.slice.stop]
    if isinstance(step, Send):
        return "send", start, stop, step.to
    if isinstance(step, Receive):
        return "receive", start, stop, step.source
    assert isinstance(step, Fold)
    return "fold", start, stop, step.operands
