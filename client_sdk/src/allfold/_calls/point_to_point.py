"""Between two ranks: send and recv."""

from __future__ import annotations

from typing import Any

from allfold import _tensors
from allfold._calls.arguments import LARGEST, checked_rank, whole_numbers
from allfold._calls.call import P2PCall, Seat
from allfold_core.errors import InvalidArgument
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.wire.local_wire import Message


def send(seat: Seat, tensor: Any, to: int, tag: int) -> P2PCall:
    peer = _checked_peer(seat, to, "to")
    view = _tensors.view(tensor, written=False, folded=False)
    return P2PCall(Message.SEND, peer, _checked_tag(tag), inputs=(view,))


def recv(seat: Seat, tensor: Any, source: int | None, tag: int) -> P2PCall:
    peer = ANY_SOURCE if source is None else _checked_peer(seat, source, "source")
    view = _tensors.view(tensor, written=True, folded=False)
    return P2PCall(Message.RECV, peer, _checked_tag(tag), outputs=(view,))


def _checked_peer(seat: Seat, rank: int, what: str) -> int:
    peer = checked_rank(seat, rank, what)
    if peer == seat.rank:
        raise InvalidArgument(f"rank {rank} cannot exchange a message with itself")
    return peer


def _checked_tag(tag: int) -> int:
    found = None if isinstance(tag, bool) else whole_numbers([tag])
    if found is None or not -LARGEST <= found[0] < LARGEST:
        raise InvalidArgument(f"a tag is a whole number of 64 bits with its sign, got {tag!r}")
    return found[0]
