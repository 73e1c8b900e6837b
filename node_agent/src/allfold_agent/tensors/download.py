"""Download tensors of another agent's data port.

A body is received straight into its memory; when its connection breaks the download goes on where
it was, and the digest is checked at the end.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import h11
import numpy as np

from allfold_agent.http.client import ClientExchange, ResponseHead, read_error
from allfold_agent.http.wire import Headers, receive_some, send_views
from allfold_agent.tensors.peer import STALL, connected, is_missing, lost
from allfold_agent.tensors.spec import (
    CHUNK,
    GIB,
    TensorSpec,
    byte_view,
    check_digest,
    check_id,
    parse_digest,
)
from allfold_agent.tensors.store import LONGEST_WAIT
from allfold_core.dtypes import DType
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    PeerMissing,
    PeerSentIncoherentTensor,
)

if TYPE_CHECKING:
    import torch

_SPAN = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_SHORTEST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class Tensor:
    """A downloaded tensor: its bytes, and what they mean.

    Attributes:
        dtype: as NumPy and torch name it.
        data: the bytes in C order; writable.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def numpy(self) -> np.ndarray[Any, Any]:
        """An array on the same memory. NumPy has no bfloat16: its bits come as ``uint16``."""
        dtype = "uint16" if self.dtype == DType.BFLOAT16.label else self.dtype
        return np.frombuffer(self.data, dtype).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """A torch tensor on the same memory, bfloat16 included."""
        import torch  # a tool that moves bytes need not wait seconds for it

        dtype = getattr(torch, self.dtype)
        if not len(self.data):
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.data, dtype=dtype).reshape(self.shape)


def download(
    address: str,
    tensor_id: str,
    *,
    into: memoryview | None = None,
    expect: tuple[str, Sequence[int]] | None = None,
    token: str | None = None,
    timeout: float = 60.0,
    max_bytes: int = 8 * GIB,
) -> Tensor:
    """Download a tensor, waiting until it is exposed.

    Args:
        into: writable memory of the tensor's size; without it memory is taken, at most
            ``max_bytes``. Its content is arbitrary after an error.
        expect: dtype and shape that the tensor has to have.

    Raises:
        PeerMissing: not exposed, or not there completely, after ``timeout`` seconds.
        PeerLost: the agent cannot be reached, or broke the connection before it sent anything.
        PeerSentIncoherentTensor: a dtype, shape, size or digest other than expected.
    """
    return _Download(address, tensor_id, into, expect, token, timeout, max_bytes).run()


class _Download:
    """One download: what it wants, and how far it is."""

    def __init__(
        self,
        address: str,
        tensor_id: str,
        into: memoryview | None,
        expect: tuple[str, Sequence[int]] | None,
        token: str | None,
        timeout: float,
        max_bytes: int,
    ) -> None:
        self.address = address
        self.tensor_id = check_id(tensor_id)
        self.token = token
        self.timeout = timeout
        self.deadline = monotonic() + timeout
        self.max_bytes = max_bytes
        self.into = None if into is None else byte_view(into)
        self.expect = None if expect is None else TensorSpec.of(*expect)
        self._check_into()
        self.spec: TensorSpec | None = None
        self.memory = memoryview(b"")
        self.received = 0
        self.hash = hashlib.sha256()
        self.etag: str | None = None

    def _check_into(self) -> None:
        if self.into is None:
            return
        if self.into.readonly and len(self.into):
            raise InvalidArgument("the memory to download into is read-only")
        if self.expect is not None and len(self.into) != self.expect.nbytes:
            raise InvalidArgument(
                f"{self.expect} has {self.expect.nbytes} bytes, the memory to download into has"
                f" {len(self.into)}"
            )

    def run(self) -> Tensor:
        pause = _SHORTEST_PAUSE
        while True:
            before = self.received
            try:
                return self._attempt()
            except AllfoldError as error:
                if not is_missing(error):
                    raise
                cause: Exception = error
            except (OSError, h11.RemoteProtocolError) as error:
                if self.spec is None and not isinstance(error, TimeoutError):
                    raise lost(self.address, self.tensor_id, error) from error
                cause = error
            pause = _SHORTEST_PAUSE if self.received > before else min(2 * pause, _LONGEST_PAUSE)
            self._pause(pause, cause)

    def _pause(self, seconds: float, cause: Exception) -> None:
        if monotonic() + seconds >= self.deadline:
            progress = f"; {self.received} of {len(self.memory)} bytes came" if self.spec else ""
            raise PeerMissing(
                f"tensor {self.tensor_id} did not come from {self.address} within"
                f" {self.timeout:g} s{progress}: {cause}",
                address=self.address,
                tensor=self.tensor_id,
            ) from cause
        sleep(seconds)

    def _attempt(self) -> Tensor:
        """One connection's worth of download: what is still missing, when all goes well."""
        exchange = ClientExchange(self.address, "GET", self._target(), self._headers(), self.token)
        with connected(self.address, self.tensor_id, self.deadline) as sock:
            send_views(sock, exchange.head, stall=STALL, deadline=self.deadline)
            # It may take the agent any time until somebody exposes the tensor.
            head = exchange.read_head(sock, self.deadline)
            if head.status not in (200, 206):
                raise read_error(sock, head, self.address, self.deadline)
            digest = self._accept(head)
            self._receive(sock, head.early)
            check_digest(self.tensor_id, digest, self.hash.digest(), address=self.address)
        assert self.spec is not None
        return Tensor(self.spec.dtype.label, self.spec.shape, self.memory)

    def _target(self) -> str:
        wait = max(0.0, min(self.deadline - monotonic(), LONGEST_WAIT))
        return f"/v1/tensors/{self.tensor_id}?wait={wait:.3f}"

    def _headers(self) -> Headers:
        headers = [("Connection", "close")]
        if self.received and self.etag:
            # Without If-Range we might append the end of another tensor to what we have.
            headers += [("Range", f"bytes={self.received}-"), ("If-Range", self.etag)]
        return headers

    def _restart(self) -> None:
        self.received = 0
        self.hash = hashlib.sha256()

    def _accept(self, head: ResponseHead) -> bytes:
        """Check a response's head, make ready for its body; the digest that it promises."""
        spec = self._read_spec(head.headers)
        start, total = self._read_span(head)
        if total != spec.nbytes:
            raise self._incoherent(f"{spec.nbytes} bytes of {spec}", f"{total} bytes")
        if head.status == 200:
            self._restart()
        elif start != self.received:
            raise self._incoherent(f"bytes from {self.received}", f"bytes from {start}")
        if spec != self.spec:
            self._take_memory(spec)
        digest = parse_digest(head.headers.get("repr-digest", ""))
        if digest is None:
            raise self._incoherent("a Repr-Digest", "none")
        self.etag = head.headers.get("etag")
        return digest

    def _read_spec(self, headers: dict[str, str]) -> TensorSpec:
        dtype, shape = headers.get("x-allfold-dtype"), headers.get("x-allfold-shape")
        try:
            if dtype is None or shape is None:
                raise InvalidArgument("no dtype and shape")
            spec = TensorSpec.parse(dtype, shape)
        except InvalidArgument as error:
            raise self._incoherent("a tensor's headers", error.message) from error
        if self.expect is not None and spec != self.expect:
            raise self._incoherent(str(self.expect), str(spec))
        if self.into is not None and spec.nbytes != len(self.into):
            raise self._incoherent(f"{len(self.into)} bytes", f"{spec} of {spec.nbytes}")
        return spec

    def _read_span(self, head: ResponseHead) -> tuple[int, int]:
        """The body's first byte, and the number of bytes of the whole tensor."""
        length = head.headers.get("content-length", "")
        if head.status == 200 and length.isdigit():
            return 0, int(length)
        match = _SPAN.fullmatch(head.headers.get("content-range", ""))
        if head.status == 206 and match and int(match[2]) + 1 == int(match[3]):
            return int(match[1]), int(match[3])
        raise self._incoherent("a body's length or range to the end", repr(head.headers))

    def _take_memory(self, spec: TensorSpec) -> None:
        if self.into is not None:
            self.memory = self.into
        elif spec.nbytes > self.max_bytes:
            raise self._incoherent(f"{self.max_bytes} bytes at most", f"{spec} of {spec.nbytes}")
        else:
            self.memory = np.empty(spec.nbytes, np.uint8).data
        self.spec = spec

    def _receive(self, sock: socket.socket, early: bytes) -> None:
        if len(early) > len(self.memory) - self.received:
            raise self._incoherent(f"{len(self.memory)} bytes", "more")
        self.memory[self.received : self.received + len(early)] = early
        self._advance(len(early))
        while self.received < len(self.memory):
            part = self.memory[self.received : self.received + CHUNK]
            self._advance(receive_some(sock, part, stall=STALL, deadline=self.deadline))

    def _advance(self, count: int) -> None:
        self.hash.update(self.memory[self.received : self.received + count])
        self.received += count

    def _incoherent(self, expected: str, got: str) -> PeerSentIncoherentTensor:
        return PeerSentIncoherentTensor(
            f"tensor {self.tensor_id} of {self.address}: expected {expected}, got {got}",
            address=self.address,
            tensor=self.tensor_id,
            expected=expected,
            got=got,
        )
