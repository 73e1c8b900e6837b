"""Searches through all that can happen to a group's nodes: breadth-first, and by random walks."""

from __future__ import annotations

import argparse
import math
import sys
import time

from tests.core.survival.happenings import actions, follow
from tests.core.survival.scenario import FAITHFUL, Mutant, Scenario
from tests.core.survival.scenarios import DEEP, SCENARIOS
from tests.core.survival.world import World
from tests.support.state_search import Found, Game, explore_game, show, walk_game


def game_of(scenario: Scenario, mutant: Mutant = FAITHFUL) -> Game[World]:
    """Return a scenario as a game to be searched."""
    return Game(lambda: World(scenario, mutant), actions, follow)


def explore(
    scenario: Scenario, most: int, mutant: Mutant = FAITHFUL, seconds: float = math.inf
) -> Found:
    """Visit up to ``most`` states of a scenario, the nearest first."""
    return explore_game(game_of(scenario, mutant), most, seconds)


def walk(
    scenario: Scenario,
    most: int,
    seed: int,
    mutant: Mutant = FAITHFUL,
    seconds: float = math.inf,
) -> Found:
    """Take ``most`` random steps in a scenario."""
    return walk_game(game_of(scenario, mutant), most, seed, seconds)


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
        show(scenario.name, found, time.monotonic() - began)
        bad += bool(found.problem)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
