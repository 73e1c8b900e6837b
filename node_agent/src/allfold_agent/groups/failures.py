"""The errors of ops and groups that a node finds out by itself."""

from __future__ import annotations

from allfold_core.errors import AllfoldError, Evicted, ServiceError
from allfold_core.survival.losses import NODE_LOST


def breakdown(group: str, node: str, seq: int, error: Exception) -> ServiceError:
    """The error of an op that a node cannot do its part of."""
    reason = error.message if isinstance(error, AllfoldError) else repr(error)
    return ServiceError(
        f"op {seq} of group '{group}' failed: node {node}: {reason}; the log of that node says "
        "more. The group is usable.",
        seq=seq,
        group=group,
    )


def evicted(group: str, node: str, how: str) -> Evicted:
    """The error of every call on a node without which the group goes on.

    Args:
        how: a phrase to follow the name of the node.
    """
    return Evicted(f"group '{group}' goes on without node {node}, which {how}", node=node)


def how_lost(loss: AllfoldError, session: str) -> str:
    """The way in which a rank was lost, from the error of the loss; a phrase to follow its name."""
    return str(loss.details.get("lost", {}).get(session, NODE_LOST))
