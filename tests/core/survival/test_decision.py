"""The decision on an op, against the rules of the protocol written down a second time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import pytest

from allfold_core.errors import PeerMissing, error_classes
from allfold_core.operations import Kind
from allfold_core.survival.decision import ProtocolViolation, decide
from allfold_core.survival.judge import packed
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import NO_EPOCH, Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Doubt,
    Fail,
    Forward,
    OpReport,
    OpState,
    Outcome,
    Reason,
    Report,
    Run,
)
from tests.core.survival.calls import call_of
from tests.support.policies import policy_with

NODES = ("a", "b", "c")
FIRST = Epoch(Stamp(0, 0, 0), 0, tuple(Seat(f"r{n}", NODES[n]) for n in range(3)))
SECOND = Epoch(Stamp(1, 0, 0), 1, FIRST.seats[:2], packed(error_classes()["AF301"]("lost c")))
SEQ = 4
SHARE = 0.08
"""Of all situations, those that are looked at: all of them take most of a minute."""
TOLD = Fail(packed(PeerMissing("told before")), 0)

# What a node may say of an op: nothing, called, called and begun in an epoch, and so on.
ABSENT, CALLED, BEGUN, HELD, HANDED, FAILED = range(6)
REPLICATED = {Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.BARRIER}
SHRINKING = {Kind.ALL_REDUCE, Kind.BARRIER, Kind.BROADCAST, Kind.REDUCE}
ROOTED = {Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER}


@dataclass(frozen=True)
class Situation:
    """The reports of a round on one op.

    Attributes:
        states: what each node says; ``c`` says nothing where it is lost.
        lost_node: ``c`` is no voter any more.
        dead: the number of a rank whose process is dead, on a node that lives; -1 for none.
        attempt: the epoch in which the op has been begun.
        installed: the epoch that is current on the nodes.
        views: of the ranks' calls.
    """

    kind: Kind
    policy: GroupPolicy
    root: int
    states: tuple[int, ...]
    lost_node: bool
    dead: int
    doubted: bool
    attempt: Epoch
    installed: Epoch
    views: tuple[int, ...]

    @property
    def voters(self) -> tuple[str, ...]:
        return NODES[:2] if self.lost_node else NODES

    def reports(self) -> dict[str, Report]:
        term = Term(2, 0, self.voters, (0,) * len(self.voters))
        return {node: self._report(n, node, term) for n, node in enumerate(self.voters)}

    def _report(self, n: int, node: str, term: Term) -> Report:
        dead = {f"r{n}": "died"} if n == self.dead else {}
        older = (FIRST,) if self.installed is SECOND else ()
        state = self.states[n]
        ops = {} if state == ABSENT else {SEQ: self._op(n, state)}
        return Report(node, term, 0, self.installed, older, dead, -1, {}, ops)

    def _op(self, n: int, state: int) -> OpReport:
        calls = {f"r{n}": call_of(self.kind, self.views[n], self.root)}
        if state == FAILED:
            return OpReport(OpState.FAILED, None, calls, TOLD.error, TOLD.ordinal)
        stamp = None if state == CALLED else self.attempt.stamp
        kept = {HELD: OpState.HELD, HANDED: OpState.HANDED}
        return OpReport(kept.get(state, OpState.OPEN), stamp, calls)


def situations(kind: Kind) -> Iterator[Situation]:
    """All that may be reported, as far as one run of the protocol can bring it about."""
    histories = [
        (FIRST, FIRST, False),
        (FIRST, FIRST, True),
        (FIRST, SECOND, True),
        (SECOND, SECOND, True),
    ]
    policies = [
        policy_with(on_loss=on_loss, min_world=least)
        for on_loss in ("shrink", "raise")
        for least in (1, 3)
    ]
    for attempt, installed, lost in histories:
        views = [(0, 0, 0)] if installed is FIRST else [(0, 0, 0), (1, 0, 0), (1, 1, 0)]
        for states in product(range(6), repeat=2 if lost else 3):
            for policy, dead, doubted, root, view in product(
                policies, (-1, 1), (False, True), (0, 1, 2) if kind in ROOTED else (0,), views
            ):
                yield Situation(
                    kind, policy, root, states, lost, dead, doubted, attempt, installed, view
                )


def expected(s: Situation) -> object:
    """Rules 10, 12 and 28, one after the other.

    Returns:
        What an outcome comes to, see :func:`described`; ``None`` where no run comes there.
    """
    said = dict(zip(s.voters, s.states, strict=True))
    holders = tuple(node for node, state in said.items() if state in (HELD, HANDED))
    begun = any(state in (BEGUN, HELD, HANDED) for state in said.values())
    lives = {seat.session for n, seat in enumerate(FIRST.seats) if n != s.dead}
    left = [x for x in s.installed.seats if x.session in lives and x.node in s.voters]
    is_new = len(left) < len(s.installed.seats)
    ordinal = s.installed.ordinal + is_new
    # a. An error that was told stays.
    if FAILED in said.values():
        return None if HANDED in said.values() else ("fail", "told before", 0)
    # b., c. A result goes forward if everybody can have it.
    members = [node for node in s.voters if any(x.node == node for x in s.attempt.seats)]
    if holders and (s.kind in REPLICATED or set(holders) >= set(members)):
        return ("forward", s.attempt.ordinal, holders)
    if HANDED in said.values():
        return None
    # 28. Calls of another view do not fit, unless nothing of them depends on the membership.
    epoch_ordinal = s.attempt.ordinal if begun else ordinal
    sessions = {x.session for x in (s.attempt.seats if begun else left)}
    views = {
        s.views[n]
        for n, node in enumerate(s.voters)
        if said[node] != ABSENT and f"r{n}" in sessions
    }
    flexible = s.policy.options.shrinks and s.kind in SHRINKING
    if views - {epoch_ordinal} and not flexible:
        return ("fail", "PeerLost", ordinal)
    # d. A verdict; where too few ranks are there for the op, that is why it is late.
    if s.doubted:
        too_few = len(s.attempt.seats if begun else left) < s.policy.options.min_world
        return ("fail", "BelowMinWorld" if too_few else "late", ordinal)
    root_is_left = s.kind not in ROOTED or any(x.session == f"r{s.root}" for x in left)
    enough = len(left) >= s.policy.options.min_world
    if begun and s.kind in ROOTED and f"r{s.root}" not in {x.session for x in s.attempt.seats}:
        return ("fail", "RootLost", ordinal)
    if begun:
        # e. It goes on if each input is here.
        dead_has_called = s.dead < 0 or s.states[s.dead] != ABSENT
        if set(members) == {x.node for x in s.attempt.seats} and dead_has_called:
            return ("run", s.attempt.ordinal)
        # f. Those who are left do it again.
        if flexible and root_is_left:
            return ("run", ordinal) if enough else ("fail", "BelowMinWorld", ordinal)
        named = {x.session for x in s.attempt.seats}
    else:
        # What nobody has begun begins in the new epoch.
        called = any(f"r{n}" in sessions and said[v] != ABSENT for n, v in enumerate(s.voters))
        if root_is_left or not called:
            return ("run", ordinal) if enough else ("fail", "BelowMinWorld", ordinal)
        named = {x.session for x in s.installed.seats}
        if f"r{s.root}" not in named:
            return ("fail", "RootLost", ordinal)
    # g. An error that says what stops it.
    if s.kind not in SHRINKING:
        return ("fail", "WorldChanged", ordinal)
    root_was_there = s.kind in ROOTED and f"r{s.root}" in named
    return ("fail", "RootLost" if root_was_there and not root_is_left else "PeerLost", ordinal)


def described(outcome: Outcome, epochs: Mapping[Stamp, Epoch]) -> object:
    """An outcome in the words of :func:`expected`."""
    if isinstance(outcome, Forward):
        return ("forward", epochs[outcome.stamp].ordinal, outcome.holders)
    if isinstance(outcome, Fail):
        error = json.loads(outcome.error)
        name = error_classes()[error["code"]].__name__
        is_late = name == "PeerMissing"
        return ("fail", error["message"] if is_late else name, outcome.ordinal)
    return ("run", epochs[outcome.stamp].ordinal)


def judge(_seq: int, _epoch: Epoch, _reports: object, doubt: Doubt | None) -> PeerMissing | None:
    return PeerMissing("late") if doubt else None


@pytest.mark.parametrize("kind", Kind)
def test_the_decision_on_an_op_is_what_the_rules_say(kind: Kind) -> None:
    rng = random.Random(kind.code)
    for each in situations(kind):
        if rng.random() > SHARE or set(each.states) == {ABSENT}:
            continue
        reports = each.reports()
        term = reports["a"].term
        doubts = {SEQ: Doubt(SEQ, Reason.DEADLINE, 1.0)} if each.doubted else {}
        try:
            install = decide(each.policy, term, 0, reports, doubts, judge)
        except ProtocolViolation:
            assert expected(each) is None, each
            continue
        epochs = {x.stamp: x for x in (FIRST, SECOND, *install.older, install.epoch)}
        assert described(install.outcomes[SEQ], epochs) == expected(each), each


def situation(kind: Kind = Kind.ALL_REDUCE, *, shrink: bool = True) -> Situation:
    """A rank of node b has died without calling what the others have begun."""
    policy = policy_with(on_loss="shrink" if shrink else "raise")
    states = (BEGUN, ABSENT, BEGUN)
    return Situation(kind, policy, 0, states, False, 1, False, FIRST, FIRST, (0, 0, 0))


def test_the_new_epoch_is_the_newest_installed_one_without_those_that_are_lost() -> None:
    s = situation()
    reports = s.reports()
    install = decide(s.policy, reports["a"].term, 6, reports, {}, judge)
    assert install.epoch.stamp == Stamp(2, 6, 0)
    assert install.epoch.ordinal == 1
    assert install.epoch.seats == (FIRST.seats[0], FIRST.seats[2])
    assert "rank 1 on node b, which died" in json.loads(install.epoch.change)["message"]
    assert install.dead == {"r1"}
    reports["a"] = replace(reports["a"], epoch=SECOND)
    reports["c"] = replace(reports["c"], dead={"r2": "died"})
    install = decide(s.policy, reports["a"].term, 6, reports, {}, judge)
    assert install.epoch.seats == SECOND.seats[:1]
    assert install.epoch.ordinal == 2


def test_a_round_in_which_nothing_was_lost_keeps_the_epoch() -> None:
    s = replace(situation(), dead=-1)
    reports = s.reports()
    assert decide(s.policy, reports["a"].term, 6, reports, {}, judge).epoch is FIRST


def test_a_group_ends_whose_nodes_were_all_still_joining_it() -> None:
    s = situation()
    joining = {
        node: replace(each, epoch=NO_EPOCH, older=(), ops={}) for node, each in s.reports().items()
    }
    install = decide(s.policy, joining["a"].term, 6, joining, {}, judge)
    assert (install.epoch.seats, install.epoch.ordinal, install.outcomes) == ((), 1, {})
    assert "lost all its ranks before others" in json.loads(install.epoch.change)["message"]


def test_a_node_that_the_term_leaves_out_is_lost_as_the_term_says() -> None:
    s = replace(situation(), states=(BEGUN, BEGUN), lost_node=True, dead=-1)
    reports = s.reports()
    term = replace(reports["a"].term, lost=(("c", "refuses connections"),))
    install = decide(s.policy, term, 0, reports, {}, judge)
    assert (
        "rank 2 on node c, which refuses connections" in json.loads(install.epoch.change)["message"]
    )


def test_what_is_final_for_any_node_is_not_decided() -> None:
    s = situation()
    reports = s.reports()
    for floor in (SEQ - 1, SEQ, SEQ + 1):
        reports["c"] = replace(reports["c"], floor=floor)
        install = decide(s.policy, reports["a"].term, 0, reports, {}, judge)
        assert install.floor == floor
        assert set(install.outcomes) == ({SEQ} if floor < SEQ else set())


def test_an_op_that_no_rank_has_called_can_fail_but_is_not_run() -> None:
    s = replace(situation(), dead=-1)
    reports = s.reports()

    def judge_doubted(
        seq: int, epoch: Epoch, reports: object, doubt: Doubt | None
    ) -> PeerMissing | None:
        cannot = doubt is not None and doubt.reason is Reason.FAILED
        return PeerMissing(f"op {seq} cannot be done") if cannot else None

    doubts = {
        SEQ + 1: Doubt(SEQ + 1, Reason.FAILED),
        SEQ + 2: Doubt(SEQ + 2, Reason.MISMATCH),
        SEQ - 9: Doubt(SEQ - 9, Reason.FAILED),  # it is over
    }
    reports["a"] = replace(reports["a"], floor=SEQ - 1)
    install = decide(s.policy, reports["a"].term, 1, reports, doubts, judge_doubted)
    assert set(install.outcomes) == {SEQ, SEQ + 1}
    assert isinstance(install.outcomes[SEQ + 1], Fail)


def test_an_error_that_was_told_comes_with_its_epoch_for_those_who_have_missed_that_round() -> None:
    s = replace(situation(), dead=-1, states=(FAILED, CALLED, CALLED), installed=SECOND)
    reports = s.reports()
    install = decide(s.policy, reports["a"].term, 6, reports, {}, judge)
    assert install.outcomes == {SEQ: TOLD}
    assert (install.epoch.ordinal, TOLD.ordinal) == (1, 0)
    assert install.older == (FIRST,)


def test_an_op_does_not_fail_as_an_attempt_of_it_did_that_is_over() -> None:
    s = replace(situation(), states=(BEGUN, BEGUN, BEGUN), dead=-1)
    reports = s.reports()
    failed = Doubt(SEQ, Reason.FAILED)

    def outcome(stamp: Stamp | None) -> Outcome:
        doubts = {SEQ: replace(failed, stamp=stamp)}
        return decide(s.policy, reports["a"].term, 1, reports, doubts, judge).outcomes[SEQ]

    assert outcome(SECOND.stamp) == Run(FIRST.stamp)
    assert isinstance(outcome(FIRST.stamp), Fail)
    assert isinstance(outcome(None), Fail)


def test_results_of_two_epochs_are_refused() -> None:
    s = replace(situation(), states=(HELD, HELD, HELD), dead=-1)
    reports = s.reports()
    call = {"r1": call_of(s.kind)}
    other = OpReport(OpState.HELD, SECOND.stamp, call)
    reports["b"] = replace(reports["b"], older=(SECOND,), ops={SEQ: other})
    with pytest.raises(ProtocolViolation, match="results of several epochs"):
        decide(s.policy, reports["a"].term, 0, reports, {}, judge)


def test_a_part_of_an_attempt_that_was_given_up_is_no_part_of_the_next_one() -> None:
    """Node a has not heard of the round before, whose decision b has installed and held."""
    s = replace(situation(Kind.REDUCE), states=(HELD, HELD), dead=-1, lost_node=True, root=1)
    reports = s.reports()
    again = OpReport(OpState.HELD, SECOND.stamp, {"r1": call_of(s.kind, root=1)})
    reports["b"] = replace(reports["b"], epoch=SECOND, ops={SEQ: again})
    install = decide(s.policy, reports["a"].term, 0, reports, {}, judge)
    assert install.outcomes == {SEQ: Run(SECOND.stamp)}
    handed = replace(again, state=OpState.HANDED)
    reports["b"] = replace(reports["b"], ops={SEQ: handed})
    with pytest.raises(ProtocolViolation, match="was handed out"):
        decide(s.policy, reports["a"].term, 0, reports, {}, judge)
