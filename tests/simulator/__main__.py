"""Tells stories, and shows the first that goes wrong, as short as it can be.

python -m tests.simulator --seconds 3600
python -m tests.simulator --seed 1234 --story
python -m tests.simulator --leaders --first 1000 --stories 200
python -m tests.simulator --quorum --first 0 --stories 200
python -m tests.simulator --fault "lost wish" --seconds 60
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import takewhile

from tests.simulator.planted import FAULTS
from tests.simulator.shrink import kept, shortest
from tests.simulator.story import Story, draw, quorums, stopped_leaders
from tests.simulator.trial import HASHES, Change, Told, is_repeatable, tell, tell_all


def main() -> int:
    """Run the command; return its exit status."""
    if not is_repeatable():
        os.environ["PYTHONHASHSEED"] = HASHES
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]])
    given = _parser().parse_args()
    planted = FAULTS[given.fault] if given.fault else None
    changes = planted.changes if planted else ()
    given.leaders |= planted is not None and planted.draw is stopped_leaders
    stories = stopped_leaders if given.leaders else quorums if given.quorum else draw
    if given.seed is not None:
        story = stories(given.seed)
        if given.keep is not None:
            story = story.only(tuple(map(int, filter(None, given.keep.split(",")))))
        return _show(tell(story, changes), whole=given.story)
    return _many(given, changes, stories)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="tell this one story")
    parser.add_argument("--story", action="store_true", help="show everything that happens in it")
    parser.add_argument("--keep", help="the numbers of the events to keep, with commas")
    parser.add_argument("--seeds", type=int, nargs="+", help="tell these, until one goes wrong")
    parser.add_argument("--first", type=int, default=0, help="the number of the first story")
    parser.add_argument("--stories", type=int, default=10**9, help="tell so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for so long")
    parser.add_argument("--leaders", action="store_true", help="stories of stopped leaders")
    parser.add_argument("--quorum", action="store_true", help="stories of ops that wait for some")
    parser.add_argument("--fault", choices=FAULTS, help="plant a fault")
    return parser


def _many(
    given: argparse.Namespace, changes: tuple[Change, ...], stories_of: Callable[[int], Story]
) -> int:
    begun, used = time.monotonic(), time.process_time()
    until = begun + given.seconds
    numbers = given.seeds or range(given.first, given.first + given.stories)
    seeds = takewhile(lambda _: time.monotonic() < until, numbers)
    kills = stories = 0
    for told in tell_all(seeds, changes, stories_of):
        kills += told.kills
        stories += 1
        if told.problem:
            print(f"story {told.story.seed}: {told.problem}", flush=True)
            print("it is made shorter ...", flush=True)
            short = shortest(told, changes)
            _show(short, whole=True)
            fault = " --leaders" if given.leaders else " --quorum" if given.quorum else ""
            fault += f' --fault "{given.fault}"' if given.fault else ""
            print(
                f"\nagain: python -m tests.simulator --seed {told.story.seed} "
                f"--keep {kept(short, told.story) or ','} --story{fault}"
            )
            return 1
    seconds = time.process_time() - used
    print(f"{stories} stories, {kills} kills, {60 * kills / seconds:.0f} a minute: nothing wrong")
    return 0


def _show(told: Told, *, whole: bool) -> int:
    if whole:
        print(f"story {told.story.seed}: {told.story.setup}")
        print("\n".join(told.log))
    facts = f"{told.kills} kills, {told.steps} steps, {told.outcomes} outcomes"
    print(f"{facts}, {told.seconds:.1f} s of virtual time")
    print(told.problem or "nothing wrong")
    return bool(told.problem)


if __name__ == "__main__":
    raise SystemExit(main())
