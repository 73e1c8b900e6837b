"""The ranks that an epoch has lost, as the sends and receives of this node see it."""

from __future__ import annotations

import logging

from allfold_agent.groups.outcomes import how_lost
from allfold_agent.p2p.engine import P2PEngine
from allfold_core.plan import Plan
from allfold_core.survival.judge import unpacked
from allfold_core.survival.records import Epoch
from allfold_core.verdict import LEFT, name_ranks

log = logging.getLogger(__name__)


class LostRanks:
    """Fails the messages that wait for ranks that are gone. With the lock of the ops held.

    Args:
        plan: with which the group was opened.
        p2p: the sends and receives.
    """

    def __init__(self, plan: Plan, p2p: P2PEngine) -> None:
        self._fail_any_source = not plan.options.shrinks
        self._p2p = p2p
        self._group = plan.group

    def note(self, before: Epoch, now: Epoch) -> None:
        """One epoch has followed another, which had other ranks."""
        change = unpacked(now.change)
        gone = [seat for seat in before.seats if seat.session not in now.sessions]
        ways = {seat.number: how_lost(change, seat.session) for seat in gone}
        all_left = all(how == LEFT for how in ways.values())
        if all_left:  # they have finished, and nobody has lost them
            counts = len(now.seats), len(before.seats)
            who = name_ranks(sorted(ways))
            text = "epoch %d: %s of group '%s' left in order; %d of %d are left"
            log.info(text, now.ordinal, who, self._group, *counts)
        else:
            log.warning("epoch %d: %s", now.ordinal, change.message)
        for number, how in ways.items():
            if how == LEFT:
                self._p2p.rank_left(number, how)
            else:
                self._p2p.seat_lost(number, change, fail_any_source=self._fail_any_source)
