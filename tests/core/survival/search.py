"""Searches through all that can happen in a world: breadth-first, and by random walks."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from dataclasses import dataclass

from tests.core.survival.world import FAITHFUL, Mutant, Scenario, Violation, World, follow


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


def explore(scenario: Scenario, most: int, mutant: Mutant = FAITHFUL) -> Found:
    """Visit up to ``most`` states, the nearest first."""
    first = World(scenario, mutant)
    seen: dict[int, tuple[int, str] | None] = {hash(first.key()): None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        code, label, idle = hash(world.key()), "(the end)", True
        try:
            for label, optional, change in world.actions():
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
        if len(seen) > most:
            return Found(len(seen), False)
    return Found(len(seen), True)


def walk(scenario: Scenario, most: int, seed: int, mutant: Mutant = FAITHFUL) -> Found:
    """Take ``most`` random steps, in walks that go on until nothing is left to happen."""
    rng, steps = random.Random(seed), 0
    while steps < most:
        world, way = World(scenario, mutant), list[str]()
        eagerness = rng.choice((0.02, 0.05, 0.2))  # of faults
        while True:
            actions = list(world.actions())
            must = [each for each in actions if not each[1]]
            may = [each for each in actions if each[1]]
            try:
                if not must:
                    world.check_end()
                if not actions or (not must and rng.random() < 0.5):
                    break
                faulty = may and (not must or rng.random() < eagerness)
                label, _, change = rng.choice(may if faulty else must)
                way.append(label)
                world = follow(world, change)
                steps += 1
            except Violation as error:
                return Found(steps, False, str(error), tuple(way))
    return Found(steps, True)


TWO = (0, 1, 2, 1)  # four ranks on three nodes; the last one shares node 1
SCENARIOS = [
    Scenario("crash", crashes=1),
    Scenario("crash, raise", crashes=1, raises=True),
    Scenario("two crashes", crashes=2),
    Scenario("broadcast and all-reduce, two crashes", kinds=("bc", "ar"), crashes=2),
    Scenario("reduce-scatter, crash", kinds=("rs", "ar"), crashes=1),
    Scenario("reduce-scatter, two crashes", kinds=("rs", "rs"), crashes=2),
    Scenario("rank dies", rank_node=TWO, mortal=(3,), late=((3, 0), (3, 1)), rank_deaths=1),
    Scenario(
        "rank dies, no orchestrator",
        rank_node=TWO,
        mortal=(3,),
        late=((3, 0), (3, 1)),
        rank_deaths=1,
        orchestrator=False,
    ),
    Scenario(
        "rank dies, raise", rank_node=TWO, mortal=(3,), late=((3, 1),), rank_deaths=1, raises=True
    ),
    Scenario(
        "rank dies, crash", rank_node=TWO, mortal=(3,), late=((3, 1),), rank_deaths=1, crashes=1
    ),
    Scenario(
        "broadcast, rank dies, crash",
        rank_node=TWO,
        kinds=("bc", "rs"),
        mortal=(3,),
        late=((3, 1),),
        rank_deaths=1,
        crashes=1,
    ),
    Scenario(
        "the last rank of a node dies", mortal=(1,), late=((1, 0), (1, 1)), rank_deaths=1, crashes=1
    ),
    Scenario("false suspicion", false=1),
    Scenario("false suspicion and crash", false=1, crashes=1),
    Scenario("orchestrator crashes, crash", orch_crashes=1, crashes=1),
    Scenario("record lost, false suspicion, crash", false=1, crashes=1, losses=1),
    Scenario(
        "two nodes, record lost, false suspicion", nodes=2, rank_node=(0, 1), false=2, losses=1
    ),
    Scenario("verdict", rank_node=TWO, late=((3, 1),), verdicts=1),
    Scenario("verdict, crash", rank_node=TWO, late=((3, 1),), verdicts=1, crashes=1),
]
_DEEP_LATE = ((4, 0), (4, 1), (5, 1))
DEEP = [
    Scenario(
        f"deep: {name}",
        nodes=4,
        rank_node=ranks,
        kinds=kinds,
        raises=raises,
        mortal=(4, 5),
        late=_DEEP_LATE,
        crashes=2,
        rank_deaths=2,
        false=1,
        losses=1,
        verdicts=1,
        orch_crashes=1,
    )
    for name, ranks, kinds, raises in [
        ("4 nodes", (0, 1, 2, 3, 1, 2), ("ar", "ar"), False),
        ("4 nodes, broadcast and reduce-scatter", (0, 1, 2, 3, 1, 0), ("bc", "rs"), False),
        ("4 nodes, raise", (0, 1, 2, 3, 1, 2), ("ar", "bc"), True),
    ]
]


def main(names: list[str]) -> int:
    """Search every scenario, or those that are named, for some minutes; print what was found."""
    bad = 0
    for scenario in SCENARIOS:
        if names and scenario.name not in names:
            continue
        began = time.monotonic()
        found = explore(scenario, 1_000_000)
        _show(scenario, found, time.monotonic() - began)
        bad += bool(found.problem)
    for scenario in DEEP if not names else []:
        began = time.monotonic()
        found = walk(scenario, 100_000, seed=1)
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
