"""The worlds that are searched."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.core.survival.scenario import FAITHFUL, Mutant, Scenario
from tests.orchestrator.search.happenings import actions, follow
from tests.orchestrator.search.losses import Losses
from tests.orchestrator.search.world import StoreWorld
from tests.support.state_search import Game


@dataclass(frozen=True)
class StoreScenario:
    """A scenario of nodes and ranks, with faults of the nodes and of the store."""

    nodes: Scenario
    losses: Losses = field(default_factory=Losses)

    @property
    def name(self) -> str:
        return self.nodes.name

    def game(self, mutant: Mutant = FAITHFUL) -> Game[StoreWorld]:
        return Game(lambda: StoreWorld(self.nodes, self.losses, mutant), actions, follow)


def _of(
    name: str,
    nodes: int,
    losses: Losses,
    *,
    kinds: tuple[str, ...] = ("ar",),
    crashes: int = 0,
    false: int = 0,
) -> StoreScenario:
    ranks = tuple(range(nodes))
    scenario = Scenario(
        name, nodes=nodes, rank_node=ranks, kinds=kinds, crashes=crashes, false=false
    )
    return StoreScenario(scenario, losses)


ONE_BACK = Losses(back=1)
SCENARIOS = [
    _of("two nodes, false suspicions", 2, Losses(), false=2),
    _of("crash, links break", 3, Losses(relinks=1), crashes=1),
    _of("two nodes, the store goes back", 2, ONE_BACK, false=2),
    _of("two nodes, the store is lost", 2, Losses(empty=1), false=2),
    _of("two nodes, all begins anew", 2, Losses(restarts=1), false=2),
    _of("the store goes back, crash", 3, ONE_BACK, crashes=1, false=1),
    _of("the store is lost, crash", 3, Losses(empty=1), crashes=1, false=1),
    _of("all begins anew, crash", 3, Losses(restarts=1), crashes=1, false=1),
    _of("a node is started anew", 3, Losses(back=1, anew=1), crashes=1, false=1),
    _of("three nodes, the store goes back", 3, ONE_BACK, false=3),
    _of("the store goes back twice", 2, Losses(back=2), false=1),
]
JOINS = [
    StoreScenario(
        Scenario(
            f"joins: {name}",
            nodes=max(ranks) + 1,
            rank_node=ranks,
            joiners=joiners,
            kinds=("ar",),
            max_world=4,
            late=((0, 0),),
            crashes=crashes,
            false=false,
            mortal=mortal,
            rank_deaths=len(mortal),
        ),
        losses,
    )
    for name, ranks, joiners, losses, crashes, false, mortal in [
        ("a node, links break", (0, 1), (1,), Losses(relinks=1), 0, 0, ()),
        ("a rank that ends on the way", (0, 1), (1,), Losses(), 0, 0, (1,)),
        ("a rank of a node that is there", (0, 1, 1), (2,), ONE_BACK, 0, 1, ()),
        ("a third node, crash", (0, 1, 2), (2,), Losses(), 1, 0, ()),
        ("a third node, the store goes back", (0, 1, 2), (2,), ONE_BACK, 1, 0, ()),
        ("a third node, the store is lost", (0, 1, 2), (2,), Losses(empty=1), 1, 0, ()),
        ("a third node, all begins anew", (0, 1, 2), (2,), Losses(restarts=1), 0, 1, ()),
        ("a node comes back", (0, 1, 1), (2,), Losses(), 0, 1, ()),
        ("a node comes back, the store goes back", (0, 1, 2, 2), (3,), ONE_BACK, 0, 2, ()),
        ("two nodes, the store goes back", (0, 1, 2, 3), (2, 3), ONE_BACK, 1, 0, ()),
    ]
]
SCENARIOS += JOINS
DEEP = [
    _of("deep: the store goes back", 4, Losses(back=2, relinks=1, anew=1), crashes=2, false=2),
    _of("deep: all is lost", 4, Losses(empty=1, restarts=1, relinks=1), crashes=2, false=1),
    _of(
        "deep: everything, two ops",
        4,
        Losses(back=1, empty=1, restarts=1, relinks=1, anew=1),
        kinds=("ar", "rs"),
        crashes=2,
        false=2,
    ),
]
BY_NAME = {each.name: each for each in SCENARIOS + DEEP}
