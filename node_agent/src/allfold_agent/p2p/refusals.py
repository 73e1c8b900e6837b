"""The errors of point-to-point messages that are not delivered."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from allfold_agent.p2p.messages import PendingCall
from allfold_core.errors import MismatchError, PeerLost, PeerMissing
from allfold_core.mailbox import ANY_SOURCE, Envelope
from allfold_core.verdict import LEFT


def mismatch(group: str, envelope: Envelope, receive: PendingCall) -> MismatchError:
    """Return the error of a message that does not fit the receive that takes it."""
    return MismatchError(
        f"in group '{group}' rank {envelope.source} sends rank {envelope.target} "
        f"a {envelope.describe_tensor()} with tag {envelope.tag}, but the receive that takes "
        f"it is {receive.describe()}. Nothing was moved and the group is usable; make both "
        "agree.",
        group=group,
        ranks=[envelope.source, envelope.target],
    )


def overdue(group: str, call: PendingCall, hindered: Mapping[int, str]) -> PeerMissing:
    """Return the error of a call whose deadline has passed.

    Args:
        hindered: by rank, what is known of those that keep others waiting: a phrase.
    """
    message = call.message
    why = f"; {hindered[message.peer]}" if message.peer in hindered else ""
    if call.is_send:
        what = f"rank {message.peer} has not received it"
    else:
        peer = "no rank" if message.peer == ANY_SOURCE else f"rank {message.peer}"
        what = f"{peer} has {'' if message.peer == ANY_SOURCE else 'not '}sent it"
    return PeerMissing(
        f"{call.describe()} of rank {call.rank} in group '{group}' timed out after its timeout of "
        f"{message.timeout:g} s: {what}{why} (a message is received by a recv with the same tag, "
        "and the dtype and size are compared then)",
        group=group,
        missing_ranks=[] if message.peer == ANY_SOURCE else [message.peer],
        timeout=message.timeout,
    )


def unanswered(group: str, call: PendingCall, seconds: float) -> str:
    """Describe a withdrawn send that its receiver may have received."""
    return (
        f"{call.describe()} of rank {call.rank} in group '{group}' was withdrawn, and rank "
        f"{call.message.peer} has not said for {seconds:g} s whether it has received it; without "
        "its word, or the loss of its node, the send has no outcome"
    )


def peer_left(
    group: str, call: PendingCall, ranks: Collection[int], how: Mapping[int, str]
) -> PeerLost:
    """Return the error of a call whose every possible peer has left the group.

    Args:
        how: of each rank that has left, a phrase to follow its name.
    """
    peer = call.message.peer
    who = f"every other rank {LEFT}" if peer == ANY_SOURCE else f"rank {peer} {how.get(peer)}"
    return PeerLost(
        f"{call.describe()} of rank {call.rank} in group '{group}' can never be done: {who}",
        ranks=sorted(ranks),
    )
