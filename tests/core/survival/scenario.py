"""Scenarios: the nodes, ranks and ops of a world, its faults, and rules that can be disabled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.leader_machine import LeaderMachine
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.reports import may_shrink

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
    """The nodes, ranks and ops of a world, and the number of faults of each kind.

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
        joiners: ranks that are not there at the opening, and ask for a seat later.
        max_world: of the group; ``None`` of one that takes in nobody.
        commits: ops before which every rank commits its state; with any, members change only there.
        leavers: ranks that want to leave at a commit.
        quorum: how many ranks have to call an op; ``None``: all.
        silent: ranks that call nothing, and live.
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
    joiners: tuple[int, ...] = ()
    max_world: int | None = None
    commits: tuple[int, ...] = ()
    leavers: tuple[int, ...] = ()
    quorum: int | None = None
    silent: tuple[int, ...] = ()
    orchestrator: bool = True
    orch_crashes: int = 0

    @cached_property
    def is_harmless(self) -> bool:
        """True if nothing may be lost or judged, and no call relies on members that change."""
        if self.crashes or self.rank_deaths or self.false or self.losses or self.verdicts:
            return False
        shaped = self.raises or not all(map(may_shrink, map(KINDS.__getitem__, self.kinds)))
        return not (self.max_world is not None and shaped)

    @cached_property
    def options(self) -> GroupOptions:
        """The options of the group."""
        return GroupOptions(
            30.0,
            on_loss="raise" if self.raises else "shrink",
            min_world=self.min_world,
            max_world=self.max_world,
            joins="commit" if self.commits else "any",
        )

    @cached_property
    def founders(self) -> tuple[int, ...]:
        """The ranks that open the group."""
        return tuple(rank for rank in range(len(self.rank_node)) if rank not in self.joiners)

    @cached_property
    def first_nodes(self) -> tuple[int, ...]:
        """The nodes that open the group."""
        with_founders = {self.rank_node[rank] for rank in self.founders}
        return tuple(n for n in range(self.nodes) if n in with_founders)

    @cached_property
    def later_calls(self) -> tuple[tuple[int, int], ...]:
        """(rank, op): the calls that are not made at once."""
        ops = range(len(self.kinds))
        more = [(rank, seq) for rank in self.joiners for seq in ops]
        if self.commits:
            more += [(rank, seq) for rank in self.founders for seq in ops[min(self.commits) :]]
        return tuple(dict.fromkeys((*self.late, *more)))


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
    grace: bool = True
    strangers_are_out: bool = True


FAITHFUL = Mutant()


def name(node: int) -> str:
    """The name of a node."""
    return f"n{node}"


def number(node: str) -> int:
    """The inverse of :func:`name`."""
    return int(node[1:])
