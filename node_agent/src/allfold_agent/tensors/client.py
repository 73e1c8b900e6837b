"""Upload and delete tensors of another agent's data port.

Each call has one connection and one deadline.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from time import monotonic
from typing import Any
from urllib.parse import urlencode

from allfold_agent.http.client import ClientExchange, ResponseHead, read_error
from allfold_agent.http.wire import send_views
from allfold_agent.tensors.peer import STALL, answered, connected, is_missing
from allfold_agent.tensors.spec import BytesLike, TensorSpec, byte_view, check_id, digest_header
from allfold_core.errors import InvalidArgument

# A larger upload first asks whether it is welcome.
_ASK_FIRST = 1 << 20


def upload(
    address: str,
    tensor_id: str,
    data: BytesLike,
    dtype: str,
    shape: Sequence[int],
    *,
    max_downloads: int | None = None,
    ttl: float | None = None,
    digest: bool = True,
    token: str | None = None,
    timeout: float = 60.0,
) -> None:
    """Expose a tensor at another agent.

    Not repeated by itself: after a :class:`PeerLost` or :class:`PeerMissing` it may be exposed.

    Args:
        digest: let the agent check the bytes. Costs reading them once before they are sent, and
            spares the agent to do it before the first download.

    Raises:
        LocalError: exposed already (``details["http_status"]`` is 409), too large (413) ...
        ArenaExhausted: the agent has no room for it.
        PeerLost: the agent cannot be reached, or broke the connection.
        PeerMissing: no answer after ``timeout`` seconds.
    """
    deadline = monotonic() + timeout
    view = byte_view(data)
    spec = TensorSpec.of(dtype, shape)
    if len(view) != spec.nbytes:
        raise InvalidArgument(f"{spec} has {spec.nbytes} bytes, its memory {len(view)}")
    query: dict[str, Any] = {"dtype": spec.dtype.label, "shape": spec.shape_text}
    query |= {} if max_downloads is None else {"max_downloads": max_downloads}
    query |= {} if ttl is None else {"ttl": ttl}
    headers = [("Content-Length", str(len(view))), ("Connection", "close")]
    if digest:
        headers.append(("Content-Digest", digest_header(hashlib.sha256(view).digest())))
    if len(view) > _ASK_FIRST:
        headers.append(("Expect", "100-continue"))
    target = f"/v1/tensors/{check_id(tensor_id)}?{urlencode(query)}"
    exchange = ClientExchange(address, "PUT", target, headers, token)
    with answered(address, tensor_id, timeout), connected(address, tensor_id, deadline) as sock:
        head = _send_body(sock, exchange, view, deadline)
        if head.status != 201:
            raise read_error(sock, head, address, deadline)


def _send_body(
    sock: socket.socket, exchange: ClientExchange, view: memoryview, deadline: float
) -> ResponseHead:
    if len(view) > _ASK_FIRST:
        send_views(sock, exchange.head, stall=STALL, deadline=deadline)
        head = exchange.read_head(sock, deadline)
        if head.status != 100:
            return head
        views: tuple[bytes | memoryview, ...] = (view,)
    else:
        views = (exchange.head, view)
    try:
        send_views(sock, *views, stall=STALL, deadline=deadline)
    except ConnectionError:
        # The agent may have said why before it closed.
        return exchange.read_head(sock, min(deadline, monotonic() + STALL))
    return exchange.read_head(sock, deadline)


def delete(
    address: str, tensor_id: str, *, token: str | None = None, timeout: float = 60.0
) -> bool:
    """Drop a tensor of another agent; return True if there was one. Raises as :func:`upload`."""
    deadline = monotonic() + timeout
    target = f"/v1/tensors/{check_id(tensor_id)}"
    exchange = ClientExchange(address, "DELETE", target, [("Connection", "close")], token)
    with answered(address, tensor_id, timeout), connected(address, tensor_id, deadline) as sock:
        send_views(sock, exchange.head, stall=STALL, deadline=deadline)
        head = exchange.read_head(sock, deadline)
        if head.status == 204:
            return True
        error = read_error(sock, head, address, deadline)
    if is_missing(error):
        return False
    raise error
