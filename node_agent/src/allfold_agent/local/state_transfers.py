"""State transfers: a rank offers its state through this agent, or pulls that of others."""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

from allfold_agent.http.transport import Transport
from allfold_agent.local.rank_connection import LocalMembership
from allfold_agent.runtime.buffers import is_sealed
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.threads import start_thread
from allfold_agent.tensors.offers import Offer, Offers, StateForm
from allfold_agent.tensors.pull import Pull
from allfold_agent.tensors.source import Source
from allfold_core.errors import AllfoldError, InvalidArgument, WorldChanged
from allfold_core.protocol.rank_messages import MAX_MESSAGE, check_timeout
from allfold_core.protocol.state_blocks import (
    BLOCK_BYTES,
    MAX_SOURCES,
    WINDOW_BLOCKS,
    TransferMessage,
)
from allfold_core.schema import read_object

log = logging.getLogger(__name__)
_START_SECONDS = 5.0


class StateTransfers:
    """Runs the transfers of all local ranks, each in a thread of its own: they are rare and long.

    Args:
        offers: the offers of this node, which the data port serves.
        transport: for requests to other agents.
    """

    def __init__(self, offers: Offers, transport: Transport) -> None:
        self._offers = offers
        self._transport = transport
        self._lock = make_lock("transfers")
        self._channels: set[socket.socket] = set()

    def begin(self, membership: LocalMembership, descriptor: int) -> None:
        """Start a transfer.

        Args:
            descriptor: the socket of the transfer, which owns it from now on.

        Raises:
            ServiceError: no thread can be started.
        """
        channel = socket.socket(fileno=descriptor)
        try:
            start_thread(partial(self._run, membership, channel), "allfold-transfer")
        except BaseException:
            channel.close()
            raise

    def close(self) -> None:
        """End all transfers."""
        with self._lock:
            for channel in self._channels:
                with suppress(OSError):
                    channel.shutdown(socket.SHUT_RDWR)

    def _run(self, membership: LocalMembership, channel: socket.socket) -> None:
        with self._lock:
            self._channels.add(channel)
        try:
            channel.settimeout(_START_SECONDS)
            body, window = _read_start(channel)
            if body["role"] == "offer":
                self._offer(body, channel, window)
            else:
                self._pull(membership, body, channel, window)
        except AllfoldError as error:
            _refuse(channel, error)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            log.info("a state transfer did not begin: %s", error)
            _refuse(channel, InvalidArgument(f"not a transfer: {error!r}"))
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _offer(self, body: dict[str, Any], channel: socket.socket, window: memoryview) -> None:
        description = StateForm(int(body["head"]), int(body["total"]), str(body["layout"]))
        offer = Offer(str(body["id"]), description, channel, window)
        # First: somebody may wait for the state already, and ask for its first block at once.
        channel.send(bytes([TransferMessage.READY]) + b"{}")
        self._offers.add(offer)
        try:
            offer.await_end()
        finally:
            self._offers.remove(offer)
            offer.release()

    def _pull(
        self, membership: LocalMembership, body: dict[str, Any], channel: socket.socket, window: Any
    ) -> None:
        timeout = float(body["timeout"])
        check_timeout(timeout)
        sources = _sources(membership, int(body["epoch"]), body["sources"][:MAX_SOURCES])
        channel.settimeout(None)
        Pull(sources, self._transport, channel, window, timeout).run()


def _read_start(channel: socket.socket) -> tuple[dict[str, Any], memoryview]:
    """Read what the rank wants, and map its window."""
    data, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 1)
    try:
        if not data or data[0] != TransferMessage.START or len(descriptors) != 1:
            raise InvalidArgument("a transfer begins with START and a window")
        body = read_object(data[1:])
        return body, _map_window(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _map_window(descriptor: int) -> memoryview:
    size = os.fstat(descriptor).st_size
    if not 0 < size <= WINDOW_BLOCKS * BLOCK_BYTES or size % BLOCK_BYTES:
        raise InvalidArgument(f"a window of {size} bytes is not acceptable")
    if not is_sealed(descriptor):
        raise InvalidArgument("the window is not sealed against being cut")
    return memoryview(mmap.mmap(descriptor, size))


def _sources(membership: LocalMembership, ordinal: int, wanted: list[list[Any]]) -> list[Source]:
    """Return where the ranks of an epoch are, which offer the state.

    They come in the order in which they are to be asked.

    Raises:
        WorldChanged: this agent does not know the epoch any more.
    """
    epoch = membership.group.epochs.get(ordinal)
    if epoch is None:
        raise WorldChanged(f"epoch {ordinal} of group '{membership.group.name}' is long over")
    addresses = {
        rank: member.data_address for member in epoch.plan.members for rank in member.ranks
    }
    found = [Source(int(rank), addresses[int(rank)], str(state_id)) for rank, state_id in wanted]
    return _by_turns(found)


def _by_turns(sources: Sequence[Source]) -> list[Source]:
    """Put one source of each node first, then a second one of each, and so on."""
    before: Counter[str] = Counter()
    turns: list[tuple[int, Source]] = []
    for source in sources:
        turns.append((before[source.address], source))
        before[source.address] += 1
    return [source for _, source in sorted(turns, key=itemgetter(0))]


def _refuse(channel: socket.socket, error: AllfoldError) -> None:
    with suppress(OSError):
        channel.send(bytes([TransferMessage.FAILED]) + json.dumps(error.to_dict()).encode())
