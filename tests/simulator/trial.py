"""One story told from its beginning to its end: always the same, and with a rule switched off."""

from __future__ import annotations

import gc
import os
import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from tests.simulator.story import Story, draw
from tests.simulator.world import World
from tests.support.state_search import Violation
from tests.support.virtual_clock import virtual_time
from tests.support.virtual_loop import Endless

HASHES = "0"
"""The seed of Python's hashes: the order of a set must be the same whenever a story is told."""
_COLLECT_STORIES = 10

Change = tuple[object, str, object]
"""A module or class, a name in it, and what is there instead."""


@dataclass(frozen=True)
class Told:
    """The end of a story.

    Attributes:
        kills: the processes that were killed.
        steps: what was done in all processes together.
        seconds: of virtual time.
        outcomes: that ranks were told.
        problem: the invariant that does not hold; ``""`` if all do.
        log: what has happened.
    """

    story: Story
    kills: int
    steps: int
    seconds: float
    outcomes: int
    problem: str
    log: tuple[str, ...]


def is_repeatable() -> bool:
    """Return True if this process tells a story as all others do."""
    return os.environ.get("PYTHONHASHSEED") == HASHES


def tell(story: Story, changes: Iterable[Change] = ()) -> Told:
    """Tell a story.

    Args:
        changes: of the product, for as long as it lasts.
    """
    with ExitStack() as stack:
        stack.enter_context(_drawn_names(story.seed))
        for target, name, instead in changes:
            stack.enter_context(patch.object(target, name, instead))
        loop = stack.enter_context(virtual_time())
        world, begun = World(loop, story), loop.time()
        problem = ""
        try:
            world.run()
        except (Violation, Endless) as error:
            problem = str(error)
        seconds = loop.time() - begun
        outcomes = world.ledger.outcomes
        return Told(story, world.kills, loop.steps, seconds, outcomes, problem, tuple(world.log))


@contextmanager
def _drawn_names(seed: int) -> Iterator[None]:
    """Draw pauses, and the names of lives, from the story's number."""
    rng, state = random.Random(seed), random.getstate()
    random.seed(seed)
    with patch.object(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4)):
        yield
    random.setstate(state)


def tell_all(
    seeds: Iterable[int],
    changes: Iterable[Change] = (),
    stories_of: Callable[[int], Story] = draw,
) -> Iterator[Told]:
    """Tell the stories of some numbers."""
    made = tuple(changes)
    gc.freeze()
    gc.disable()  # what a story leaves behind is looked for between stories
    try:
        for count, seed in enumerate(seeds, 1):
            yield tell(stories_of(seed), made)
            if count % _COLLECT_STORIES == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
