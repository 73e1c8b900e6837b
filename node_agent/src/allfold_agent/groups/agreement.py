"""The agreement of a group's nodes on its ops and members, as this node takes part in it.

The rules are in ``allfold_core.survival``: an event of this node, or a message of another one, goes
into a machine; what the machine says is then done, in order. All of it happens under the group's
lock, so an event and what follows from it are one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from allfold_agent.groups.events import EventQueue
from allfold_agent.groups.rounds import ClosingSignals, RoundLeader
from allfold_control.survival import Announced, Dead, PartHeld, RoundBegun, pack, unpack
from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.instructions import (
    Instruction,
    Instructions,
    SendClosing,
    SendDoubt,
    SendDown,
    SendReport,
    SendWishes,
)
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import NO_EPOCH, Epoch, Stamp, Term
from allfold_core.survival.reports import NO_WISHES, Call, Doubt, Install, Reason, Report, Wishes
from allfold_core.topology import Layout

log = logging.getLogger(__name__)

_OF_THE_AGREEMENT = frozenset({SendClosing, SendReport, SendDown, SendDoubt, SendWishes})
# A mismatch must be known everywhere within a second: the latecomers get this long to be heard, so
# that the verdict names those who are in the minority.
_ARRIVAL_SECONDS = 0.6

Send = Callable[[str, LinkMessageType, dict[str, Any]], None]


class Effects(Protocol):
    """The group, which does what follows. Called with its lock held; none of these may wait."""

    def carry_out(self, instruction: Instruction) -> None:
        """Start, cancel, hand out, refuse ... an op, or take in an epoch."""

    def is_settled(self, seq: int) -> bool:
        """Return True if all local ranks have called an op, or it is over."""

    def deferred_calls(self) -> Mapping[str, int]:
        """By local session, the first op that waits for the GPU of its rank."""

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        """Do something after a while, with the group's lock held."""

    def close_lane(self) -> None:
        """Make all that the ranks do by themselves ops of the agreement: it has to report."""

    def resume_edges(self) -> None:
        """Look again at frames that wait for an op: it may have got an outcome without them."""


class Agreement:
    """One node's machines of one group, and the messages between them and those of other nodes.

    Args:
        node: this one.
        term: the first of the group.
        epoch: the first of the group.
        events: has what the machines say done in order.
        effects: does it.
        send: sends another node a message; it may be lost with the link, see :meth:`link_up`.
        hindrances: what is known of why ranks are late.

    Attributes:
        announced: the newest generation of the store that is known to have announced the term.
    """

    def __init__(
        self,
        node: str,
        policy: GroupPolicy,
        term: Term,
        epoch: Epoch,
        events: EventQueue,
        effects: Effects,
        send: Send,
        hindrances: Hindrances,
    ) -> None:
        self.machine = AgentMachine(node, policy, term, epoch)
        self.announced = term.generation
        self._node = node
        self._policy = policy
        self._events = events
        self._effects = effects
        self._send = send
        self._leader = RoundLeader(node, policy, term, epoch, send, effects.later, self, hindrances)
        self._closing = ClosingSignals(self.machine, send, self._follow)
        self._report: Report | None = None
        self._early: dict[str, Report] = {}  # by node, of a term that is not known here yet
        self._asked: tuple[int, int, tuple[Doubt, ...]] | None = None
        self._doubts: dict[int, Doubt] = {}
        self._judged: frozenset[int] = frozenset()  # by the round that was reported to last

    @property
    def term(self) -> Term:
        """The set of nodes that agree."""
        return self.machine.term

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The nodes whose reports the round waits for that this node leads. From any thread."""
        return self._leader.waits_for

    # Events of this node

    def call(self, seq: int, session: str, call: Call) -> None:
        """A local rank has called an op."""
        self._follow(self.machine.call(seq, session, call))
        if self._asked is not None:
            self._report_if_settled()

    def wish_for_lane(self, *, wished: bool) -> None:
        """This node is ready for the short lane, or cannot go on in it."""
        self._follow(self.machine.wish_for_lane(wished))

    def passed_by_ranks(self, seq: int) -> None:
        """All ops up to this one are done that were not heard of, by the local ranks themselves."""
        self._follow(self.machine.passed_by_ranks(seq))

    def abandon(self, seq: int, session: str) -> None:
        """A call of a local rank was refused: it will not call the op again."""
        self._follow(self.machine.abandon(seq, session))

    def completed(self, seq: int, stamp: Stamp, floor: int) -> None:
        """Every task of an attempt is done; all ops up to ``floor`` are final on all nodes."""
        self._follow(self.machine.completed(seq, stamp, floor))

    def fetched(self, seq: int, stamp: Stamp) -> None:
        """The result of an op has come from another node."""
        self._follow(self.machine.fetched(seq, stamp))

    def rank_ended(self, session: str, how: str, withdraws: bool) -> None:
        """A local rank is dead or has left; see :meth:`AgentMachine.rank_ended`."""
        self._follow(self.machine.rank_ended(session, how, withdraws=withdraws))

    def doubt(self, doubts: Iterable[Doubt]) -> None:
        """Ask the leader for a verdict on ops that cannot go on."""
        for each in doubts:
            # First: where this node leads, the verdict may come within the call, and drops it.
            self._doubts[each.seq] = each
            self._tell_leader(LinkMessageType.DOUBT, pack(each))

    def arrange(self, layout: Layout) -> None:
        """Put the nodes into another order; nothing happens unless this node is the leader."""
        self._leader.arrange(layout)

    def begin(self) -> None:
        """Report to the term that has let this node in: it joins a group that runs.

        Once: a report to a round that is over would keep the decision of the next one out.
        """
        if self.machine.epoch is not NO_EPOCH or self.machine.frozen:
            return
        self._leader.begin_term(self.term, self.machine.epoch)
        self._follow(self.machine.begin())

    def join(self, session: str) -> None:
        """A local rank is ready to join."""
        self._follow(self.machine.join(session))

    def wish_to_leave(self, session: str) -> None:
        """A local rank wants to leave at the next boundary."""
        self._follow(self.machine.wish_to_leave(session))

    def at_boundary(self, session: str, seq: int, boundary: int) -> None:
        """A local rank has come to a boundary, before this op."""
        self._follow(self.machine.at_boundary(session, seq, boundary))

    def registers(self) -> None:
        """The node says which term it holds; no message changes that until it has the answer."""
        self.machine.registers()

    def registered(self, generation: int) -> None:
        """The node has registered with a store: it takes no term that older ones announced."""
        self.machine.registered(generation)

    def take_term(self, term: Term, announced: int) -> bool:
        """A term was announced, by a store of this generation; return True if it is taken."""
        if self.machine.may_take(term, announced):
            # Before the machine freezes: its report has what the ranks have done by themselves.
            self._effects.close_lane()
        instructions = self.machine.take_term(term, announced)
        taken = self.machine.term is term
        if taken:
            self._begin_term(term)
        if self.machine.term == term and self.machine.generation == announced:
            self.announced = announced
        self._follow(instructions)
        early = self._early.values() if taken else ()
        for report in [each for each in early if each.term.number == term.number]:
            self._take_report(report)
        return taken

    def _begin_term(self, term: Term) -> None:
        self._asked, self._judged = None, frozenset()
        self._leader.begin_term(term, self.machine.epoch)
        self._early = {
            node: each for node, each in self._early.items() if each.term.number >= term.number
        }

    def teach(self, node: str) -> None:
        """Send a node the term, which it may not know."""
        told = pack(Announced(self.term, self.announced))
        self._send(node, LinkMessageType.TERM, told)

    def learn_floor(self, floor: int) -> None:
        """Every op up to this one is final on all nodes."""
        if floor > self.machine.floor:
            self._follow(self.machine.learn_floor(floor))

    def learn_watermark(self, node: str, watermark: int) -> None:
        """Another node has said how far it is."""
        self._follow(self.machine.learn_watermark(node, watermark))

    def release(self, floor: int) -> None:
        """Forget what was heard of ops that are final on all nodes."""
        if self._closing.heard:
            self._closing.forget(floor)
        if self._doubts:
            self._doubts = {seq: each for seq, each in self._doubts.items() if seq > floor}
        self._leader.release(floor)

    # Messages of other nodes

    def receive(self, node: str, kind: LinkMessageType, body: Mapping[str, Any]) -> None:
        """Take in a message; ``ValueError`` where it is none."""
        if kind is LinkMessageType.TERM:
            told = unpack(Announced, body)
            self.take_term(told.term, told.announced)
            return
        if kind is LinkMessageType.FROZEN and self._take_early(unpack(Report, body)):
            return
        if node not in self.term.voters:  # it has yet to hear that a term leaves it out
            self.teach(node)
            return
        match kind:
            case LinkMessageType.FREEZE:
                begun = unpack(RoundBegun, body)
                self.asked_to_freeze(begun.term, begun.round, begun.doubts)
            case LinkMessageType.FROZEN:
                self._leader.take_report(unpack(Report, body))
            case LinkMessageType.INSTALL:
                self.install(unpack(Install, body))
            case LinkMessageType.DOWN:
                self._leader.down(unpack(Dead, body).dead)
            case LinkMessageType.WISHES:
                self._leader.wish(node, unpack(Wishes, body))
            case LinkMessageType.DOUBT:
                self._leader.doubt(node, unpack(Doubt, body))
            case LinkMessageType.HELD:
                held = unpack(PartHeld, body)
                self._closing.take_signal(node, held.seq, held.stamp)
            case _:
                log.warning("group '%s': node %s sends %s", self._policy.group, node, kind.name)

    def link_up(self, node: str) -> None:
        """The link to a node is there (again): repeat what it may have missed."""
        if node == self.term.leader:
            if self.machine.frozen and self._report is not None:
                report = replace(self._report, announced=self.announced)
                self._send(node, LinkMessageType.FROZEN, pack(report))
            # Behind the report, from which a leader that is behind learns the term.
            self._tell_leader_again()
        self._leader.repeat(node)
        self._closing.repeat(node)

    # What follows

    def _follow(self, instructions: Instructions) -> None:
        """Do what a machine says, after what is being done already."""
        if instructions:
            self._events.follow(instructions, self._carry_out)

    def _carry_out(self, each: Instruction) -> None:
        if type(each) not in _OF_THE_AGREEMENT:
            self._effects.carry_out(each)
            return
        match each:
            case SendClosing(seq):
                self._closing.announce(seq)
            case SendReport(report):
                self._send_report(report)
            case SendDown(dead):
                self._tell_leader(LinkMessageType.DOWN, pack(Dead(dict(dead))))
            case SendDoubt(doubt):
                self.doubt([doubt])
            case SendWishes(wishes):
                self._tell_leader(LinkMessageType.WISHES, pack(wishes))

    def _tell_leader(self, kind: LinkMessageType, body: dict[str, Any]) -> None:
        if self._leader.leads:
            self.receive(self._node, kind, body)
        else:
            self._send(self.term.leader, kind, body)

    # Rounds, as a voter

    def asked_to_freeze(self, term: int, number: int, doubts: tuple[Doubt, ...]) -> None:
        """Report, at once or when those had time to call whom a verdict will name."""
        if self.machine.may_freeze(term, number):
            # Before the report, as in take_term.
            self._effects.close_lane()
        self._asked = (term, number, doubts)
        if not self._report_if_settled():
            self._effects.later(_ARRIVAL_SECONDS, lambda: self._report_for(number))

    def _report_if_settled(self) -> bool:
        assert self._asked is not None
        _, number, doubts = self._asked
        odd = (each.seq for each in doubts if each.reason is Reason.MISMATCH)
        if not all(map(self._effects.is_settled, odd)):
            return False
        self._report_for(number)
        return True

    def _report_for(self, number: int) -> None:
        if self._asked is None or self._asked[1] != number:
            return  # it has reported
        (term, _, doubts), self._asked = self._asked, None
        self._judged = frozenset(each.seq for each in doubts)
        self._follow(self.machine.freeze(term, number))

    def _send_report(self, report: Report) -> None:
        deferred = dict(self._effects.deferred_calls())
        report = replace(report, deferred=deferred, announced=self.announced)
        self._report = report
        if self._leader.leads:
            self._leader.take_report(report)
        else:
            self._send(self.term.leader, LinkMessageType.FROZEN, pack(report))

    def install(self, install: Install) -> None:
        """Do what was decided, if this node has reported to that very round."""
        if not self.machine.is_frozen_for(install):
            return
        log.debug("group '%s': round %d is installed", self._policy.group, install.round)
        self._follow(self.machine.install(install))
        self._effects.resume_edges()
        self._doubts = {
            seq: each
            for seq, each in self._doubts.items()
            # A leader that comes next may have to begin the op without the late ranks once more.
            if (seq not in self._judged or each.reason is Reason.QUORUM)
            and self.machine.is_open(seq)
        }
        if not install.round:
            self._tell_leader_again()

    def _tell_leader_again(self) -> None:
        """Repeat what the leader may not have heard, beside the report.

        The link to it was down; or it was told before it knew that it leads, or that this node is
        in its term, and then it drops all but the report.
        """
        if gone := self._gone():
            self._tell_leader(LinkMessageType.DOWN, pack(Dead(gone)))
        wishes = self.machine.wishes
        if wishes != NO_WISHES or self.machine.has_wished:  # also that it wishes no more
            self._tell_leader(LinkMessageType.WISHES, pack(wishes))
        self.doubt(list(self._doubts.values()))

    def _gone(self) -> dict[str, str]:
        """The local ranks that are over and still in the epoch."""
        machine = self.machine
        return {s: how for s, how in machine.dead.items() if s in machine.epoch.sessions}

    def _take_report(self, report: Report) -> None:
        if not self._take_early(report):
            self._leader.take_report(report)

    def _take_early(self, report: Report) -> bool:
        """Keep a report whose node has heard of its term earlier, and take that; else return False.

        That node may be one that joins: its report may well overtake the term that lets it in.
        """
        if report.term.number <= self.term.number:
            return False
        self._early[report.node] = report
        self.take_term(report.term, report.announced)
        return True
