"""The opening of the short lane in a group on several nodes. Pure.

All nodes have to do an op in the same lane. So it is a round that opens the short lane, from an op
on that no rank can have called before the decision is installed, if all nodes wish for it; every
other round closes it. A node that cannot go on in the lane withdraws its wish, which makes the
leader run a round.
"""

from __future__ import annotations

from collections.abc import Mapping

from allfold_core.survival.records import Epoch
from allfold_core.survival.reports import NO_LANE, NO_WISHES, Outcome, Report, Wishes

# How many ops ranks may call between the report of their node and the decision. A rank that calls
# more makes its node withdraw the wish.
_MARGIN = 8


def is_wished(epoch: Epoch, wishes: Mapping[str, Wishes]) -> bool:
    """Return True if all nodes that have ranks are ready for the lane."""
    return bool(epoch.nodes) and all(wishes.get(n, NO_WISHES).lane for n in epoch.nodes)


def first_in_lane(
    before: Epoch, epoch: Epoch, reports: Mapping[str, Report], outcomes: Mapping[int, Outcome]
) -> int:
    """Return the first op that goes by the lane after a round; :data:`NO_LANE` if none does.

    Args:
        before: the epoch before the round.
        epoch: the current epoch after it.
    """
    wishes = {node: report.wishes for node, report in reports.items()}
    if epoch.ordinal != before.ordinal or epoch.waiting or not is_wished(epoch, wishes):
        return NO_LANE
    called = (seq for report in reports.values() for seq in report.called.values())
    return max((-1, *called, *outcomes)) + 1 + _MARGIN
