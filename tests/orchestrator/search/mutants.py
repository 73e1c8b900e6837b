"""The orchestrator's rules, each switched off: the search has to find what it was there for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.instructions import Instructions
from allfold_core.survival.records import Seat, Term
from allfold_core.survival.term_record import Life, TermRecord
from allfold_orchestrator.membership import membership, reports, terms
from allfold_orchestrator.membership.group_state import (
    AgentRegisters,
    GroupState,
    Leave,
    NodesLost,
    Opening,
)
from allfold_orchestrator.membership.membership import step
from tests.core.survival.scenario import FAITHFUL, Mutant
from tests.orchestrator.search import world
from tests.orchestrator.search.scenarios import BY_NAME
from tests.orchestrator.search.world import AFTER, HOW, StoreWorld
from tests.support.state_search import Found, after_way, explore_game, walk_game


class TakesAnyGeneration(AgentMachine):
    def take_term(self, term: Term, _: int) -> Instructions:
        return super().take_term(term, self.generation)


class TakesTermsWhileItRegisters(AgentMachine):
    def registers(self) -> None:
        pass


def blind_write(self: StoreWorld, n: int) -> None:
    """A replica writes what follows from a state that it read long ago."""
    self.write(step(self.opened, NodesLost({self.life_of(n): HOW}, self.store))[0])


def never_shown(*_: object) -> bool:
    return False


def only_higher_generations(_: object, report: AgentRegisters) -> bool:
    return report.generation > report.store.generation


def as_it_is(record: TermRecord, *_: object) -> TermRecord:
    return record


def old_number(record: TermRecord, lost: Mapping[Life, str], *_: object) -> TermRecord | None:
    return REAL_EVICT(record, lost)


def whoever(*_: object, **__: object) -> bool:
    return True


def before_anybody_registers(*args: Any, generation: int, **named: Any) -> bool:
    return REAL_MAY_EVICT(*args, **named)


def trusted_at_once(*_: object) -> None:
    return None


def never_out(record: TermRecord | None, report: AgentRegisters) -> Any:
    return REAL_REGISTER(record, replace(report, is_out=False))


def the_record_stays(record: TermRecord, held: TermRecord) -> TermRecord:
    """Reports of other lines count for nothing."""
    followed = held.term.may_follow(record.term)
    return replace(held, recall=record.recall, generation=record.generation) if followed else record


def reports_are_ignored(record: TermRecord, _: TermRecord) -> TermRecord:
    return record


def as_it_was(_: GroupState, state: GroupState, __: Leave) -> GroupState:
    return state


def is_of_another(record: TermRecord, current: Opening) -> bool:
    return current.plan.opening != record.opening


def seats_as_they_are(record: TermRecord, _: AgentRegisters) -> tuple[Seat, ...]:
    return record.seats


REAL_EVICT, REAL_MAY_EVICT, REAL_REGISTER = terms.evict, terms.may_evict, terms.register


@dataclass(frozen=True)
class Case:
    """A mutant, and the scenario that catches it soonest.

    Attributes:
        changes: of modules and classes: what, the name in it, and what is there instead.
        seed: of walks; 0 for breadth-first.
        way: what happens first.
    """

    scenario: str
    changes: tuple[tuple[object, str, object], ...] = ()
    mutant: Mutant = FAITHFUL
    seed: int = 0
    way: tuple[str, ...] = ()

    def search(self, most: int) -> Found:
        """Search the scenario with this mutant."""
        game = BY_NAME[self.scenario].game(self.mutant)
        with ExitStack() as stack:
            for target, name, instead in self.changes:
                stack.enter_context(patch.object(target, name, instead))
            game = after_way(game, self.way)
            return walk_game(game, most, self.seed) if self.seed else explore_game(game, most)


def of_agent(scenario: str, agent: type[AgentMachine], seed: int = 0) -> Case:
    return Case(scenario, mutant=Mutant(agent=agent), seed=seed)


ANEW = "the orchestrator and its store begin anew"
NODE_2_MISSES_IT = (
    "node 2 is evicted by mistake",
    "the eviction of node 2 is finished",
    "node 0 learns term 1 from the orchestrator",
)
NODE_0_TEACHES = ("node 1 learns term 1 from node 0", "node 0 crashes")
OUT_OF_ONE = ("node 1 is evicted by mistake", "the eviction of node 1 is finished")
NODE_0_GOES_ON = (*OUT_OF_ONE, "node 0 learns term 1 from the orchestrator")
BACK = "the store goes back to write 0"
NODE_0_GOES = ("node 0 is evicted by mistake", "the eviction of node 0 is finished")
NODE_1_REGISTERS = ("node 1 says what it holds", "the orchestrator answers node 1")
# That a node which was left out does not come back as a continuing member (2) is not here: without
# it no walk has ended badly so far, with nodes that join either. There are no learners (21).
TWO_GO_BACK = "two nodes, the store goes back"
CASES = {
    "writes do not look at what is there": Case(
        "three nodes, the store goes back", ((StoreWorld, "clear_up", blind_write),)
    ),
    "no report shows a loss": Case(
        "all begins anew, crash",
        ((reports, "shows_loss", never_shown),),
        way=(*NODE_2_MISSES_IT, ANEW, *NODE_1_REGISTERS, *NODE_0_TEACHES),
    ),
    "a generation of the same number is the same one": Case(
        "all begins anew, crash",
        ((reports, "shows_loss", only_higher_generations),),
        way=(*NODE_2_MISSES_IT, ANEW, *NODE_1_REGISTERS, *NODE_0_TEACHES),
    ),
    "what has come back is trusted": Case(
        TWO_GO_BACK, ((terms, "recalled", as_it_is),), way=(*NODE_0_GOES_ON, BACK)
    ),
    "a term is of the record's generation": Case(
        "a node is started anew",
        ((reports, "evict", old_number),),
        way=(
            *OUT_OF_ONE,
            "node 2 learns term 1 from the orchestrator",
            "node 0 crashes",
            BACK,
            "node 0 is started anew",
            "the eviction of node 0 is finished",
        ),
    ),
    "old announcements count": of_agent("two nodes, the store is lost", TakesAnyGeneration),
    "terms come between report and answer": Case(
        "the store is lost, crash",
        mutant=Mutant(agent=TakesTermsWhileItRegisters),
        way=(
            *NODE_2_MISSES_IT,
            "the store loses all",
            "node 1 says what it holds",
            *NODE_0_TEACHES,
        ),
    ),
    "siblings do not meet": Case(
        "the store goes back, crash", ((terms, "_meet", the_record_stays),), seed=1
    ),
    "reports change nothing": Case(
        TWO_GO_BACK, ((terms, "_meet", reports_are_ignored),), way=(*NODE_0_GOES_ON, BACK)
    ),
    "silence evicts in recall": Case(
        TWO_GO_BACK,
        ((world, "may_evict", whoever),),
        way=(*NODE_0_GOES_ON, BACK, *NODE_1_REGISTERS, *NODE_0_GOES),
    ),
    "silence evicts before anybody has registered": Case(
        TWO_GO_BACK,
        ((world, "may_evict", before_anybody_registers),),
        way=(*NODE_0_GOES_ON, BACK, *NODE_0_GOES),
    ),
    "one registration is enough": Case(
        TWO_GO_BACK,
        ((terms, "_after", trusted_at_once),),
        way=(*NODE_0_GOES_ON, BACK, *NODE_1_REGISTERS, *NODE_0_GOES),
    ),
    "there is no grace": Case(
        "three nodes, the store goes back",
        ((StoreWorld, "now", AFTER),),
        way=(
            *OUT_OF_ONE,
            "node 2 is evicted by mistake",
            "the eviction of node 2 is finished",
            "node 0 learns term 2 from the orchestrator",
            BACK,
            *NODE_1_REGISTERS,
            "node 2 says what it holds",
            "the orchestrator answers node 2",
            *NODE_0_GOES,
        ),
    ),
    "a node whose rank ends on its way keeps its vote": Case(
        "joins: a rank that ends on the way", ((membership, "without_node_of", as_it_was),)
    ),
    "an old record knows best who has joined": Case(
        "joins: two nodes, the store goes back", ((reports, "_knows_more", is_of_another),), seed=1
    ),
    "nodes do not say which ranks they have": Case(
        "joins: a rank of a node that is there",
        ((terms, "_with_own_seats", seats_as_they_are),),
        seed=1,
    ),
    "to be out is no proof": Case(
        TWO_GO_BACK,
        ((reports, "register", never_out),),
        way=(*OUT_OF_ONE, "node 1 learns term 1 from the orchestrator", BACK),
    ),
}
