"""The memory where a state arrives: this rank's own tensors where they fit, else new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allfold._arena import Bytes
from allfold._state.image import Manifest, Pieces
from allfold._state.tensors import TensorBytes
from allfold_core.errors import PeerSentIncoherentTensor

Places = Callable[[Manifest], Sequence[Any | None]]
"""Returns a tensor to overwrite for each of the manifest, or ``None`` to allocate one."""


class Landing:
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
