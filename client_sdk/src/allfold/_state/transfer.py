"""State transfers through the agent: offering the state of this rank, and pulling another's."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np

from allfold._arena import Bytes, HostMemory
from allfold._membership import RankMembership
from allfold._process.fork_memory import disown_in_children
from allfold._session.connection import GRACE_SECONDS
from allfold._state.image import Image, Manifest, Pieces
from allfold._state.tensors import TensorBytes
from allfold_core.errors import (
    AgentLost,
    AllfoldError,
    PeerMissing,
    PeerSentIncoherentTensor,
    from_json,
)
from allfold_core.wire.local_wire import MAX_MESSAGE, Message, pack_json
from allfold_core.wire.state_wire import (
    BLOCK_BYTES,
    MAX_SOURCES,
    WINDOW_BLOCKS,
    Block,
    TransferMessage,
)

Places = Callable[[Manifest], Sequence[Any | None]]
"""Returns a tensor to overwrite for each of the manifest, or ``None`` to allocate one."""


class StateLanding:
    """Receives the stream of a state: first its head, in order, then the rest in any order.

    Args:
        head: the size of the head in bytes.
        total: the size of the stream in bytes.
        places: called once the head is complete.
    """

    def __init__(self, head: int, total: int, places: Places) -> None:
        self._head = np.empty(head, np.uint8)
        self._total = total
        self._places = places
        self._received = 0
        self._large: Pieces | None = None
        self._bytes: list[TensorBytes] = []
        self.manifest: Manifest | None = None

    def put(self, start: int, data: Bytes) -> None:
        """Store a part of the stream that begins at ``start``."""
        if start < len(self._head):
            self._head[start : start + len(data)] = data
            if start + len(data) == len(self._head):
                self._open()
        else:
            assert self._large is not None
            for tensor, first, part in self._large.of(start, len(data)):
                tensor.write(first, data[part])
        self._received += len(data)

    def _open(self) -> None:
        """Parse the head, and determine the tensor for every other byte of the stream."""
        manifest, size = Manifest.unpack(self._head.data)
        own = self._places(manifest)
        self._bytes = [
            TensorBytes(form.empty() if tensor is None else tensor)
            for form, tensor in zip(manifest.forms, own, strict=True)
        ]
        small = Pieces([self._bytes[index] for index in manifest.small], size)
        large = Pieces([self._bytes[index] for index in manifest.large], len(self._head))
        if (small.stop, large.stop) != (len(self._head), self._total):
            raise PeerSentIncoherentTensor(
                f"a state of {small.stop} and {large.stop} bytes, not {len(self._head)} and "
                f"{self._total}"
            )
        for tensor, first, part in small.of(size, len(self._head) - size):
            tensor.write(first, self._head[size:][part])
        self.manifest, self._large = manifest, large

    def finish(self) -> tuple[Manifest, list[Any]]:
        """Return the manifest and the tensors.

        Raises:
            PeerSentIncoherentTensor: bytes are missing.
        """
        if self.manifest is None or self._received != self._total:
            raise PeerSentIncoherentTensor(
                f"a state of {self._total} bytes of which {self._received} came"
            )
        for each in self._bytes:
            each.finish()
        return self.manifest, [each.value for each in self._bytes]


log = logging.getLogger("allfold")


class StateTransfer:
    """A socket to the agent, and a window of memory that is shared with it.

    Args:
        start: the request to the agent: its role, and the ids of offers.
        nbytes: the size of the state, ``None`` if unknown; bounds the size of the window.
    """

    def __init__(
        self, membership: RankMembership, start: dict[str, Any], nbytes: int | None
    ) -> None:
        blocks = WINDOW_BLOCKS if nbytes is None else -(-nbytes // BLOCK_BYTES)
        self._window = HostMemory(min(blocks, WINDOW_BLOCKS) * BLOCK_BYTES)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        disown_in_children(self)
        try:
            with theirs:
                membership.session.connection.send_descriptor(
                    pack_json(Message.TRANSFER, {"number": membership.number}),
                    theirs.fileno(),
                    GRACE_SECONDS,
                )
            packed = bytes([TransferMessage.START]) + json.dumps(start).encode()
            socket.send_fds(self._socket, [packed], [self._window.descriptor])
        except OSError as error:
            self.close()
            raise AgentLost(f"the node agent does not take a state transfer: {error}") from error
        except BaseException:
            self.close()
            raise

    def receive(self, deadline: float | None = None) -> tuple[TransferMessage, bytes]:
        """Return the next message.

        Raises:
            TimeoutError: none came before the deadline (monotonic).
            AllfoldError: the agent has reported an error, or is gone.
        """
        self._socket.settimeout(None if deadline is None else max(0.001, deadline - monotonic()))
        try:
            data = self._socket.recv(MAX_MESSAGE)
        except TimeoutError:
            raise
        except OSError as error:
            raise AgentLost(f"the node agent has ended a state transfer: {error}") from error
        if not data:
            raise AgentLost("the node agent has ended a state transfer")
        kind = TransferMessage(data[0])
        if kind is TransferMessage.FAILED:
            raise from_json(data[1:])
        return kind, data

    def give_back(self, block: Block) -> None:
        """Release a block of the window to the agent."""
        self._socket.send(block.pack())

    def slot(self, block: Block) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the memory of a block."""
        assert self._window.bytes is not None
        start = block.slot * BLOCK_BYTES
        return self._window.bytes[start : start + block.nbytes]

    def disown(self) -> None:
        self._socket.close()

    def close(self) -> None:
        """End the transfer, which wakes a thread that waits for a message."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Offering:
    """Lets others pull the state of this rank, until it is closed; a thread copies the blocks.

    The tensors must not change meanwhile: each block is read when it is requested.
    """

    def __init__(self, membership: RankMembership, state_id: str, image: Image) -> None:
        start = {
            "role": "offer",
            "id": state_id,
            "head": image.head,
            "total": image.total,
            "layout": image.layout,
        }
        self._image = image
        self._transfer = StateTransfer(membership, start, image.total)
        try:
            self._transfer.receive(monotonic() + GRACE_SECONDS)
        except BaseException:
            self._transfer.close()
            raise
        self._thread = Thread(target=self._serve, name="allfold-state", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                _, data = self._transfer.receive()
                block = Block.unpack(data)
                self._image.read(block.start, self._transfer.slot(block))
                self._transfer.give_back(block)
        except (AllfoldError, OSError) as error:
            log.debug("the offer of a state has ended: %s", error)
        except Exception:
            log.exception("the state of this rank cannot be read; others pull from other ranks")
        finally:
            self._transfer.close()

    def close(self) -> None:
        """Withdraw the offer. The state may be changed afterwards."""
        self._transfer.close()
        self._thread.join()


def pull(
    membership: RankMembership,
    sources: Sequence[tuple[int, str]],
    places: Places,
    timeout: float,
    *,
    epoch: int,
    opened: Callable[[], None],
) -> StateLanding:
    """Pull a state from ranks that offer it; return the landing that has received it.

    Args:
        sources: (rank, id of its offer) of each.
        places: determines the tensors to overwrite.
        timeout: seconds for the whole transfer.
        epoch: the epoch of the rank numbers.
        opened: called before the first byte is written to a tensor.

    Raises:
        PeerMissing: it was not there in time; says what is missing, and who was asked.
        PeerLost: all sources have failed; likewise.
        PeerSentIncoherentTensor: it is not a state like this rank's.
    """
    start = {
        "role": "pull",
        "epoch": epoch,
        "sources": list(sources[:MAX_SOURCES]),
        "timeout": timeout,
    }
    transfer = StateTransfer(membership, start, None)
    try:
        return _receive(transfer, places, monotonic() + timeout + GRACE_SECONDS, opened)
    except TimeoutError as error:
        if isinstance(error, PeerMissing):
            raise
        raise AgentLost(
            f"the node agent has not brought the state within {timeout:g} s, nor said why"
        ) from None
    finally:
        transfer.close()


def _receive(
    transfer: StateTransfer, places: Places, deadline: float, opened: Callable[[], None]
) -> StateLanding:
    """Receive a state until the agent says that it is complete."""
    landing: StateLanding | None = None
    while True:
        kind, data = transfer.receive(deadline)
        if kind is TransferMessage.READY:
            size = json.loads(data[1:])
            opened()
            landing = StateLanding(size["head"], size["total"], places)
            continue
        assert landing is not None
        if kind is TransferMessage.DONE:
            log.info("state pulled: %s", data[1:].decode())
            return landing
        block = Block.unpack(data)
        landing.put(block.start, transfer.slot(block))
        transfer.give_back(block)
