"""Invariants of a whole world: all along, and once nothing is to happen any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allfold_core.survival.records import Term
from tests.support.state_search import Violation

if TYPE_CHECKING:
    from tests.simulator.agent import Agent
    from tests.simulator.group import SimulatedGroup
    from tests.simulator.ranks import Rank
    from tests.simulator.world import World


def survivors(world: World) -> list[Rank]:
    """Return the ranks for which the promises hold."""
    ledger = world.ledger
    return [r for r in world.members() if r.agent is not None and ledger.survives(r, r.agent)]


def check_floors(world: World) -> None:
    """Check I7: every op that a node takes for final on all nodes is final on all of them."""
    ranks = survivors(world)
    for birth in {rank.group.birth for rank in ranks if rank.group is not None}:
        groups = {rank.group for rank in ranks if rank.group and rank.group.birth == birth}
        floor = max(group.agreement.machine.floor for group in groups)
        for rank in ranks:
            if rank.group in groups:
                _check_floor(rank, floor)


def _check_floor(rank: Rank, floor: int) -> None:
    assert rank.group is not None
    machine = rank.group.agreement.machine
    if rank.session in machine.dead or rank.session not in machine.epoch.sessions:
        return
    for seq in rank.open:
        entry = machine.ops.get(seq)
        is_known = entry is not None and not entry.is_final and rank.session in entry.calls
        if is_known and seq <= floor and machine.epoch.since_of(rank.session) <= seq:
            raise Violation(
                f"I7: op {seq} is taken for final, but not on node {rank.node}: {entry}"
            )


def unfinished(world: World) -> str:
    """Return what has yet to end, after the last fault (P5); "" if nothing."""
    ranks = survivors(world)
    if not ranks:
        return ""
    return _of_ranks(world, ranks) or _of_nodes(world, ranks) or _of_joiners(world, ranks)


def _of_joiners(world: World, ranks: list[Rank]) -> str:
    if not any(replica.process.lives for replica in world.replicas.values()):
        return ""  # the seats are given by the orchestrator
    most = world.setup.max_world
    taken = max(len(r.group.current.record.seats) for r in ranks if r.group is not None)
    for rank in world.ranks:
        waits = rank.process.lives and rank.group is None and not rank.has_left
        if waits and most is not None and taken < most:
            return f"I4: rank {rank.session} on node {rank.node} never joins"
    return ""


def _of_ranks(world: World, ranks: list[Rank]) -> str:
    for rank in ranks:
        assert rank.group is not None
        if rank.open and not _waits_for_others(rank.group):
            seq = min(rank.open)
            entry = rank.group.agreement.machine.ops.get(seq)
            return f"I4: op {seq} of rank {rank.session} on node {rank.node} never ends: {entry}"
    return ""


def _waits_for_others(group: SimulatedGroup) -> bool:
    machine = group.agreement.machine
    return machine.policy.waits_in_ops(machine.epoch)


def _of_nodes(world: World, ranks: list[Rank]) -> str:
    groups = {rank.node: rank.group for rank in ranks if rank.group is not None}
    machines = {node: group.agreement.machine for node, group in groups.items()}
    for node, machine in machines.items():
        if machine.frozen:
            return f"I4: node {node} stays frozen for {machine.term.number}.{machine.round}"
    terms: dict[str, Term] = {node: machine.term for node, machine in machines.items()}
    if len({(term.number, term.generation, term.voters) for term in terms.values()}) > 1:
        return f"I4: nodes keep different terms: {terms}"
    (term, *_) = terms.values()
    for node in term.voters:
        agent: Agent | None = world.agents.get(node)
        if agent is None or not agent.process.lives:
            return f"I4: node {node} is gone, and still has a vote"
    return ""
