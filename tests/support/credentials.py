"""Credentials of tests: with a token, or without any; certificates of an authority of their own."""

from __future__ import annotations

from pathlib import Path

from allfold.cli._certs.folder import CertificateFolder
from allfold_agent.http.transport import Transport
from allfold_service.credentials import Credentials, Tokens
from allfold_service.tls import DEFAULT_NAME, TlsIdentity


def with_token(token: str | None = None) -> Credentials:
    """Return credentials without TLS."""
    return Credentials(Tokens(token or ""))


def transport(token: str | None = None) -> Transport:
    """Return the transport of an agent without TLS."""
    return Transport(with_token(token))


def certificates(folder: Path, *holders: str, name: str = DEFAULT_NAME) -> CertificateFolder:
    """Return a folder with an authority, and a certificate for each holder."""
    made = CertificateFolder(folder)
    made.add_authority()
    for holder in holders:
        made.issue(holder, [], name, 90)
    return made


def with_tls(folder: Path, token: str = "", *, name: str = DEFAULT_NAME) -> Credentials:
    """Return credentials with the certificate in a folder."""
    return Credentials(Tokens(token), TlsIdentity(str(folder), name))
