"""Mutual TLS: one certificate for both directions, from a folder that may change at any time.

Every service of a deployment has a certificate of one certificate authority, which should sign for
nothing else. Clients show theirs, too. Whatever address a client connects to, the server's
certificate must carry one name, that of the deployment: addresses of pods are in no certificate.

Only TLS 1.3 is spoken, and no session is resumed, so that every connection is checked anew.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from socket import socket
from typing import Any

from allfold_core.errors import InvalidArgument
from allfold_service.watched_files import WatchedFiles

CERTIFICATE, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
DEFAULT_NAME = "allfold"
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_NAME = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_LABEL}(\.{_LABEL})*")
_FILES = (CERTIFICATE, KEY, AUTHORITIES)
_ADVICE = f"the folder must hold {CERTIFICATE}, {KEY} and {AUTHORITIES}; allfold certs makes one"


@dataclass(frozen=True, slots=True)
class _Contexts:
    client: ssl.SSLContext
    server: ssl.SSLContext
    expires: float


class TlsIdentity:
    """The certificate of a service or a command, and whom it trusts.

    Args:
        folder: path of the folder with ``tls.crt``, ``tls.key`` and ``ca.crt``, in PEM.
        name: the name that servers' certificates must carry.
        serves: whether this certificate is a server's, too.

    Attributes:
        client: the context for connections to others. It asks for the deployment's name, whatever
            name it is told.
        server: the context for connections of others, who must show a certificate.

    Raises:
        InvalidArgument: no certificate can have the name, or the files do not fit together, or
            would not be accepted by others.
    """

    def __init__(self, folder: str, name: str = DEFAULT_NAME, *, serves: bool = True) -> None:
        _check_name(name)
        self.folder = folder
        self.name = name
        place = Path(folder)
        self._files = WatchedFiles(
            [place / each for each in _FILES],
            lambda: _load(place, name, serves),
            f"the certificate in {folder}",
        )
        self.client: ssl.SSLContext = _InForce(lambda: self._files.content.client, name)
        self.server: ssl.SSLContext = _InForce(lambda: self._files.content.server, None)

    @property
    def expires(self) -> float:
        """The time from which on nobody accepts the certificate in force, in seconds since 1970.

        It is the end of the certificate, or of an authority above it that ends earlier.
        """
        return self._files.content.expires


def identity(folder: str, name: str, *, serves: bool = True) -> TlsIdentity | None:
    """Return the identity in a folder; ``None`` without a folder: no TLS."""
    return TlsIdentity(folder, name or DEFAULT_NAME, serves=serves) if folder else None


def end_of(certificate: Mapping[str, Any], authorities: Sequence[Mapping[str, Any]]) -> float:
    """Return the time at which a certificate ends, or an authority above it that ends earlier.

    Of several authorities with one name, as while they are changed, the one that ends last counts.

    Args:
        certificate: as :meth:`ssl.SSLSocket.getpeercert` returns it.
        authorities: as :meth:`ssl.SSLContext.get_ca_certs` returns them.
    """
    end = float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    signer = certificate["issuer"]
    if signer == certificate["subject"]:
        return end
    signers = [each for each in authorities if each["subject"] == signer]
    others = [each for each in authorities if each["subject"] != signer]  # two may sign each other
    return min(end, max((end_of(each, others) for each in signers), default=end))


class _InForce(ssl.SSLContext):
    """A context that gives each connection to the one in force: libraries keep the one they got."""

    _current: Callable[[], ssl.SSLContext]
    _name: str | None

    def __new__(cls, current: Callable[[], ssl.SSLContext], name: str | None) -> _InForce:
        # A client's protocol also for servers: no connection is ever made with this context.
        made: _InForce = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._current = current
        made._name = name
        return made

    def __init__(self, *_: Any) -> None:
        """Nothing is left to be done."""

    def wrap_socket(
        self,
        sock: socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        return self._current().wrap_socket(
            sock,
            server_side,
            do_handshake_on_connect,
            suppress_ragged_eofs,
            self._name or server_hostname,
            session,
        )

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        name = self._name or server_hostname
        return self._current().wrap_bio(incoming, outgoing, server_side, name, session)

    def get_ca_certs(self, binary_form: bool = False) -> Any:
        return self._current().get_ca_certs(binary_form)


def _check_name(name: str) -> None:
    try:
        ip_address(name)
    except ValueError:
        if not _is_host_name(name):
            raise InvalidArgument(
                "ALLFOLD_TLS_NAME must be a DNS name (labels of 1 to 63 letters, digits, _ and -, "
                f"with dots between, up to 253 characters) or an IP address, got {name!r}"
            ) from None


def _is_host_name(name: str) -> bool:
    try:
        # As ssl does, which takes other letters, too.
        return HOST_NAME.fullmatch(name.encode("idna").decode()) is not None
    except UnicodeError:
        return False


def _load(folder: Path, name: str, serves: bool) -> _Contexts:
    for each in _FILES:
        _check_file(folder / each)
    client, server = (_context(folder, each) for each in (_CLIENT, _SERVER))
    server.verify_mode = ssl.CERT_REQUIRED
    server.num_tickets = 0
    return _Contexts(client, server, _try_out(folder, client, server, name, serves))


_CLIENT, _SERVER = ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER


def _check_file(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"cannot read {path}: {error.strerror}; {_ADVICE}")


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False  # it is a name for people, of clients, too
    certificate, key, authorities = (folder / each for each in _FILES)
    _trust(context, authorities)
    try:
        context.load_cert_chain(certificate, key, password=lambda: _no_password(key))
    except ssl.SSLError as error:
        raise InvalidArgument(
            f"{key} is not the key of {certificate}, or one of them is not in PEM: {error.reason}"
        ) from error
    except OSError as error:
        raise _unreadable(folder, error) from error
    return context


def _trust(context: ssl.SSLContext, authorities: Path) -> None:
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise InvalidArgument(f"{authorities} has no certificate in PEM: {error.reason}") from error
    except OSError as error:  # it has just been removed
        raise _unreadable(authorities, error) from error


def _no_password(key: Path) -> str:
    raise InvalidArgument(f"{key} has a password; a service needs a key without one")


def _try_out(
    folder: Path, client: ssl.SSLContext, server: ssl.SSLContext, name: str, serves: bool
) -> float:
    """Check the certificate as others will, by a handshake; return when it expires.

    Raises:
        InvalidArgument: it would not be accepted.
    """
    certificate = folder / CERTIFICATE
    caller = client
    if not serves:  # only the client's side of it counts
        caller = _context(folder, _CLIENT)
        caller.check_hostname = False
        caller.verify_mode = ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        caller.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    # A flight of messages each way, and one more: a handshake of TLS 1.3 has no more.
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            raise InvalidArgument(_why(certificate, name, error)) from error
        except ssl.SSLError as error:
            raise InvalidArgument(f"{certificate} cannot be used: {error.reason}") from error
    return end_of(ends[1].getpeercert() or {}, _authorities(client, certificate))


def _authorities(context: ssl.SSLContext, certificate: Path) -> list[Mapping[str, Any]]:
    """Return those that a context trusts, and the intermediate ones in a certificate's file."""
    between = ssl.SSLContext(_CLIENT)
    _trust(between, certificate)
    return [*context.get_ca_certs(), *between.get_ca_certs()]


def _why(certificate: Path, name: str, error: ssl.SSLCertVerificationError) -> str:
    reason = error.verify_message
    if "ostname mismatch" in reason:
        return (
            f"{certificate} is not for the name {name!r}, which every service's certificate must "
            "carry: make one that does (allfold certs), or set ALLFOLD_TLS_NAME to what all have"
        )
    if "purpose" in reason:
        return (
            f"{certificate} is not for servers and clients, as that of a service must be, but for "
            f"one of them ({reason}); one of allfold certs NAME --client is for commands"
        )
    if "issuer" in reason or "self-signed" in reason or "self signed" in reason:
        return f"{certificate} is not signed by an authority in {AUTHORITIES}: {reason}"
    return f"{certificate} would not be accepted by others: {reason}"


def explain(address: str, error: OSError) -> str:
    """Return in words why a connection with TLS failed, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {address} is not accepted: {error.verify_message}; both ends need "
            "certificates of one authority and one ALLFOLD_TLS_NAME"
        )
    reason = getattr(error, "reason", None) or str(error)
    if reason in _NOT_TLS:
        return f"{address} does not speak TLS: set ALLFOLD_TLS_DIR there, too"
    if reason in _REFUSED:
        return (
            f"{address} does not accept the certificate of this end ({reason}): both ends need "
            "certificates of one authority that are valid now"
        )
    return f"no TLS connection to {address}: {reason}"


_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_LAYER_FAILURE",
)
_REFUSED = (
    "TLSV1_ALERT_UNKNOWN_CA",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED",
    "SSLV3_ALERT_BAD_CERTIFICATE",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
)
