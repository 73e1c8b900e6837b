"""The failure detector's rules, each switched off: the search has to find what it was there for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership import failure_detector as module
from allfold_orchestrator.membership.eviction_set import Link, smallest_eviction_set
from allfold_orchestrator.membership.evidence import Evidence
from allfold_orchestrator.membership.failure_detector import FailureDetector
from allfold_orchestrator.membership.suspects import Instruction, SilentLink, SuspectedLife
from tests.orchestrator.search.detector_happenings import game_of
from tests.orchestrator.search.trials import BY_NAME
from tests.support.state_search import Found, explore_game, walk_game


def nothing(*_: object) -> list[Instruction]:
    return []


def without_waiting(
    dead: Collection[Link], _: object, ranks: Mapping[str, int], leaders: Collection[str]
) -> frozenset[str]:
    return smallest_eviction_set(dead, ranks, leaders)


def no_links(*_: object) -> tuple[list[object], list[object]]:
    return [], []


def at_once(*_: object) -> float:
    return 0.0


def always(*_: object) -> bool:
    return True


def all_dropped(self: SuspectedLife) -> list[Life]:
    reporters, self.suspicions = [*self.suspicions], {}
    return reporters


def whether_reached_or_not(
    self: FailureDetector, life: Life, case: SuspectedLife
) -> list[Instruction]:
    return self.gone(life, "refuses") if case.is_refused_twice else []


def all_ends(links: Collection[Link], *_: object) -> frozenset[str]:
    return frozenset().union(*links)


@dataclass(frozen=True)
class Case:
    """A mutant of the detector, and the trial that catches it: breadth-first, or by a seed's walks.

    ``also`` is another change, where two rules have the same effect.
    """

    trial: str
    target: object
    name: str
    instead: object
    seed: int = 0
    also: tuple[object, str, object] | None = None

    def search(self, most: int) -> Found:
        """Search the trial with this mutant."""
        with ExitStack() as stack:
            for change in ((self.target, self.name, self.instead), self.also):
                if change is not None:
                    stack.enter_context(patch.object(*change))
            game = game_of(BY_NAME[self.trial])
            return walk_game(game, most, self.seed) if self.seed else explore_game(game, most)


CASES = {
    "signs of life count for nothing": Case(
        "a dead link", FailureDetector, "_sign_of_life", nothing
    ),
    "nobody is waited for": Case(
        "a dead link",
        FailureDetector,
        "_confirm",
        at_once,
        also=(SilentLink, "listen_again", nothing),
    ),
    "a refusal of one whom nobody has reached is proof": Case(
        "no way to the orchestrator, and a firewall",
        FailureDetector,
        "_proof",
        whether_reached_or_not,
    ),
    "silence is no suspicion": Case("a stop", FailureDetector, "_silent", nothing),
    "the orchestrator's own silence is enough": Case(
        "no way to the orchestrator for all", Evidence, "is_missed", always
    ),
    "both ends of a dead link go": Case("a dead link", module, "eviction_set_of_some", all_ends),
    "links in question are not waited for": Case(
        "two dead links of one node, and a mistake",
        module,
        "eviction_set_of_some",
        without_waiting,
        2,
    ),
    "life is an excuse for the stuck": Case("a stuck node", SuspectedLife, "clear", all_dropped),
    "nothing is taken back": Case(
        "a stuck node that recovers", FailureDetector, "withdrawn", nothing
    ),
    "no link is dead": Case("a dead link", FailureDetector, "_dead_links", no_links),
    "a replica that stands still blames others": Case(
        "the replica stands still", FailureDetector, "lagged", nothing
    ),
}
