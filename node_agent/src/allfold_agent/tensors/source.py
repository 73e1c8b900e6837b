"""One connection to an agent whose rank offers a state."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import NoReturn

from allfold_agent.http.client import ClientExchange, ResponseHead, read_error
from allfold_agent.http.socket_io import Headers, receive_into, send_views
from allfold_agent.http.transport import Transport, shut_down
from allfold_agent.tensors.offers import LONGEST_WAIT, StateForm, check_id, digest_header
from allfold_core.errors import PeerLost, PeerSentIncoherentTensor

# A source that pauses for so long inside an answer is given up for this block.
STALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Source:
    """A rank that offers a state.

    Attributes:
        rank: its number.
        address: of the data port of its agent.
        state_id: the id of its offer.
    """

    rank: int
    address: str
    state_id: str

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.address}"


class SourceConnection:
    """A connection to the agent of a source, with one request at a time.

    ``OSError`` and ``h11.RemoteProtocolError`` where it breaks; it is of no more use then, as after
    an error that the agent answers with.
    """

    def __init__(self, source: Source, transport: Transport, deadline: float) -> None:
        self.source = source
        self._transport = transport
        self._deadline = deadline
        connecting = min(deadline, monotonic() + STALL_SECONDS)
        self._sock = transport.connect_shortly(source.address, connecting)

    def describe(self, *, waits: bool) -> StateForm:
        """Ask for the form of the state.

        Args:
            waits: wait on the other side until it is offered.

        Raises:
            PeerLost: it is not offered there.
        """
        wait = max(0.0, min(self._deadline - monotonic(), LONGEST_WAIT)) if waits else 0.0
        head = self._ask("HEAD", f"?wait={wait:.3f}", (), wait + STALL_SECONDS)
        if head.status == 404:  # no answer to HEAD has a body that could tell more
            raise PeerLost(f"{self.source} does not offer state {self.source.state_id}")
        if head.status != 200:
            self._fail(f"status {head.status} for state {self.source.state_id}")
        try:
            total, start = int(head.headers["content-length"]), int(head.headers["x-allfold-head"])
            layout = head.headers["etag"].strip('"')
        except (KeyError, ValueError):
            self._fail("no description of a state")
        if not 0 < start <= total:
            self._fail(f"a head of {start} of {total} bytes")
        return StateForm(start, total, layout)

    def fetch(self, description: StateForm, start: int, into: memoryview) -> None:
        """Receive a range of at most a block, and check its digest.

        Raises:
            PeerSentIncoherentTensor: the bytes are damaged, or are not the requested range.
        """
        stop = start + len(into)
        headers = [
            ("Range", f"bytes={start}-{stop - 1}"),
            ("If-Match", f'"{description.layout}"'),
        ]
        head = self._ask("GET", "", headers, STALL_SECONDS)
        if head.status != 206:
            raise read_error(self._sock, head, self.source.address, self._deadline)
        expected = f"bytes {start}-{stop - 1}/{description.total}"
        if head.headers.get("content-range") != expected or len(head.early) > len(into):
            self._fail(f"{head.headers.get('content-range')!r}, expected {expected}")
        into[: len(head.early)] = head.early
        rest = into[len(head.early) :]
        receive_into(self._sock, rest, stall=STALL_SECONDS, deadline=self._deadline)
        if head.headers.get("content-digest") != digest_header(into):
            self._fail(f"bytes {start} to {stop} that do not have their digest")

    def _ask(self, method: str, query: str, headers: Headers, seconds: float) -> ResponseHead:
        target = f"/v1/tensors/{check_id(self.source.state_id)}{query}"
        exchange = ClientExchange(
            self.source.address, method, target, headers, self._transport.tokens
        )
        deadline = min(self._deadline, monotonic() + seconds)
        send_views(self._sock, exchange.head, stall=STALL_SECONDS, deadline=deadline)
        return exchange.read_head(self._sock, deadline)

    def _fail(self, what: str) -> NoReturn:
        raise PeerSentIncoherentTensor(f"{self.source} sent {what}", rank=self.source.rank)

    def interrupt(self) -> None:
        """Shut the connection down; a thread that waits for the source fails."""
        with suppress(OSError):
            shut_down(self._sock)

    def close(self) -> None:
        self._sock.close()
