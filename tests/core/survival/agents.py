"""One node of two before its part in the agreement."""

from __future__ import annotations

from allfold_core.operations import Kind
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.instructions import (
    Instruction,
    SendReport,
)
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Install,
    Outcome,
    Report,
)
from tests.core.survival.calls import call_of
from tests.support.policies import policy_with

TERM = Term(0, 0, ("a", "b"), (0, 0))
EPOCH = Epoch(Stamp(0, 0, 0), 0, (Seat("r0", "a"), Seat("r1", "b"), Seat("r2", "a")))
REDUCED = Epoch(Stamp(0, 1, 0), 1, EPOCH.seats[:2], '{"code": "AF301", "message": "lost r2"}')
ALONE = Epoch(Stamp(0, 1, 0), 1, (EPOCH.seats[1],), REDUCED.change)
SUM, PARTS = call_of(Kind.ALL_REDUCE), call_of(Kind.REDUCE_SCATTER)


def machine(node: str = "b", *, min_world: int = 1) -> AgentMachine:
    """A node of two; ``b`` has one rank, ``a`` has two."""
    return AgentMachine(node, policy_with(on_loss="shrink", min_world=min_world), TERM, EPOCH)


def report(done: list[Instruction]) -> Report:
    (sent,) = done
    assert isinstance(sent, SendReport)
    return sent.report


def decided(
    outcomes: dict[int, Outcome], epoch: Epoch = EPOCH, number: int = 1, floor: int = -1
) -> Install:
    older = (EPOCH,) if epoch is not EPOCH else ()
    return Install(0, number, epoch, older, floor, outcomes)
