"""The agreement of a group's nodes where their messages come in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allfold_agent.groups.agreement import Agreement
from allfold_agent.groups.events import EventQueue
from allfold_agent.groups.outcomes import OpTable
from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival.instructions import Instruction
from allfold_core.survival.records import NO_EPOCH, Epoch, Seat, Stamp, Term
from tests.support.policies import policy_with

POLICY = policy_with(on_loss="shrink", max_world=2)
FIRST = Epoch(Stamp(1, 0, 0), 0, (Seat("s0", "a"),), seated=1)
ALONE = Term(1, 0, ("a",), (1,))
BOTH = Term(2, 0, ("a", "b"), (1, 2))


class Effects:
    """Does nothing of what an agreement says.

    Attributes:
        resumed: how often frames that wait were to be looked at.
    """

    resumed = 0

    def carry_out(self, instruction: Instruction) -> None: ...

    def is_settled(self, seq: int) -> bool:
        return seq >= 0

    def deferred_calls(self) -> Mapping[str, int]:
        return {}

    def later(self, seconds: float, task: Callable[[], None]) -> None: ...

    def close_lane(self) -> None: ...

    def resume_edges(self) -> None:
        self.resumed += 1


class Node(Agreement):
    """The agreement on one node, and what it has sent."""

    def __init__(self, name: str, term: Term, epoch: Epoch) -> None:
        self.name = name
        self.sent: list[tuple[str, LinkMessageType, dict[str, Any]]] = []
        self.effects = Effects()
        super().__init__(
            name,
            POLICY,
            term,
            epoch,
            EventQueue(name, OpTable()),
            self.effects,
            lambda *each: self.sent.append(each),
            Hindrances(),
        )


def test_the_report_of_a_node_that_joins_counts_though_its_term_is_not_known_here_yet() -> None:
    leader, newcomer = Node("a", ALONE, FIRST), Node("b", BOTH, NO_EPOCH)
    newcomer.begin()
    ((to, kind, body),) = newcomer.sent
    assert (to, kind) == ("a", LinkMessageType.FROZEN)
    leader.receive("b", kind, body)
    assert leader.term == BOTH
    assert ("b", LinkMessageType.INSTALL) in [(to, kind) for to, kind, _ in leader.sent]
    assert not leader.take_term(BOTH, 0), "it is known by then"


def test_the_report_of_a_node_that_a_term_has_left_out_teaches_it_that_term() -> None:
    before, stranger = Node("a", BOTH, FIRST), Node("b", BOTH, NO_EPOCH)
    later = Term(3, 0, ("a",), (1,), lost=(("b", "was silent"),))
    assert before.take_term(later, 0)
    before.sent.clear()
    stranger.begin()
    before.receive("b", LinkMessageType.FROZEN, stranger.sent[0][2])
    assert before.term == later
    assert [(to, kind) for to, kind, _ in before.sent] == [("b", LinkMessageType.TERM)]


def deliver(source: Node, node: Node) -> None:
    """Have a node receive what another one has sent it."""
    messages = [each for each in source.sent if each[0] == node.name]
    source.sent = [each for each in source.sent if each[0] != node.name]
    for _, kind, body in messages:
        node.receive(source.name, kind, body)


def test_frames_that_wait_are_looked_at_after_a_round_though_the_epoch_stays() -> None:
    """They may be of an op that has got an outcome without them, and nobody here has called."""
    leader, other = Node("a", BOTH, FIRST), Node("b", BOTH, FIRST)
    for each in (leader, other):
        each.begin()
    leader.wish_for_lane(wished=True)
    other.wish_for_lane(wished=True)
    before = other.effects.resumed
    for _ in range(4):
        deliver(other, leader)
        deliver(leader, other)
    assert other.machine.epoch == FIRST
    assert other.effects.resumed > before


def test_a_rank_joins_though_its_leader_may_not_take_the_term_when_the_rank_asks() -> None:
    """The leader registers at that moment, and takes the term in when it has the answer."""
    leader, newcomer = Node("a", ALONE, FIRST), Node("b", BOTH, NO_EPOCH)
    leader.registers()
    newcomer.begin()
    newcomer.join("s1")
    deliver(newcomer, leader)
    assert leader.term == ALONE
    leader.registered(0)
    assert leader.take_term(BOTH, 0)
    for _ in range(3):
        deliver(leader, newcomer)
        deliver(newcomer, leader)
    assert [each.session for each in newcomer.machine.epoch.seats] == ["s0", "s1"]
    assert newcomer.machine.epoch == leader.machine.epoch


def test_a_rank_joins_though_the_next_leader_did_not_lead_yet_when_the_rank_asked() -> None:
    epoch = Epoch(Stamp(1, 0, 0), 0, (Seat("s0", "b"),), seated=1)
    before = Term(1, 0, ("a", "b", "c"), (1, 1, 1))
    after = Term(2, 0, ("b", "c"), (1, 1), lost=(("a", "was silent"),))
    leader, other = Node("b", before, epoch), Node("c", before, epoch)
    leader.registers()
    assert other.take_term(after, 0)
    other.join("s1")
    deliver(other, leader)
    leader.registered(0)
    assert leader.take_term(after, 0)
    for _ in range(3):
        deliver(leader, other)
        deliver(other, leader)
    assert [each.session for each in other.machine.epoch.seats] == ["s0", "s1"]
    assert other.machine.epoch == leader.machine.epoch
