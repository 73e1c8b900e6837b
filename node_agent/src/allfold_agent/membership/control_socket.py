"""The WebSocket of a control link, with one error seam: what comes out is text or an error."""

from __future__ import annotations

import ssl

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from allfold_agent.membership.orchestrator_client import Forgotten
from allfold_core.errors import AllfoldError, LocalError, OrchestratorUnreachable, ServiceError
from allfold_service.credentials import Credentials
from allfold_service.tls import TlsIdentity

_OPEN_SECONDS = 3.0
_CLOSE_SECONDS = 1.0
# A term of thousands of nodes, with all their ranks.
_MAX_BYTES = 64 << 20
# The orchestrator does not know the node; it cannot do its work at the moment (RFC 6455).
_UNKNOWN, _RESTART = 4404, 1012
_UNAUTHORIZED = 401


class _Connect(connect):
    """Follows no redirect, which would take the token to somebody else."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class ControlSocket:
    """One connection to the orchestrator at ``url``."""

    def __init__(self, url: str, connection: ClientConnection) -> None:
        self.url = url
        self._connection = connection

    async def send(self, text: str) -> None:
        """Send a message; one that the connection does not take any more is lost with it."""
        try:
            await self._connection.send(text)
        except ConnectionClosed:
            return  # `receive` tells

    async def receive(self) -> str | bytes:
        """Return the next message.

        Raises:
            Forgotten: the orchestrator has ended the link, as it does not know the node.
            ServiceError: it has no store at the moment, or the connection has ended.
        """
        try:
            return await self._connection.recv()
        except ConnectionClosed as error:
            raise _end_of_link(self.url, error) from error

    async def close(self) -> None:
        """End the connection in order, or after a second in any case."""
        await self._connection.close()

    def abort(self) -> None:
        """End the connection without waiting for the other end."""
        self._connection.transport.abort()


async def dial(url: str, node: str, credentials: Credentials) -> ControlSocket:
    """Open the control link of a node.

    Raises:
        LocalError: the orchestrator refuses the token.
        OrchestratorUnreachable: nobody answers there, or nobody who has control links.
    """
    try:
        connection = await _Connect(
            f"ws{url.removeprefix('http')}/v1/nodes/{node}/link",
            additional_headers=credentials.tokens.headers(),
            ssl=_context(url, credentials.tls),
            # A proxy of the environment is not meant for the services of one job.
            proxy=None,
            compression=None,
            ping_interval=None,  # BEATs say more
            open_timeout=_OPEN_SECONDS,
            close_timeout=_CLOSE_SECONDS,
            max_size=_MAX_BYTES,
        )
    except InvalidStatus as error:
        if error.response.status_code == _UNAUTHORIZED:
            raise LocalError(
                f"the orchestrator at {url} refuses the join token of this agent",
                http_status=_UNAUTHORIZED,
            ) from error
        raise OrchestratorUnreachable(
            f"{url} answered {error.response.status_code} to the control link of node {node}: is "
            "this an Allfold orchestrator? What is between has to let WebSockets pass."
        ) from error
    except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
        reason = str(error) or type(error).__name__
        raise OrchestratorUnreachable(
            f"the orchestrator at {url} opens no control link: {reason}"
        ) from error
    return ControlSocket(url, connection)


def _context(url: str, tls: TlsIdentity | None) -> ssl.SSLContext | None:
    """Return the context for a URL: for https without a certificate of our own, the library's."""
    return tls.client if tls is not None and url.startswith("https:") else None


def _end_of_link(url: str, closed: ConnectionClosed) -> AllfoldError | Forgotten:
    code, reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (None, "")
    if code == _UNKNOWN:
        return Forgotten(reason or "the orchestrator does not know this node")
    if code == _RESTART:
        return ServiceError(reason or f"the orchestrator at {url} cannot serve at the moment")
    return OrchestratorUnreachable(
        f"the control link to the orchestrator at {url} has ended: {reason or closed}"
    )
