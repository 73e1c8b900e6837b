"""The shortest story that goes wrong in the same way: events are left out, many at a time first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.simulator.story import Story
from tests.simulator.trial import Change, Told, tell

MOST_TRIES = 400

Places = tuple[int, ...]


def shortest(told: Told, changes: Iterable[Change] = (), most: int = MOST_TRIES) -> Told:
    """Return a story with as few of the events as still make an invariant fail.

    Args:
        most: tries.
    """
    made, best = tuple(changes), told
    tries = 0

    def fails(places: Places) -> bool:
        nonlocal best, tries
        tries += 1
        if tries > most:
            return False
        found = tell(told.story.only(places), made)
        if found.problem:
            best = found
        return bool(found.problem)

    _minimal(tuple(range(len(told.story.events))), fails)
    return _simpler(best, made)


def _minimal(places: Places, fails: Callable[[Places], bool]) -> Places:
    """Delta debugging: leave out halves, quarters ... single ones, while it still fails."""
    parts = 2
    while len(places) > 1:
        size = max(1, len(places) // parts)
        cuts = [places[at : at + size] for at in range(0, len(places), size)]
        for cut in cuts:
            rest = tuple(each for each in places if each not in cut)
            if fails(rest):
                places, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(places), 2 * parts)
    if len(places) == 1 and fails(()):
        return ()
    return places


def _simpler(told: Told, changes: tuple[Change, ...]) -> Told:
    """Try whether plainer parameters of the group do as well."""
    for plainer in ({"window": 1}, {"replicas": 1}, {"kinds": ("ar",)}, {"min_world": 1}):
        setup = replace(told.story.setup, **plainer)
        if setup != told.story.setup:
            found = tell(replace(told.story, setup=setup), changes)
            told = found if found.problem else told
    return told


def kept(told: Told, whole: Story) -> str:
    """Return the numbers of the events that a shorter story has kept, for the command line."""
    return ",".join(str(whole.events.index(each)) for each in told.story.events)
