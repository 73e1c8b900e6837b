"""The folder that ``allfold certs`` keeps: the authority, and a folder for each certificate.

ca.crt          all authorities that are trusted, the one that signs first
ca.key          its key
<name>/         what ALLFOLD_TLS_DIR names: tls.crt, tls.key, ca.crt
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from allfold.cli._certs.authority import (
    KeyPair,
    end_of,
    fits,
    for_browsers,
    is_signed_by,
    issue,
    names_of,
    new_authority,
)
from allfold_core.errors import InvalidArgument
from allfold_service.tls import AUTHORITIES, CERTIFICATE, KEY

_AUTHORITY_KEY = "ca.key"
BROWSERS = "browser.p12"
_ADVICE = (
    f"{AUTHORITIES} and {_AUTHORITY_KEY} of one authority must both be there; if they are lost, "
    "--new-authority makes others"
)
# Keychains import nothing that has no password; it protects no more than the key beside it.
BROWSERS_PASSWORD = "allfold"
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


class CertificateFolder:
    """Certificates of one deployment.

    Raises:
        InvalidArgument: the folder cannot be made or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"cannot make the folder {path}: {error.strerror}") from error

    def is_new(self) -> bool:
        """Return True if there has never been an authority, also none whose key is elsewhere."""
        return not any((self.path / each).exists() for each in (AUTHORITIES, _AUTHORITY_KEY))

    def add_authority(self) -> None:
        """Make an authority that signs from now on; those of before are still trusted."""
        before = self._read(AUTHORITIES) if (self.path / AUTHORITIES).exists() else b""
        made = new_authority()
        # In this order: where it is interrupted, the one of before still signs.
        self._trust(made.certificate + before)
        _write(self.path / _AUTHORITY_KEY, made.key, secret=True)

    def forget_old_authorities(self) -> None:
        """Trust only the authority that signs.

        Raises:
            InvalidArgument: a certificate here is of another one.
        """
        signing = self._signing().certificate
        others = sorted(
            each.name
            for each in self._holders()
            if (found := _certificate(each)) is not None and not is_signed_by(found, signing)
        )
        if others:
            raise InvalidArgument(
                f"nobody would accept {', '.join(others)} any more, whose certificates are of an "
                "earlier authority: make them anew first, or remove their folders"
            )
        self._trust(signing)

    def issue(self, holder: str, hosts: Sequence[str], name: str, days: int) -> bytes:
        """Make a certificate of a server, or make it anew; return it.

        Args:
            hosts: more names; without any, a certificate that is there keeps its names.
            name: of the deployment.

        Raises:
            InvalidArgument: the holder has a certificate of a client, which must not become more;
                or the authority has ended.
        """
        before = self._names_of(holder)
        if before == []:
            raise InvalidArgument(
                f"{self.path / holder} is a client's: renew it with --client, or take another name"
            )
        names = list(dict.fromkeys([name, *(hosts or before or [])]))
        pair = issue(self._valid(), holder, names, days)
        self._place(holder, pair)
        return pair.certificate

    def issue_client(self, holder: str, days: int) -> bytes:
        """Make a certificate of a client, and the file that browsers import; return the first.

        Raises:
            InvalidArgument: the holder is a service, which could not start with it; or the
                authority has ended.
        """
        if self._names_of(holder):
            raise InvalidArgument(
                f"{self.path / holder} is a service's: renew it without --client, or take another "
                "name"
            )
        pair = issue(self._valid(), holder, [], days)
        self._place(holder, pair)
        packed = for_browsers(pair, f"Allfold {holder}", BROWSERS_PASSWORD.encode())
        _write(self.path / holder / BROWSERS, packed, secret=True)
        return pair.certificate

    def _valid(self) -> KeyPair:
        """Return the authority that signs, whose certificates others accept."""
        signing = self._signing()
        ended = end_of(signing.certificate)
        if ended <= datetime.now(UTC):
            raise InvalidArgument(
                f"the authority that signs, in {self.path / AUTHORITIES}, ended on "
                f"{ended:%Y-%m-%d}, and nobody accepts a certificate of it: make another with "
                f"allfold certs {self.path} --new-authority, then every certificate anew "
                "(allfold certs --help has the steps)"
            )
        return signing

    def _signing(self) -> KeyPair:
        key = self._read(_AUTHORITY_KEY)
        for each in _PEM.findall(self._read(AUTHORITIES)):
            if fits(each, key):
                return KeyPair(each, key)
        raise InvalidArgument(
            f"{self.path / _AUTHORITY_KEY} is the key of no certificate in "
            f"{self.path / AUTHORITIES}: {_ADVICE}"
        )

    def _read(self, name: str) -> bytes:
        path = self.path / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"cannot read {path}: {error.strerror}; {_ADVICE}") from error

    def _names_of(self, holder: str) -> list[str] | None:
        """Return the names in a holder's certificate; ``None`` if it has none yet."""
        path = self.path / holder / CERTIFICATE
        found = _certificate(path.parent)
        try:
            return None if found is None else names_of(found)
        except ValueError as error:
            raise InvalidArgument(
                f"{path} is not a certificate in PEM: remove it, and name all its hosts"
            ) from error

    def _place(self, holder: str, pair: KeyPair) -> None:
        folder = self.path / holder
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"cannot make the folder {folder}: {error.strerror}") from error
        _write(folder / AUTHORITIES, self._read(AUTHORITIES))
        _write(folder / KEY, pair.key, secret=True)
        _write(folder / CERTIFICATE, pair.certificate)

    def _trust(self, certificates: bytes) -> None:
        _write(self.path / AUTHORITIES, certificates)
        for folder in self._holders():
            _write(folder / AUTHORITIES, certificates)

    def _holders(self) -> Iterator[Path]:
        return (each.parent for each in self.path.glob(f"*/{CERTIFICATE}"))


def _certificate(folder: Path) -> bytes | None:
    path = folder / CERTIFICATE
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a file in one step: a service that reads it meanwhile sees the old or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600 if secret else 0o644)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}") from error
