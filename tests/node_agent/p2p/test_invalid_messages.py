"""Messages that do not fit, ranks that do not exist, frames that cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from allfold_agent.p2p.sink import MessageReceiver
from allfold_core.errors import InvalidArgument, MismatchError, PeerSentIncoherentTensor
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.protocol.frames import FrameHeader, FrameType
from allfold_core.protocol.rank_messages import FIRST_PAIR
from tests.node_agent.p2p.message_steps import LARGE, LONG, RECV, SEND, amid_a_message, works
from tests.support.fakes.local_groups import local_groups


@pytest.mark.parametrize("ranks", [[[0, 1]], [[0], [1]]], ids=str)
@pytest.mark.parametrize("numel", [3, LARGE])
def test_a_size_that_does_not_fit_is_told_to_both_sides_and_the_next_message_works(
    ranks: list[list[int]], numel: int
) -> None:
    with local_groups(ranks) as local:
        giver, taker = local.ranks
        giver.exchange(SEND, 0, np.ones(numel), 1)
        taker.exchange(RECV, 0, np.zeros(numel + 1), 0)
        (_, ours), (_, theirs) = giver.outcome(), taker.outcome()
        assert isinstance(ours, MismatchError)
        assert str(ours) == str(theirs)
        assert f"float32[{numel}]" in ours.message
        assert f"float32[{numel + 1}]" in ours.message
        assert (taker.result(FIRST_PAIR) == 0).all()
        works(local, 1)


@pytest.mark.parametrize("peer", [1, 2, -2])
def test_a_rank_that_is_not_another_one_is_refused(peer: int) -> None:
    with local_groups([[0], [1]]) as local:
        for number, kind in enumerate((SEND, RECV)):
            own = local.ranks[1]
            own.exchange(kind, number, [1.0], peer)
            assert isinstance(own.outcome()[1], InvalidArgument)
        local.ranks[1].exchange(SEND, 2, [1.0], ANY_SOURCE)
        assert isinstance(local.ranks[1].outcome()[1], InvalidArgument), "nobody sends to anyone"
        works(local, 3)


def test_frames_that_cannot_be_are_refused() -> None:
    """A parcel beyond the message that it is of, a note too long to be one, data of an op."""
    with amid_a_message() as (local, _):
        pairs = local.groups[1].p2p
        receiver = MessageReceiver("node0", pairs)
        for kind, offset, length in (
            (FrameType.PARCEL, 4 * LONG - 3, 4),
            (FrameType.PARCEL, 0, 4 * LONG + 1),
            (FrameType.OFFER, 0, 1 << 20),
            (FrameType.DATA, 0, 4),
            (FrameType.SIGNAL, 0, 0),
        ):
            header = FrameHeader(kind, 3, 9, 0, offset, length, 0, 0)
            with pytest.raises(PeerSentIncoherentTensor, match=f"a {kind.name} of {length} bytes"):
                receiver.admit(header, None)
        late = FrameHeader(FrameType.PARCEL, 3, 9, 77, 0, 4, 0, 0)
        assert receiver.admit(late, None) is None, "of a message that was withdrawn"


@pytest.mark.parametrize("kind", [FrameType.REFUSED, FrameType.WITHDRAWN, FrameType.OFFER])
@pytest.mark.parametrize(
    "said",
    [b"", b"no JSON", b"[1]", b"[" * 50_000, b"\xff", b'{"details": 3}'],
    ids=lambda said: repr(said[:20]),
)
def test_a_frame_that_cannot_be_read_is_an_error_of_its_edge(kind: FrameType, said: bytes) -> None:
    with amid_a_message() as (local, _):
        receiver = MessageReceiver("node0", local.groups[1].p2p)
        landing = receiver.admit(FrameHeader(kind, 3, 9, 0, 0, len(said), 0, 0), None)
        assert landing is not None
        landing.view[:] = said
        with pytest.raises(PeerSentIncoherentTensor, match=f"a {kind.name} that cannot be read"):
            receiver.received(landing)
