"""The folder that ``allfold certs`` keeps: the authority, and a folder for each certificate.

ca.crt          all authorities that are trusted, the one that signs first
ca.key          its key
<name>/         what ALLFOLD_TLS_DIR names: tls.crt, tls.key, ca.crt
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from allfold.cli._certs.authority import KeyPair, for_browsers, issue, names_of, new_authority
from allfold_core.errors import InvalidArgument
from allfold_core.security.tls import AUTHORITIES, CERTIFICATE, KEY

_AUTHORITY_KEY = "ca.key"
_BROWSERS = "browser.p12"
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

    def has_authority(self) -> bool:
        """Return True if there is one that signs."""
        return (self.path / _AUTHORITY_KEY).exists()

    def add_authority(self) -> None:
        """Make an authority that signs from now on; those of before are still trusted."""
        before = self._read(AUTHORITIES) if self.has_authority() else b""
        made = new_authority()
        _write(self.path / _AUTHORITY_KEY, made.key, secret=True)
        self._trust(made.certificate + before)

    def forget_old_authorities(self) -> None:
        """Trust only the authority that signs.

        Raises:
            InvalidArgument: a certificate here is of another one.
        """
        signing = self._signing().certificate
        self._trust(signing)

    def issue(self, holder: str, hosts: Sequence[str], name: str, days: int) -> list[str]:
        """Make a certificate of a server, or make it anew; return the names that it is for.

        Args:
            hosts: more names; without any, a certificate that is there keeps its names.
            name: of the deployment.
        """
        there = self.path / holder / CERTIFICATE
        kept = names_of(there.read_bytes()) if there.exists() and not hosts else []
        names = list(dict.fromkeys([name, *hosts, *kept]))
        self._place(holder, issue(self._signing(), holder, names, days))
        return names

    def issue_client(self, holder: str, days: int) -> Path:
        """Make a certificate of a client; return the file that browsers import."""
        pair = issue(self._signing(), holder, [], days)
        self._place(holder, pair)
        for_import = self.path / holder / _BROWSERS
        packed = for_browsers(pair, f"Allfold {holder}", BROWSERS_PASSWORD.encode())
        _write(for_import, packed, secret=True)
        return for_import

    def _signing(self) -> KeyPair:
        certificates = _PEM.findall(self._read(AUTHORITIES))
        if not certificates:
            raise InvalidArgument(f"{self.path / AUTHORITIES} has no certificate in PEM")
        return KeyPair(certificates[0], self._read(_AUTHORITY_KEY))

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise InvalidArgument(f"cannot read {self.path / name}: {error.strerror}") from error

    def _place(self, holder: str, pair: KeyPair) -> None:
        folder = self.path / holder
        folder.mkdir(exist_ok=True)
        _write(folder / AUTHORITIES, self._read(AUTHORITIES))
        _write(folder / KEY, pair.key, secret=True)
        _write(folder / CERTIFICATE, pair.certificate)

    def _trust(self, certificates: bytes) -> None:
        _write(self.path / AUTHORITIES, certificates)
        for folder in self._holders():
            _write(folder / AUTHORITIES, certificates)

    def _holders(self) -> Iterator[Path]:
        return (each.parent for each in self.path.glob(f"*/{CERTIFICATE}"))


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
