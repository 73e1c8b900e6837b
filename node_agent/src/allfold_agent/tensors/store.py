"""Tensors that this agent holds for others to download.

A :class:`TensorStore` keeps each tensor under an id until it was downloaded often enough, was
deleted, or grew too old. Every limit is checked before memory is taken. The store has no thread
of its own: what is too old goes when somebody next asks for something.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from time import monotonic
from typing import Self, TypeVar

import numpy as np

from allfold_agent.runtime.locks import make_condition, make_lock
from allfold_agent.runtime.memory import memory_limit
from allfold_agent.tensors.spec import GIB, BytesLike, TensorSpec, byte_view, check_id
from allfold_core.errors import (
    ArenaExhausted,
    InvalidArgument,
    LocalError,
    PeerMissing,
)

log = logging.getLogger(__name__)
DEFAULT_TTL = 300.0
LONGEST_TTL = 7 * 24 * 3600.0
LONGEST_WAIT = 60.0
# How often a wait looks whether its result is still wanted.
_GLANCE = 0.5
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class ExposedTensor:
    """A tensor of the store.

    Attributes:
        view: its bytes, which nobody may change any more.
        downloads: how often it was downloaded completely.
        claims: downloads under way that will count.
        readers: all transfers under way; they keep the memory of a dropped tensor.
    """

    tensor_id: str
    spec: TensorSpec
    view: memoryview
    max_downloads: int | None
    expires_at: float
    downloads: int = 0
    claims: int = 0
    readers: int = 0
    dropped: bool = False
    _digest: bytes | None = None
    _digest_lock: Lock = field(default_factory=partial(make_lock, "tensor digest"))

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the bytes, computed when it is first asked for."""
        with self._digest_lock:
            if self._digest is None:
                self._digest = hashlib.sha256(self.view).digest()
            return self._digest


@dataclass(slots=True)
class Reading:
    """A transfer of a tensor under way; its sender sets ``complete`` once all of it arrived."""

    complete: bool = False


class Draft:
    """Memory for a tensor that is being received. Nobody sees it before :meth:`expose`.

    A context manager: what was not exposed at its end is given back.
    """

    def __init__(self, store: TensorStore, tensor: ExposedTensor, ttl: float) -> None:
        self.view = tensor.view
        self._store = store
        self._tensor = tensor
        self._ttl = ttl
        self._open = True

    def expose(self, digest: bytes | None = None) -> None:
        """Let others see the tensor. ``digest`` is its SHA-256, where the receiver knows it."""
        self._tensor._digest = digest
        self._tensor.view = self.view.toreadonly()
        self._store._publish(self._tensor, self._ttl)
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._open = False
            self._store._free(self._tensor)


class TensorStore:
    """Exposed tensors by id.

    Args:
        max_bytes: the memory of all tensors together, those included that are being received or
            that somebody still downloads after they were dropped. By default 16 GiB, or half of
            the memory that the process may use where that is less.
        max_tensor_bytes: the memory of one tensor.
        clock: seconds, for the age of tensors and the length of waits.
    """

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        max_tensor_bytes: int = 8 * GIB,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        if max_bytes is None:
            max_bytes = min(16 * GIB, memory_limit() // 2)
        self.max_bytes = max_bytes
        self.max_tensor_bytes = max_tensor_bytes
        self._clock = clock
        self._changed = make_condition("tensors")
        self._tensors: dict[str, ExposedTensor] = {}
        self._bytes = 0
        self._next_expiry = math.inf

    @property
    def nbytes(self) -> int:
        """The bytes that count towards ``max_bytes`` now."""
        with self._changed:
            self._purge()
            return self._bytes

    def __len__(self) -> int:
        with self._changed:
            self._purge()
            return len(self._tensors)

    def expose(
        self,
        tensor_id: str,
        data: BytesLike,
        dtype: str,
        shape: Sequence[int],
        *,
        max_downloads: int | None = None,
        ttl: float = DEFAULT_TTL,
    ) -> None:
        """Let others download ``data``. It is not copied: leave it alone until it was dropped.

        It is dropped after ``max_downloads`` complete downloads, or after ``ttl`` seconds.
        """
        view = byte_view(data)
        spec = TensorSpec.of(dtype, shape)
        if len(view) != spec.nbytes:
            raise InvalidArgument(f"{spec} has {spec.nbytes} bytes, its memory {len(view)}")
        tensor = self._reserve(tensor_id, spec, max_downloads, ttl)
        tensor.view = view.toreadonly()
        try:
            self._publish(tensor, ttl)
        except LocalError:
            self._free(tensor)
            raise

    def draft(
        self,
        tensor_id: str,
        spec: TensorSpec,
        *,
        max_downloads: int | None = None,
        ttl: float = DEFAULT_TTL,
    ) -> Draft:
        """Memory to receive a tensor into. Two may receive one id; the first to expose it wins."""
        tensor = self._reserve(tensor_id, spec, max_downloads, ttl)
        try:
            # Not a bytearray: that would touch all pages to zero them.
            tensor.view = np.empty(spec.nbytes, np.uint8).data
        except MemoryError:
            self._free(tensor)
            raise ArenaExhausted(f"no memory for {spec} ({spec.nbytes} bytes)") from None
        return Draft(self, tensor, ttl)

    def get(
        self, tensor_id: str, wait: float = 0.0, *, wanted: Callable[[], bool] = lambda: True
    ) -> ExposedTensor:
        """The tensor, once it is exposed; :class:`PeerMissing` after ``wait`` seconds without.

        ``wait`` is cut to :data:`LONGEST_WAIT`, and ends early when ``wanted`` says no, which is
        asked now and then with the store's lock held.
        """
        check_id(tensor_id)
        with self._changed:
            found = self._wait_for(lambda: self._tensors.get(tensor_id), wait, wanted)
        if found is None:
            raise missing(tensor_id, f"was not exposed within {min(wait, LONGEST_WAIT):g} s")
        return found

    def delete(self, tensor_id: str) -> bool:
        """Drop the tensor; whether there was one. Transfers under way go on to their end."""
        check_id(tensor_id)
        with self._changed:
            self._purge()
            tensor = self._tensors.get(tensor_id)
            if tensor is not None:
                self._drop(tensor)
        return tensor is not None

    @contextmanager
    def reading(
        self,
        tensor: ExposedTensor,
        *,
        counts: bool,
        wait: float = 0.0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Iterator[Reading]:
        """Hold the tensor's memory during a transfer of it.

        A transfer that ``counts`` takes one of the tensor's ``max_downloads``, and gives it back
        unless it is marked complete. Where none is left it waits for one to come back, then
        raises :class:`PeerMissing`: a tensor is never downloaded more often than was allowed.
        """
        self._begin(tensor, counts, wait, wanted)
        reading = Reading()
        try:
            yield reading
        finally:
            self._end(tensor, counts, reading.complete)

    def _begin(
        self, tensor: ExposedTensor, counts: bool, wait: float, wanted: Callable[[], bool]
    ) -> None:
        limit = math.inf if tensor.max_downloads is None else tensor.max_downloads

        def decided() -> bool | None:
            free = not counts or tensor.downloads + tensor.claims < limit
            return True if tensor.dropped or free else None

        with self._changed:
            if not self._wait_for(decided, wait, wanted) or tensor.dropped:
                raise missing(tensor.tensor_id, f"was downloaded {limit} times or is dropped")
            tensor.claims += counts
            tensor.readers += 1

    def _end(self, tensor: ExposedTensor, counts: bool, complete: bool) -> None:
        with self._changed:
            tensor.readers -= 1
            tensor.claims -= counts
            if counts and complete:
                tensor.downloads += 1
            if tensor.dropped:
                if not tensor.readers:
                    self._bytes -= tensor.spec.nbytes
            elif tensor.downloads == tensor.max_downloads:
                self._drop(tensor)
            self._changed.notify_all()

    def _wait_for(
        self, ready: Callable[[], _T | None], wait: float, wanted: Callable[[], bool]
    ) -> _T | None:
        if not wait >= 0:
            raise InvalidArgument(f"wait is {wait}, expected seconds from 0")
        deadline = self._clock() + min(wait, LONGEST_WAIT)
        while True:
            self._purge()
            if (found := ready()) is not None:
                return found
            left = deadline - self._clock()
            if left <= 0 or not wanted():
                return None
            self._changed.wait(min(left, _GLANCE))

    def _reserve(
        self, tensor_id: str, spec: TensorSpec, max_downloads: int | None, ttl: float
    ) -> ExposedTensor:
        check_id(tensor_id)
        if max_downloads is not None and max_downloads < 1:
            # Nobody could ever download it, and nothing but its age would free its memory.
            raise InvalidArgument(f"max_downloads is {max_downloads}, expected at least 1")
        if not 0 < ttl <= LONGEST_TTL:
            raise InvalidArgument(f"ttl is {ttl}, expected seconds up to {LONGEST_TTL:.0f}")
        nbytes = spec.nbytes
        if nbytes > self.max_tensor_bytes:
            message = f"{spec} has {nbytes} bytes, the limit is {self.max_tensor_bytes}"
            raise LocalError(message, http_status=413, limit=self.max_tensor_bytes)
        with self._changed:
            self._purge()
            self._refuse_taken(tensor_id)
            if self._bytes + nbytes > self.max_bytes:
                raise ArenaExhausted(
                    f"no room for {spec}: {nbytes} bytes more than the {self._bytes} that are"
                    f" exposed would exceed the limit of {self.max_bytes}",
                    limit=self.max_bytes,
                )
            self._bytes += nbytes
        return ExposedTensor(tensor_id, spec, memoryview(b""), max_downloads, math.inf)

    def _refuse_taken(self, tensor_id: str) -> None:
        if tensor_id in self._tensors:
            message = f"tensor {tensor_id} is exposed already"
            raise LocalError(message, tensor=tensor_id, http_status=409)

    def _publish(self, tensor: ExposedTensor, ttl: float) -> None:
        with self._changed:
            self._purge()
            self._refuse_taken(tensor.tensor_id)
            tensor.expires_at = self._clock() + ttl
            self._next_expiry = min(self._next_expiry, tensor.expires_at)
            self._tensors[tensor.tensor_id] = tensor
            self._changed.notify_all()

    def _free(self, tensor: ExposedTensor) -> None:
        with self._changed:
            self._bytes -= tensor.spec.nbytes

    def _purge(self) -> None:
        """Drop what is too old. Cheap while nothing is."""
        now = self._clock()
        if now < self._next_expiry:
            return
        for tensor in [*self._tensors.values()]:
            if tensor.expires_at <= now:
                log.info(
                    "tensor %s is dropped: %d downloads (of %s) before its time was up",
                    tensor.tensor_id,
                    tensor.downloads,
                    tensor.max_downloads or "any number",
                )
                self._drop(tensor)
        ages = (tensor.expires_at for tensor in self._tensors.values())
        self._next_expiry = min(ages, default=math.inf)

    def _drop(self, tensor: ExposedTensor) -> None:
        del self._tensors[tensor.tensor_id]
        tensor.dropped = True
        if not tensor.readers:
            self._bytes -= tensor.spec.nbytes
        self._changed.notify_all()


def missing(tensor_id: str, why: str) -> PeerMissing:
    """The error for a tensor that is not there: to HTTP it was not found."""
    return PeerMissing(f"tensor {tensor_id} {why}", tensor=tensor_id, http_status=404)
