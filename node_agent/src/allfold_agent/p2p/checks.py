"""The checks of what a local rank asks for, before anything depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from allfold_agent.execution.op import RankEndpoint
from allfold_agent.p2p.messages import PendingCall
from allfold_core.dtypes import DType
from allfold_core.errors import InvalidArgument
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.verdict import numbering
from allfold_core.wire.local_wire import Message, P2PMessage, check_timeout


def checked_call(
    group: str,
    seat: int,
    connection: RankEndpoint,
    number: int,
    message: P2PMessage,
    seats: Sequence[int],
) -> PendingCall:
    """Return the call of a rank that sends or receives.

    Args:
        group: its name.
        seat: the seat number of the rank.
        connection: to the rank, which has the memory.
        number: the group's, on that connection.
        message: has the number of the peer as the rank knows it.
        seats: the seat numbers of all ranks that it knows.

    Raises:
        ValueError: the message cannot be; mostly an :class:`InvalidArgument`.
    """
    check_timeout(message.timeout)
    peer, world = message.peer, len(seats)
    dtype = DType.from_code(message.dtype)
    anyone = peer == ANY_SOURCE and message.kind is Message.RECV
    if not anyone and not 0 <= peer < world:
        raise InvalidArgument(f"rank {peer} is not one of group '{group}': its {numbering(world)}")
    if not anyone:
        message = message._replace(peer=seats[peer])
    if message.peer == seat:
        raise InvalidArgument(f"rank {peer} cannot exchange a message with itself")
    if message.nbytes % dtype.itemsize:
        raise InvalidArgument(
            f"{message.nbytes} bytes are no whole number of {dtype.label} elements"
        )
    memory = connection.memory(message.memory, message.nbytes)
    return PendingCall(seat, connection, number, message, memory, monotonic(), seats)
