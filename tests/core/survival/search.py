"""Searches through all that can happen in a world: breadth-first, and by random walks."""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import deque
from dataclasses import dataclass

from tests.core.survival.happenings import actions, follow
from tests.core.survival.scenario import FAITHFUL, Mutant, Scenario, Violation
from tests.core.survival.scenarios import DEEP, SCENARIOS
from tests.core.survival.world import World


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


def explore(
    scenario: Scenario, most: int, mutant: Mutant = FAITHFUL, seconds: float = math.inf
) -> Found:
    """Visit up to ``most`` states, the nearest first."""
    until = time.monotonic() + seconds
    first = World(scenario, mutant)
    seen: dict[int, tuple[int, str] | None] = {hash(first.key()): None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        code, label, idle = hash(world.key()), "(the end)", True
        try:
            for label, optional, change in actions(world):
                idle = idle and optional
                after = follow(world, change)
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


def walk(
    scenario: Scenario,
    most: int,
    seed: int,
    mutant: Mutant = FAITHFUL,
    seconds: float = math.inf,
) -> Found:
    """Take ``most`` random steps, in walks that go on until nothing is left to happen."""
    until = time.monotonic() + seconds
    rng, steps = random.Random(seed), 0
    while steps < most and time.monotonic() < until:
        world, way = World(scenario, mutant), list[str]()
        eagerness = rng.choice((0.02, 0.05, 0.2))  # of faults
        while True:
            options = list(actions(world))
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
                world = follow(world, change)
                steps += 1
            except Violation as error:
                return Found(steps, False, str(error), tuple(way))
    return Found(steps, True)


def main(arguments: list[str]) -> int:
    """Search every scenario, or those that are named; print what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.core.survival.search")
    parser.add_argument("names", nargs="*", help="of scenarios; without any, all")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most, for each scenario")
    parser.add_argument("--seed", type=int, default=1, help="of the walks through deep scenarios")
    chosen = parser.parse_args(arguments)
    bad = 0
    for scenario in SCENARIOS + DEEP:
        if chosen.names and scenario.name not in chosen.names:
            continue
        began = time.monotonic()
        if scenario in DEEP:
            found = walk(scenario, sys.maxsize, chosen.seed, seconds=chosen.seconds)
        else:
            found = explore(scenario, sys.maxsize, seconds=chosen.seconds)
        _show(scenario, found, time.monotonic() - began)
        bad += bool(found.problem)
    return bad


def _show(scenario: Scenario, found: Found, seconds: float) -> None:
    how = "VIOLATION" if found.problem else "all" if found.whole else "cut off"
    print(f"{scenario.name:48} {found.states:9,} states, {how}, {seconds:6.1f} s", flush=True)
    if found.problem:
        print(f"  {found.problem}")
        for number, step in enumerate(found.way, 1):
            print(f"  {number:3}. {step}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
