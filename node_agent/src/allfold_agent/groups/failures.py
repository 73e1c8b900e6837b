"""The errors of ops and groups that a node finds out by itself."""

from __future__ import annotations

from collections.abc import Sequence

from allfold_core.errors import AllfoldError, PeerLost, ServiceError
from allfold_core.survival.losses import NODE_LOST
from allfold_core.verdict import name_ranks


def breakdown(group: str, node: str, seq: int, error: Exception) -> ServiceError:
    """The error of an op that a node cannot do its part of."""
    reason = error.message if isinstance(error, AllfoldError) else repr(error)
    return ServiceError(
        f"op {seq} of group '{group}' failed: node {node}: {reason}; the log of that node says "
        "more. The group is usable.",
        seq=seq,
        group=group,
    )


def unreachable(group: str, node: str, ranks: Sequence[int], reason: str) -> PeerLost:
    """The error of a node that cannot be reached any more.

    Every survivor finds this out by itself, so the message has only what is the same for all.
    """
    return PeerLost(
        f"node {node} of group '{group}' with {name_ranks(ranks)} cannot be reached any more",
        node=node,
        ranks=list(ranks),
        reason=reason,
    )


def indispensable(group: str, node: str) -> PeerLost:
    """The error of a node that has no rank any more, and is gone when something is to be decided.

    A decision needs the word of every node of the group.
    """
    lost = f"group '{group}' has lost node {node}, without which nothing is decided"
    return PeerLost(lost, node=node)


def how_lost(loss: AllfoldError, session: str) -> str:
    """How a rank was lost, of the error of a loss: a phrase to follow its name."""
    return str(loss.details.get("lost", {}).get(session, NODE_LOST))
