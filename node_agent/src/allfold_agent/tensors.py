"""Tensors that this agent holds for others to download.

A :class:`TensorStore` keeps each tensor under an id until it was downloaded often enough, was
deleted, or grew too old. Every limit is checked before memory is taken. The store has no thread
of its own: what is too old goes when somebody next asks for something.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from threading import Condition, Lock
from time import monotonic
from typing import Any, Self, TypeVar

import numpy as np

from allfold_core.dtypes import DType
from allfold_core.errors import (
    ArenaExhausted,
    InvalidArgument,
    LocalError,
    PeerMissing,
    PeerSentIncoherentTensor,
)

log = logging.getLogger(__name__)

GIB = 1 << 30
# Bytes received at a time: what is hashed meanwhile should still be in the cache.
CHUNK = 1 << 20
DEFAULT_TTL = 300.0
LONGEST_TTL = 7 * 24 * 3600.0
LONGEST_WAIT = 60.0

# Ids name session, op, phase and slice. Clients tidy the path segments "." and ".." away.
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:-]{1,256}")
_DIGEST = re.compile(r"\s*sha-256\s*=\s*:([A-Za-z0-9+/=]*):\s*(?:;.*)?")
_RANGE = re.compile(r"bytes=\s*([0-9]{0,19})-([0-9]{0,19})\s*")
_MAX_DIMS = 32
# How often a wait looks whether its result is still wanted.
_GLANCE = 0.5


Buffer = bytes | bytearray | memoryview | mmap | np.ndarray[Any, Any]
_T = TypeVar("_T")


def check_id(tensor_id: str) -> str:
    """The id, or :class:`InvalidArgument`."""
    if not _ID.fullmatch(tensor_id):
        raise InvalidArgument(
            f"tensor id {tensor_id[:300]!r}: expected 1 to 256 of A-Z a-z 0-9 . _ : -"
        )
    return tensor_id


def byte_view(data: Buffer) -> memoryview:
    """The bytes of contiguous memory, without a copy."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise InvalidArgument("a tensor's memory must be contiguous, this one has strides")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def digest_header(digest: bytes) -> str:
    """A SHA-256 as a value of ``Content-Digest`` or ``Repr-Digest`` (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(digest).decode()}:"


def parse_digest(value: str) -> bytes | None:
    """The SHA-256 of a digest header; ``None`` where it has only digests of other kinds."""
    for member in value.split(","):
        if match := _DIGEST.fullmatch(member):
            try:
                digest = base64.b64decode(match[1], validate=True)
            except binascii.Error:
                digest = b""
            if len(digest) == 32:
                return digest
        if member.strip().startswith("sha-256"):
            raise InvalidArgument(f"{member.strip()[:100]!r} is not a SHA-256 of RFC 9530")
    return None


def parse_range(value: str, size: int) -> tuple[int, int] | None:
    """Start and stop of a ``Range`` header; ``None`` (all) for one that HTTP lets us ignore.

    Raises with status 416 where none of the bytes exist.
    """
    match = _RANGE.fullmatch(value)
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        raise LocalError(f"no bytes {value[6:]} in {size}", http_status=416, size=size)
    return start, stop


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor's bytes mean."""

    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int]) -> TensorSpec:
        """The spec of a dtype's label and a shape; :class:`InvalidArgument` where it has none."""
        try:
            known = DType.from_label(dtype)
        except ValueError as error:
            raise InvalidArgument(str(error), dtype=dtype) from None
        dims = tuple(int(dim) for dim in shape)
        if len(dims) > _MAX_DIMS or any(not 0 <= dim < 2**63 for dim in dims):
            raise InvalidArgument(f"shape {dims}: expected up to {_MAX_DIMS} sizes from 0")
        return cls(known, dims)

    @classmethod
    def parse(cls, dtype: str, shape: str) -> TensorSpec:
        """The spec of its wire form, such as ``float32`` and ``2,3``; a scalar has no sizes."""
        sizes = shape.split(",") if shape else []
        if not all(size.isascii() and size.isdigit() and len(size) < 20 for size in sizes):
            raise InvalidArgument(f"shape {shape[:100]!r}: expected sizes with commas between")
        return cls.of(dtype, [int(size) for size in sizes])

    @property
    def shape_text(self) -> str:
        return ",".join(map(str, self.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.label}[{self.shape_text}]"


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
    _digest_lock: Lock = field(default_factory=Lock)

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
            that somebody still downloads after they were dropped.
        max_tensor_bytes: the memory of one tensor.
        clock: seconds, for the age of tensors and the length of waits.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 16 * GIB,
        max_tensor_bytes: int = 8 * GIB,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_tensor_bytes = max_tensor_bytes
        self._clock = clock
        self._changed = Condition()
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
        data: Buffer,
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


def check_digest(tensor_id: str, expected: bytes, got: bytes, **details: Any) -> None:
    """Raise :class:`PeerSentIncoherentTensor` where the digests differ."""
    if expected != got:
        raise PeerSentIncoherentTensor(
            f"tensor {tensor_id}: expected the digest {digest_header(expected)},"
            f" got {digest_header(got)}",
            tensor=tensor_id,
            expected=digest_header(expected),
            got=digest_header(got),
            **details,
        )


def missing(tensor_id: str, why: str) -> PeerMissing:
    """The error for a tensor that is not there: to HTTP it was not found."""
    return PeerMissing(f"tensor {tensor_id} {why}", tensor=tensor_id, http_status=404)
