"""Agents whose rank offers a state, in this process: a data port, and a thread that is the rank."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

import httpx
import numpy as np

from allfold_agent.data_port import DataPort
from allfold_agent.tensors.offers import Offer, Offers, StateForm
from allfold_agent.tensors.source import Source
from allfold_core.protocol.state_blocks import BLOCK_BYTES, StateBlock
from tests.support.credentials import transport

HEAD = 1000
LAYOUT = "layout"
STATE_ID = "state.1"


def state(nbytes: int, seed: int = 0) -> bytes:
    """The stream of a state: different bytes for each seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


class Holder:
    """An agent and its rank.

    Attributes:
        served: the first byte of each block that the rank was asked for.
        on_block: called by the rank before it copies a block.
    """

    def __init__(self, rank: int, token: str | None = None) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.rank = rank
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.offers = Offers()
        self.served: list[int] = []
        self.on_block: Callable[[int], None] = lambda _: None
        self.port = DataPort(
            listener,
            transport=transport(token),
            open_edge=lambda _: socket.socket.close,
            offers=self.offers,
        )
        self.port.start()
        self.http = httpx.Client(base_url=f"http://{self.address}", trust_env=False, timeout=20)
        self._ranks: list[socket.socket] = []
        self._offers: list[Offer] = []
        self._threads: list[Thread] = []

    @property
    def source(self) -> Source:
        return Source(self.rank, self.address, STATE_ID)

    def offer(
        self,
        content: bytes,
        *,
        head: int = HEAD,
        layout: str = LAYOUT,
        blocks: int = 2,
        patience: float = 10.0,
    ) -> Offer:
        """Offer a state, with a window of so many blocks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        window = bytearray(blocks * BLOCK_BYTES)
        self._ranks.append(theirs)
        thread = Thread(target=self._serve, args=(theirs, window, content), daemon=True)
        thread.start()
        self._threads.append(thread)
        description = StateForm(head, len(content), layout)
        offer = Offer(STATE_ID, description, ours, memoryview(window), patience)
        self._offers.append(offer)
        self.offers.add(offer)
        return offer

    def _serve(self, rank: socket.socket, window: bytearray, content: bytes) -> None:
        with suppress(OSError):
            while data := rank.recv(64):
                block = StateBlock.unpack(data)
                self.served.append(block.start)
                self.on_block(block.start)
                at = block.slot * BLOCK_BYTES
                window[at : at + block.nbytes] = content[block.start : block.start + block.nbytes]
                rank.send(data)

    def end_rank(self) -> None:
        """The rank's process ends."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.shutdown(socket.SHUT_RDWR)

    def die(self) -> None:
        """The agent's process ends: nobody listens there any more, and connections break."""
        self.port.close()

    def close(self) -> None:
        self.end_rank()
        self.http.close()
        self.port.close()
        for thread in self._threads:
            thread.join()
        for offer in self._offers:
            offer.release()
        for rank in self._ranks:
            rank.close()


@contextmanager
def holding(count: int = 1, token: str | None = None) -> Iterator[list[Holder]]:
    """Some agents."""
    holders = [Holder(rank, token) for rank in range(count)]
    try:
        yield holders
    finally:
        for holder in holders:
            holder.close()


class Puller:
    """The rank of a pull: takes in what comes, until it is told that all is there.

    Attributes:
        content: the stream, as far as it has come.
    """

    def __init__(self, channel: socket.socket, window: memoryview) -> None:
        self.channel = channel
        self.window = window
        self.content = bytearray()
        self.starts: list[int] = []

    def take(self, data: bytes) -> None:
        """Take a block, and give its slot back."""
        block = StateBlock.unpack(data)
        at = block.slot * BLOCK_BYTES
        if len(self.content) < block.start + block.nbytes:
            self.content.extend(bytes(block.start + block.nbytes - len(self.content)))
        self.content[block.start : block.start + block.nbytes] = self.window[at : at + block.nbytes]
        self.starts.append(block.start)
        self.channel.send(data)
