"""This node's part in what all must know: rounds that it leads, and closing signals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from allfold_control.survival import PartHeld, RoundBegun, pack
from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.instructions import Instructions
from allfold_core.survival.judge import judge_calls
from allfold_core.survival.leader_machine import Freeze, LeaderMachine
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import Epoch, Stamp, Term
from allfold_core.survival.reports import Doubt, Install, Reason, Report, Wishes
from allfold_core.topology import Layout

if TYPE_CHECKING:
    from allfold_agent.groups.agreement import Agreement

# The orchestrator tells all nodes of a term at once; one that has not reported by then may have
# no way to it.
_TEACH_SECONDS = 0.5


class ClosingSignals:
    """Sends this node's signals, and counts those of the others. With the group's lock held.

    Args:
        machine: of this node; told when the signals of all others are in.
        send: sends another node a message; it may be lost with the link, see :meth:`repeat`.
        follow: does what the machine says.

    Attributes:
        heard: by op and the stamp of its attempt, the nodes that hold their part.
    """

    def __init__(
        self,
        machine: AgentMachine,
        send: Callable[[str, LinkMessageType, dict[str, Any]], None],
        follow: Callable[[Instructions], None],
    ) -> None:
        self.heard: defaultdict[tuple[int, Stamp], set[str]] = defaultdict(set)
        self._machine = machine
        self._send = send
        self._follow = follow

    def announce(self, seq: int) -> None:
        """Tell the other nodes of an op's epoch that this one holds its part of the result."""
        machine = self._machine
        entry = machine.ops.get(seq)
        if entry is None:
            return  # the decision that let it be handed out has ended it on all nodes
        stamp = entry.stamp
        assert stamp is not None  # it has run
        for node in machine.epochs[stamp].nodes:
            if node != machine.node:
                self._send(node, LinkMessageType.HELD, pack(PartHeld(seq, stamp)))
        self._close_if_complete(seq, stamp)

    def repeat(self, node: str) -> None:
        """Send a node again what it may have missed, as the link to it was down."""
        for seq, stamp in self._machine.unclosed():
            self._send(node, LinkMessageType.HELD, pack(PartHeld(seq, stamp)))

    def take_signal(self, node: str, seq: int, stamp: Stamp) -> None:
        """Count that another node holds its part of an op's result, in the epoch of a stamp."""
        self.heard[seq, stamp].add(node)
        self._close_if_complete(seq, stamp)

    def forget(self, floor: int) -> None:
        """Forget all ops up to ``floor``, which are final on all nodes."""
        for key in [each for each in self.heard if each[0] <= floor]:
            del self.heard[key]

    def _close_if_complete(self, seq: int, stamp: Stamp) -> None:
        machine = self._machine
        epoch = machine.epochs.get(stamp)
        if epoch is not None and epoch.nodes - {machine.node} <= self.heard[seq, stamp]:
            self._follow(machine.closed(seq, stamp))


class QuorumCounts:
    """Counts, on the leader, the ranks that have called ops which need not wait for all ranks."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, int]] = {}
        self._waiting: set[int] = set()

    def count(self, node: str, doubt: Doubt) -> bool:
        """Take in how many ranks of a node have called; return True if the quorum is there now."""
        calls = self._calls.setdefault(doubt.seq, {})
        calls[node] = max(doubt.calls, calls.get(node, 0))
        if doubt.seq in self._waiting or sum(calls.values()) < doubt.quorum:
            return False
        self._waiting.add(doubt.seq)
        return True

    def waited(self, seq: int) -> None:
        """The others were given their time."""
        self._waiting.discard(seq)

    def forget(self, floor: int) -> None:
        """Forget all ops up to ``floor``, which are final on all nodes."""
        for seq in [each for each in self._calls if each <= floor]:
            del self._calls[seq]


class RoundLeader:
    """Leads the rounds of one term after the other, where this node is its leader.

    With the group's lock held, but for :attr:`waits_for`.

    Args:
        node: this one.
        epoch: the current one.
        send: sends another node a message; it may be lost with the link, see :meth:`repeat`.
        later: does something after so many seconds, with the group's lock held.
        voter: this node's part in the rounds.
        hindrances: what is known of why ranks are late.
    """

    def __init__(
        self,
        node: str,
        policy: GroupPolicy,
        term: Term,
        epoch: Epoch,
        send: Callable[[str, LinkMessageType, dict[str, Any]], None],
        later: Callable[[float, Callable[[], None]], None],
        voter: Agreement,
        hindrances: Hindrances,
    ) -> None:
        self._node = node
        self._policy = policy
        self._term = term
        self._send = send
        self._later = later
        self._voter = voter
        self._hindrances = hindrances
        self._machine = self._machine_of(term, epoch, gathering=False)
        self._decided: Install | None = None  # in the term's last round
        self._quorums = QuorumCounts()

    def _machine_of(self, term: Term, epoch: Epoch, *, gathering: bool) -> LeaderMachine | None:
        if term.leader != self._node:
            return None
        judge = partial(judge_calls, self._policy.group, self._hindrances)
        return LeaderMachine(self._policy, term, epoch, judge, gathering=gathering)

    @property
    def leads(self) -> bool:
        """True if this node is the leader of the term."""
        return self._machine is not None

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The nodes whose reports the round waits for. From any thread."""
        machine = self._machine
        return () if machine is None else machine.missing

    def begin_term(self, term: Term, epoch: Epoch) -> None:
        """Begin a new term, whose round 0 gathers reports.

        Args:
            epoch: the current one on this node.
        """
        self._term, self._decided = term, None
        self._quorums = QuorumCounts()
        self._machine = self._machine_of(term, epoch, gathering=True)
        if self._machine is not None:
            self._later(_TEACH_SECONDS, partial(self._teach_untaught, term))

    def _teach_untaught(self, term: Term) -> None:
        if self._term is term:
            for node in set(self._untaught()) - {self._node}:
                self._voter.teach(node)

    def _untaught(self) -> tuple[str, ...]:
        """The nodes that may not know the term: its round 0 lacks their reports."""
        machine = self._machine
        return () if machine is None or machine.round else machine.missing

    # What voters say

    def down(self, dead: Mapping[str, str]) -> None:
        """Sessions are over (DOWN)."""
        machine = self._machine
        if machine is not None:  # else whoever says so repeats it to the next leader
            self._act(machine, machine.down(dead))

    def doubt(self, node: str, doubt: Doubt) -> None:
        """Start a round that judges an op (DOUBT); of a quorum, as soon as it is time for it."""
        machine = self._machine
        if machine is None:
            return
        if doubt.reason is not Reason.QUORUM:
            self._act(machine, machine.doubt(doubt))
        elif self._quorums.count(node, doubt):
            self._later(doubt.waited, partial(self._begin_without_the_late, machine, doubt))

    def _begin_without_the_late(self, machine: LeaderMachine, doubt: Doubt) -> None:
        if self._machine is not machine:
            return  # the next leader is told of the calls, and waits as long
        self._quorums.waited(doubt.seq)
        # Even if as many have called as there are ranks: some of them may be lost.
        if self._voter.machine.is_open(doubt.seq):
            self._act(machine, machine.doubt(doubt))

    def release(self, floor: int) -> None:
        """Forget the calls of ops that are final on all nodes."""
        self._quorums.forget(floor)

    def wish(self, node: str, wishes: Wishes) -> None:
        """Take in the wishes of a node's ranks to join, to leave or to pass a boundary (WISHES)."""
        machine = self._machine
        if machine is not None:
            self._act(machine, machine.wish(node, wishes))

    def arrange(self, layout: Layout) -> None:
        """Start a round that puts the nodes into another order."""
        machine = self._machine
        if machine is not None:
            self._act(machine, machine.arrange(layout))

    def take_report(self, report: Report) -> None:
        """A voter has reported (FROZEN)."""
        machine, decided = self._machine, self._decided
        if machine is None:
            return
        named = (report.term.number, report.round)
        if decided is not None and named == (decided.term, decided.round):
            # its decision was lost with the link
            self._send(report.node, LinkMessageType.INSTALL, pack(decided))
            return
        self._act(machine, machine.report(report))

    def repeat(self, node: str) -> None:
        """Send a node again what it may have missed, as the link to it was down."""
        machine = self._machine
        if machine is None:
            return
        if node in self._untaught():
            self._voter.teach(node)
        elif node in machine.missing:
            self._send(node, LinkMessageType.FREEZE, _freeze_body(machine))
        if self._decided is not None:
            self._send(node, LinkMessageType.INSTALL, pack(self._decided))

    def _act(self, machine: LeaderMachine, made: Iterable[Freeze | Install]) -> None:
        for each in made:
            if isinstance(each, Freeze):
                self._tell_others(LinkMessageType.FREEZE, _freeze_body(machine))
                self._voter.asked_to_freeze(each.term, each.round, machine.doubts)
            else:
                # Kept and told before it is done here, which may begin the next round.
                self._decided = each
                self._tell_others(LinkMessageType.INSTALL, pack(each))
                self._voter.install(each)

    def _tell_others(self, kind: LinkMessageType, body: dict[str, Any]) -> None:
        for node in self._term.voters:
            if node != self._node:
                self._send(node, kind, body)


def _freeze_body(machine: LeaderMachine) -> dict[str, Any]:
    return pack(RoundBegun(machine.term.number, machine.round, (*machine.doubts,)))
