"""What there is in a world, how much may go wrong in it, and the rules that can be switched off."""

from __future__ import annotations

from dataclasses import dataclass

from allfold_core.operations import Kind
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.leader_machine import LeaderMachine
from allfold_core.survival.policy import GroupPolicy

KINDS = {
    "ar": Kind.ALL_REDUCE,
    "ag": Kind.ALL_GATHER,
    "bc": Kind.BROADCAST,
    "re": Kind.REDUCE,
    "ga": Kind.GATHER,
    "rs": Kind.REDUCE_SCATTER,
}


@dataclass(frozen=True)
class Scenario:
    """What there is, and how much may go wrong.

    Attributes:
        rank_node: the node of each rank.
        kinds: of the ops; the root is rank 0.
        raises: the group has ``on_loss="raise"``.
        min_world: of the group.
        mortal: ranks that may die while their agent lives.
        late: (rank, op): calls that are still to come.
        slow: nodes learn each other's watermarks at any time, else as early as they can.
        crashes: of nodes.
        false: evictions of nodes that live.
        losses: of the orchestrator's record.
        verdicts: deadlines of ops that pass.
        again: messages that arrive a second time.
        arrangements: changes of the order in which nodes stand.
    """

    name: str
    nodes: int = 3
    rank_node: tuple[int, ...] = (0, 1, 2)
    kinds: tuple[str, ...] = ("ar", "ar")
    raises: bool = False
    min_world: int = 1
    mortal: tuple[int, ...] = ()
    late: tuple[tuple[int, int], ...] = ()
    slow: bool = False
    crashes: int = 0
    rank_deaths: int = 0
    false: int = 0
    losses: int = 0
    verdicts: int = 0
    again: int = 0
    arrangements: int = 0
    orchestrator: bool = True
    orch_crashes: int = 0

    @property
    def is_harmless(self) -> bool:
        """True if nothing may be lost or judged."""
        return not (self.crashes or self.rank_deaths or self.false or self.losses or self.verdicts)


@dataclass(frozen=True)
class Mutant:
    """One rule of the protocol switched off, by a change of the machines or of the orchestrator."""

    agent: type[AgentMachine] = AgentMachine
    leader: type[LeaderMachine] = LeaderMachine
    policy: type[GroupPolicy] = GroupPolicy
    compare_and_set: bool = True
    recalled_evicts_no_silent: bool = True
    generation: bool = True
    out_is_proof: bool = True
    siblings_meet: bool = True


FAITHFUL = Mutant()


def name(node: int) -> str:
    """The name of a node."""
    return f"n{node}"


def number(node: str) -> int:
    """The inverse of :func:`name`."""
    return int(node[1:])
