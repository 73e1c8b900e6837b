"""Searches through all that can happen in a small world: breadth-first, and by random walks."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Violation(Exception):
    """An invariant does not hold."""


class Searched(Protocol):
    """The state of a world."""

    def key(self) -> Any:
        """Return what is equal for states with equal futures."""

    def check_end(self) -> None:
        """Raise a :class:`Violation` if nothing more may happen, and something should have."""


W = TypeVar("W", bound=Searched)

LONGEST = 5000
"""The steps of a walk after which it is taken for endless."""


@dataclass(frozen=True)
class Game(Generic[W]):
    """A world, and everything that can happen in it.

    Attributes:
        begin: makes the first state.
        actions: of a state: the name of each, whether it may never happen, and its change.
        follow: returns the state after a change, or raises a :class:`Violation`.
    """

    begin: Callable[[], W]
    actions: Callable[[W], Iterator[tuple[str, bool, Callable[[W], None]]]]
    follow: Callable[[W, Callable[[W], None]], W]


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        states: how many were seen; of a walk, its steps.
        whole: all there are were seen.
        way: the labels of the actions that lead to the violation.
    """

    states: int
    whole: bool
    problem: str = ""
    way: tuple[str, ...] = ()


def after_way(game: Game[W], way: Iterable[str]) -> Game[W]:
    """Return the game as it goes on after some actions, which are given by their names."""

    def begin() -> W:
        world = game.begin()
        for label in way:
            options = {name: change for name, _, change in game.actions(world)}
            assert label in options, f"'{label}' cannot happen now, but {[*options]}"
            world = game.follow(world, options[label])
        return world

    return Game(begin, game.actions, game.follow)


def explore_game(game: Game[W], most: int, seconds: float = math.inf) -> Found:
    """Visit up to ``most`` states, the nearest first."""
    until = time.monotonic() + seconds
    first = game.begin()
    seen: dict[int, tuple[int, str] | None] = {hash(first.key()): None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        code, label, idle = hash(world.key()), "(the end)", True
        try:
            for label, optional, change in game.actions(world):
                idle = idle and optional
                after = game.follow(world, change)
                mark = hash(after.key())
                if mark not in seen:
                    seen[mark] = (code, label)
                    queue.append(after)
            label = "(the end)"
            if idle:
                world.check_end()
        except Violation as error:
            way = [label]
            while (link := seen[code]) is not None:
                code, label = link
                way.append(label)
            return Found(len(seen), False, str(error), tuple(reversed(way)))
        if len(seen) > most or time.monotonic() > until:
            return Found(len(seen), False)
    return Found(len(seen), True)


def walk_game(game: Game[W], most: int, seed: int, seconds: float = math.inf) -> Found:
    """Take ``most`` random steps, in walks that go on until nothing is left to happen."""
    until = time.monotonic() + seconds
    rng, steps = random.Random(seed), 0
    while steps < most and time.monotonic() < until:
        world, way = game.begin(), list[str]()
        eagerness = rng.choice((0.02, 0.05, 0.2))  # of faults
        while True:
            options = list(game.actions(world))
            must = [each for each in options if not each[1]]
            may = [each for each in options if each[1]]
            try:
                if not must:
                    world.check_end()
                if not options or (not must and rng.random() < 0.5):
                    break
                faulty = may and (not must or rng.random() < eagerness)
                label, _, change = rng.choice(may if faulty else must)
                way.append(label)
                if len(way) > LONGEST:
                    raise Violation("a walk has no end")
                world = game.follow(world, change)
                steps += 1
            except Violation as error:
                return Found(steps, False, str(error), tuple(way))
    return Found(steps, True)


def show(name: str, found: Found, seconds: float) -> None:
    """Print the result of a search, and the way to what it has found."""
    how = "VIOLATION" if found.problem else "all" if found.whole else "cut off"
    print(f"{name:48} {found.states:9,} states, {how}, {seconds:6.1f} s", flush=True)
    if found.problem:
        print(f"  {found.problem}")
        for number, step in enumerate(found.way, 1):
            print(f"  {number:3}. {step}")
