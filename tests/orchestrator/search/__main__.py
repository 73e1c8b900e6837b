"""Search every scenario of the record and every trial of the detector, or those named."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from tests.orchestrator.search.detector_happenings import game_of
from tests.orchestrator.search.detector_world import Trial
from tests.orchestrator.search.scenarios import DEEP, SCENARIOS, StoreScenario
from tests.orchestrator.search.trials import LONG_TRIALS, TRIALS
from tests.support.state_search import Game, explore_game, show, walk_game

WALKED = {each.name for each in DEEP} | {each.name for each in LONG_TRIALS}


def main(arguments: list[str]) -> int:
    """Print what was found; return how many searches have found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.orchestrator.search")
    parser.add_argument("names", nargs="*", help="of scenarios and trials; without any, all")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most, for each")
    parser.add_argument("--seed", type=int, default=1, help="of the walks through deep ones")
    parser.add_argument("--walk", action="store_true", help="through the others, too")
    chosen = parser.parse_args(arguments)
    bad = 0
    every: list[StoreScenario | Trial] = [*SCENARIOS, *TRIALS, *DEEP, *LONG_TRIALS]
    for each in every:
        if chosen.names and each.name not in chosen.names:
            continue
        began = time.monotonic()
        game: Game[Any] = game_of(each) if isinstance(each, Trial) else each.game()
        if chosen.walk or each.name in WALKED:
            found = walk_game(game, sys.maxsize, chosen.seed, chosen.seconds)
        else:
            found = explore_game(game, sys.maxsize, chosen.seconds)
        show(each.name, found, time.monotonic() - began)
        bad += bool(found.problem)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
