"""The record of a simulation: decisions, starts and outcomes; a contradiction is a violation."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from allfold_core.plan import Plan
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival import records
from allfold_core.survival.instructions import Start
from tests.core.survival.invariants import check_hand_out, check_run, note_seats
from tests.core.survival.scenario import number
from tests.support.state_search import Violation

if TYPE_CHECKING:
    from tests.simulator.agent import Agent
    from tests.simulator.group import SimulatedGroup
    from tests.simulator.ranks import Rank
    from tests.simulator.world import World

Outcome = tuple[str, Any, int]
Life = tuple[str, int]
"""A node, and the number of the term that has let it in."""
Opening = tuple[int, int]
"""The number of a group's opening, and the generation of the store that has opened it."""


TROUBLE_SECONDS = 15.0
"""So long after a fault of its own, or of its links, a node may be left out for it."""

Op = tuple[str, int]
"""The birth of the group, and the number of the op."""


class Ledger:
    """Everything that invariants are about.

    Attributes:
        messages: how many were sent between agents, by their kind.
        epochs: those that nodes have known, by birth of the group and stamp.
    """

    def __init__(self, world: World) -> None:
        self.messages: Counter[LinkMessageType] = Counter()
        self.outcomes = 0
        self.epochs: dict[tuple[str, records.Stamp], records.Epoch] = {}
        self._births: dict[int, str] = {}
        self._world = world
        self._told: defaultdict[Op, dict[str, tuple[Rank, Agent, Outcome]]] = defaultdict(dict)
        # In the order of writes.
        self._decided: dict[tuple[Opening, int, frozenset[Life]], None] = {}

    def check_quiet(self) -> None:
        """Check P3: as long as nothing is lost, ops need no message but closing signals.

        Unless they need not wait for all ranks: then rounds decide for whom they do.
        """
        if self._world.setup.quorum:
            return
        if more := self.messages.keys() - {LinkMessageType.HELD}:
            raise Violation(f"P3: agents send each other {more}, although nothing is lost")

    # Terms

    def written(self, before: Mapping[str, str], fields: Mapping[str, str]) -> None:
        """Fields of a record are written into the store: a term may have been decided."""
        if "term" in fields:
            record = json.loads(fields["term"])
            term = record["term"]
            lives = frozenset(zip(term["voters"], term["joined"], strict=True))
            opening = record["epoch"], record["plan"]["generation"]
            self._decided.setdefault((opening, term["number"], lives))
            if "term" in before:
                self._check_evictions(json.loads(before["term"]), record)

    def _check_evictions(self, before: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Check that no node is left out that has done nothing wrong, and has a rank."""
        if before["generation"] != record["generation"] or before["epoch"] != record["epoch"]:
            return
        for node, voter in before["voters"].items():
            agent, is_left_out = self._world.agents[node], node not in record["voters"]
            is_same = agent.incarnation == voter["incarnation"] and agent.process.runs
            is_same = is_same and not agent.says_goodbye
            calm = self._world.loop.time() - self._world.troubled.get(node, 0.0)
            if is_left_out and is_same and calm > TROUBLE_SECONDS and self._has_members(agent):
                raise Violation(f"node {node} is left out, although it has done nothing wrong")

    def _has_members(self, agent: Agent) -> bool:
        """Return True if an agent has a rank that is in the group, as all nodes know."""
        return any(
            rank.is_member
            and rank.group is not None
            and not rank.wants_to_leave
            and rank.session in rank.group.current.record.sessions
            for rank in self._world.ranks_on(agent)
        )

    def is_excluded(self, opening: Opening, life: Life) -> bool:
        """Return True if a term was decided that leaves a life of a node out of a group.

        It was so after the life came: a term that the store has lost may have had the same number.
        """
        terms = [(made, lives) for each, made, lives in self._decided if each == opening]
        since = next((at for at, (_, lives) in enumerate(terms) if life in lives), 0)
        return any(made >= life[1] and life not in lives for made, lives in terms[since:])

    def survives(self, rank: Rank, agent: Agent) -> bool:
        """Return True if the promises hold for a rank."""
        group = rank.group
        if not (rank.process.lives and agent.process.lives) or group is None:
            return False
        if group.evicted is not None or group.agreement.machine.out:
            return False
        joined = dict(zip(group.agreement.term.voters, group.agreement.term.joined, strict=True))
        life = (agent.node, joined.get(agent.node, -1))
        opening = group.opening, group.plan.generation
        return not self.is_excluded(opening, life)

    # Ops

    def started(self, group: SimulatedGroup, start: Start) -> None:
        """An op is begun on a node."""
        check_run(group.agreement.machine, start)
        if len(start.epoch.seats) < self._world.setup.min_world:
            raise Violation(f"op {start.seq} is run by fewer ranks than min_world")
        told = self._told[group.birth, start.seq]
        for session in sorted(start.epoch.sessions_on(group.node)):
            if session in told:
                raise Violation(
                    f"I5: op {start.seq} is run again on node {group.node}, though rank {session} "
                    f"was told {told[session][2]}"
                )

    def told(self, agent: Agent, rank: Rank, seq: int, outcome: Outcome) -> None:
        """A rank is told what has become of its call."""
        assert rank.group is not None
        op = (rank.group.birth, seq)
        before = self._told[op].get(rank.session)
        if before is not None and before[2] != outcome:
            raise Violation(
                f"I5: rank {rank.session} was told {before[2]} of op {seq}, and now {outcome}"
            )
        if outcome[1] == "evicted":
            return
        self.outcomes += 1
        if outcome[0] == "result":
            check_hand_out(number(agent.node), seq, self.epochs[rank.group.birth, outcome[1]])
        self._compare(agent, rank, op, outcome)
        self._told[op][rank.session] = (rank, agent, outcome)

    def _compare(self, agent: Agent, rank: Rank, op: Op, outcome: Outcome) -> None:
        for session, (other, its_agent, its) in self._told[op].items():
            if its == outcome or not self.survives(rank, agent):
                continue
            if self.survives(other, its_agent):
                raise Violation(
                    f"I1: op {op[1]} is {outcome} for rank {rank.session} on {agent.node}, and "
                    f"{its} for rank {session} on {other.node}"
                )

    def overdue(self, group: SimulatedGroup, seq: int, waiting: Collection[str]) -> None:
        """Check that an op meets its deadline only while faults last, or soon after the last one.

        One deadline is enough to recover from all faults. Where ranks are too few, ops wait for
        others to join, and these need not come.
        """
        machine = group.agreement.machine
        calm = self._world.loop.time() - self._world.calm_since
        if calm < self._world.setup.timeout or machine.policy.waits_in_ops(machine.epoch):
            return
        for session in sorted(waiting):
            rank = group.ranks.get(session)
            if rank is not None and rank.agent is not None and self.survives(rank, rank.agent):
                raise Violation(
                    f"I4: op {seq} of rank {session} on node {group.node} meets its deadline, "
                    f"{calm:.1f} s after the last fault: {machine.ops.get(seq)}"
                )

    def dropped(self, group: SimulatedGroup, seq: int, waiting: list[str]) -> None:
        """An op was given up on a node because no rank there has a part in it."""
        for session in waiting:
            rank = group.ranks.get(session)
            if rank is not None and rank.is_member and session not in group.agreement.machine.dead:
                epoch = group.agreement.machine.epoch
                if session in epoch.sessions and epoch.since_of(session) <= seq:
                    raise Violation(f"P5: rank {session} waits for op {seq}, which was dropped")

    def birth_of(self, plan: Plan) -> str:
        """Return the birth of the group that a node has opened or joined."""
        if plan.sessions:
            self._births[plan.opening] = plan.sessions[0]
        return self._births.get(plan.opening, "")

    def known(self, group: SimulatedGroup, epoch: records.Epoch) -> None:
        """A node gets to know an epoch."""
        before = self.epochs.setdefault((group.birth, epoch.stamp), epoch)
        if before != epoch and epoch is not records.NO_EPOCH:
            raise Violation(f"epoch {epoch.stamp} is {before} on one node, and {epoch} on another")

    def installed(self, group: SimulatedGroup, epoch: records.Epoch) -> None:
        """A node has another epoch."""
        if group.current.record.stamp > epoch.stamp:
            raise Violation(f"I8: node {group.node} goes back to epoch {epoch.stamp}")
        note_seats(group, number(group.node), epoch)
