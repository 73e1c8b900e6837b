"""Faults like those of earlier versions, planted in the product: stories have to find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from allfold_agent.groups import agreement, rounds
from allfold_control.survival import unpack
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.reports import Install
from tests.core.survival.mutants import (
    ClaimsWhileFrozen,
    ForgetsWishesWhileGathering,
    Round,
    nothing,
)
from tests.simulator.store import Pipeline
from tests.simulator.story import Story, draw, stopped_leaders
from tests.simulator.trial import Change


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        how: in words.
        changes: of the product that make it.
        seed: of a story that finds it.
        draw: of the stories that are searched.
    """

    how: str
    changes: tuple[Change, ...]
    seed: int
    draw: Callable[[int], Story] = draw


class ObeysOldLeaders(AgentMachine):
    """Takes the decision of an earlier term's leader for that of the round that it reports to."""

    def is_frozen_for(self, install: Install) -> bool:
        is_old = install.term < self.term.number
        return super().is_frozen_for(install) or (self.frozen and not self.out and is_old)


REAL_RECEIVE = agreement.Agreement.receive


def hears_who_is_left_out(
    self: agreement.Agreement, node: str, kind: LinkMessageType, body: Mapping[str, Any]
) -> None:
    """A node takes decisions of one that its term leaves out.

    Either rule alone keeps them away: what a leader has decided that is still in the term is in its
    report, and counts as decided there, too.
    """
    if kind is LinkMessageType.INSTALL:
        self.install(unpack(Install, body))
    else:
        REAL_RECEIVE(self, node, kind, body)


async def watches_nothing(self: Pipeline, *_: str) -> None:
    """A replica writes what follows from what it has read, whoever has written since."""
    self._is_immediate = True
    await self._client.ask(lambda _: None)


FAULTS = {
    "lost wish": Planted(
        "a wish to join that comes while a round gathers reports is dropped",
        ((rounds, "LeaderMachine", ForgetsWishesWhileGathering),),
        0,
    ),
    "early report": Planted(
        "an op becomes held on a node that has reported, and waits for the decision",
        ((agreement, "AgentMachine", ClaimsWhileFrozen),),
        7,
    ),
    "stale leader": Planted(
        "the decision of an earlier term's leader is taken for that of the present one",
        (
            (agreement, "AgentMachine", ObeysOldLeaders),
            (agreement.Agreement, "receive", hears_who_is_left_out),
        ),
        11,
        stopped_leaders,
    ),
    "frozen claim": Planted(
        "a replica that was stopped writes what followed from what it had read before",
        ((Pipeline, "watch", watches_nothing),),
        10,
    ),
    "double outcome": Planted(
        "a round has an op run again that some node has handed out",
        ((Round, "_go_forward", nothing),),
        0,
    ),
}
