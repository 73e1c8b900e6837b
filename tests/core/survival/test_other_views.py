"""A call binds those alone who are in the epoch of its op, and fits only where its view does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allfold_core.operations import Kind
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.decision import decide
from allfold_core.survival.instructions import HandOut, SendDoubt, SendReport, Start
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Call,
    Doubt,
    Fail,
    Install,
    OpReport,
    OpState,
    Reason,
    Report,
    Run,
)
from tests.core.survival.calls import call_of
from tests.support.policies import policy_with

TERM = Term(0, 0, ("n0", "n1"), (0, 0))
FIRST = Epoch(
    Stamp(0, 0, 0), 0, (Seat("r0", "n0"), Seat("r1", "n1"), Seat("r2", "n1"), Seat("r3", "n0"))
)
RAISE, SHRINK = policy_with(), policy_with(on_loss="shrink")


def never(*_: object) -> None:
    """The judge of ops whose calls fit together."""


def report(node: str, calls: dict[str, Call], dead: dict[str, str], **op: Any) -> Report:
    ops = {3: OpReport(op.get("state", OpState.OPEN), op.get("stamp"), calls)} if calls else {}
    return Report(node, TERM, 1, FIRST, (), dead, -1, {}, ops)


def decided(policy: GroupPolicy, *said: Report) -> Install:
    return decide(policy, TERM, 1, {each.node: each for each in said}, {}, never)


def test_what_a_lost_rank_had_called_in_advance_does_not_fail_the_op_of_the_others() -> None:
    lost = report("n1", {"r2": call_of(Kind.ALL_REDUCE)}, {"r2": "died"})
    install = decided(RAISE, report("n0", {}, {}), lost)
    assert install.outcomes == {3: Run(install.epoch.stamp)}


def test_what_a_lost_rank_had_called_in_advance_is_not_the_kind_of_the_op() -> None:
    lost = report("n1", {"r2": call_of(Kind.BROADCAST, root=2)}, {"r2": "died"})
    others = report("n0", {"r0": call_of(Kind.ALL_REDUCE)}, {})
    install = decided(SHRINK, lost, others)
    assert install.outcomes == {3: Run(install.epoch.stamp)}


def test_a_call_of_before_the_loss_fails_with_the_text_that_tells_of_it() -> None:
    calls = {"r0": call_of(Kind.ALL_REDUCE), "r3": call_of(Kind.ALL_REDUCE)}
    install = decided(RAISE, report("n0", calls, {}), report("n1", {}, {"r2": "died"}))
    assert install.outcomes == {3: Fail(install.epoch.change, 1)}
    told = json.loads(install.epoch.change)["message"]
    assert "rank 2 on node n1, which died; 3 of 4 ranks are left" in told


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL])
def test_a_call_that_knows_of_a_loss_does_not_fit_an_op_of_before(kind: Kind) -> None:
    """Its tensors are made for fewer ranks than the op, which has the lost one's input, has."""
    known = Epoch(Stamp(0, 1, 0), 1, FIRST.seats[:2] + FIRST.seats[3:], '{"message": "lost"}')
    begun = OpReport(OpState.OPEN, FIRST.stamp, {"r1": call_of(kind), "r2": call_of(kind)})
    here = OpReport(OpState.OPEN, FIRST.stamp, {"r0": call_of(kind, view=1)})
    said = {
        "n0": Report("n0", TERM, 2, known, (FIRST,), {}, -1, {}, {3: here}),
        "n1": Report("n1", TERM, 2, known, (FIRST,), {"r2": "died"}, -1, {}, {3: begun}),
    }
    assert decide(SHRINK, TERM, 2, said, {}, never).outcomes == {3: Fail(known.change, 1)}
    said["n0"].ops[3].calls["r0"] = call_of(kind)  # type: ignore[index]
    assert decide(SHRINK, TERM, 2, said, {}, never).outcomes == {3: Run(FIRST.stamp)}


def machine_after_a_loss(calls: dict[str, Call]) -> tuple[AgentMachine, list[object]]:
    """Node n1, whose rank 2 has died, with what an op does when the loss is decided."""
    machine = AgentMachine("n1", RAISE, TERM, FIRST)
    for session, call in calls.items():
        assert machine.call(0, session, call) == []
    machine.rank_ended("r2", "died")
    (sent,) = machine.freeze(0, 1)
    assert isinstance(sent, SendReport)
    other = Report("n0", TERM, 1, FIRST, (), {}, -1, {}, {})
    install = decide(RAISE, TERM, 1, {"n0": other, "n1": sent.report}, {}, never)
    return machine, list(machine.install(install))


def test_a_lost_rank_s_call_does_not_say_how_the_op_of_the_others_ends() -> None:
    """As a reduce-scatter it would wait for closing signals, which an all-reduce has not."""
    machine, _ = machine_after_a_loss({"r2": call_of(Kind.REDUCE_SCATTER)})
    assert Start(0, machine.epoch) in machine.call(0, "r1", call_of(Kind.ALL_REDUCE, view=1))
    assert HandOut(0, machine.epoch.stamp) in machine.completed(0, machine.epoch.stamp)


def test_a_call_of_before_a_loss_asks_for_a_round_and_starts_nothing() -> None:
    machine, _ = machine_after_a_loss({})
    asked = [SendDoubt(Doubt(0, Reason.STALE))]
    assert machine.call(0, "r1", call_of(Kind.ALL_REDUCE, view=0)) == asked
