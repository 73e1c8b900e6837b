"""The connections of data ports: plain or with TLS, as the agent's credentials say."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from allfold_agent.http.server import close_gently, refuse_blindly
from allfold_agent.http.socket_io import arm, shortcut
from allfold_agent.runtime.tunnels import Tunnels
from allfold_core.errors import InvalidArgument, LocalError
from allfold_service.addresses import parse_address
from allfold_service.credentials import Credentials
from allfold_service.tls import TlsIdentity, explain

_PLAIN = Credentials()
_CLOSE_SECONDS = 1.0
_LINGER_SECONDS = 0.2


class Transport:
    """Opens connections to other agents, and takes theirs.

    Requests and answers go through the connection that it returns, which is an
    :class:`ssl.SSLSocket` where there is TLS. Who goes on with another protocol asks for
    :meth:`plain` first.

    Args:
        credentials: of this agent.
        threads: that encrypt and decrypt for protocols other than HTTP.

    Attributes:
        tokens: the join tokens.
        tls: the certificate; ``None`` without TLS.
    """

    def __init__(self, credentials: Credentials = _PLAIN, threads: int = 1) -> None:
        self.tokens = credentials.tokens
        self.tls: TlsIdentity | None = credentials.tls
        self._tunnels = None if self.tls is None else Tunnels(threads)

    def shortcut(self, host: str, port: int) -> str | None:
        """Return the Unix socket beside a data port; ``None`` without one, and with TLS."""
        return None if self.tls is not None else shortcut(host, port)

    def connect_shortly(self, address: str, deadline: float) -> socket.socket:
        """A connection for much data: the shortcut where there is one, else as :meth:`connect`."""
        path = self.shortcut(*parse_address(address))
        if path is not None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                arm(sock, deadline)
                sock.connect(path)
            except OSError:
                sock.close()  # an address that only leads to loopback here, through a tunnel, say
            else:
                return sock
        return self.connect(address, deadline)

    def connect(self, address: str, deadline: float) -> socket.socket:
        """A connection over TCP, without delay of small packets.

        Raises:
            OSError: there is none to be had; with TLS, the message says what to do.
        """
        sock = _connect(address, deadline)
        if self.tls is None:
            return sock
        secure = self.tls.client.wrap_socket(sock, do_handshake_on_connect=False)
        try:
            _shake_hands(secure, address, deadline)
        except BaseException:
            secure.close()
            raise
        return secure

    def accepted(self, sock: socket.socket) -> socket.socket:
        """Return a connection of another agent, to be greeted before it is used. Never waits.

        Raises:
            OSError: the other end has broken it already.
        """
        if self.tls is None or sock.family == socket.AF_UNIX:
            return sock
        sock.getpeername()  # SSLSocket would lose one that has been reset
        return self.tls.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def greet(self, sock: socket.socket, deadline: float) -> None:
        """Check the certificate of who has connected.

        Raises:
            OSError: it has none that counts here, or the deadline passes.
        """
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(sock, ssl.SSLSocket):
            try:
                _shake_hands(sock, "the other end", deadline)
            except ConnectionAbortedError as error:
                _turn_away(sock, error.__cause__)
                raise

    def plain(self, sock: socket.socket) -> socket.socket:
        """Return a connection for another protocol than HTTP: a plain socket."""
        if not isinstance(sock, ssl.SSLSocket):
            return sock
        assert self._tunnels is not None
        return self._tunnels.open(sock)

    def close(self) -> None:
        """End the threads; what was written is on its way then, if the peers read."""
        if self._tunnels is not None:
            self._tunnels.close(_CLOSE_SECONDS)


def _shake_hands(sock: ssl.SSLSocket, address: str, deadline: float) -> None:
    try:
        arm(sock, deadline)
        sock.do_handshake()
    except ssl.SSLError as error:
        raise ConnectionAbortedError(explain(address, error)) from error


def _turn_away(sock: ssl.SSLSocket, cause: BaseException | None) -> None:
    """Leave a client the time to read why it is turned away: the alert, or an answer in plain."""
    with socket.socket(fileno=sock.detach()) as plain, suppress(OSError):
        if getattr(cause, "reason", "") == "HTTP_REQUEST":
            error = LocalError("this port speaks TLS: set ALLFOLD_TLS_DIR there, too")
            refuse_blindly(plain, error, timeout=_LINGER_SECONDS)
        close_gently(plain, _LINGER_SECONDS)


def _connect(address: str, deadline: float) -> socket.socket:
    host, port = parse_address(address)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise InvalidArgument(f"{host[:300]!r} cannot be a host: {error}") from None
    except OSError:
        # Without file descriptors it fails with whatever error there was before: say which it is.
        socket.socket().close()
        raise
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, proto, _, place in places:
        sock = socket.socket(family, kind, proto)
        try:
            arm(sock, deadline)
            sock.connect(place)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def shut_down(sock: socket.socket) -> None:
    """End a connection that another thread uses, which then sees its end.

    Raises:
        OSError: it is not connected.
    """
    # Not that of SSLSocket, which would take its state from under the other thread.
    socket.socket.shutdown(sock, socket.SHUT_RDWR)
