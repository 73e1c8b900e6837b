"""Authorities that `allfold certs` does not make: ones that end soon, ones below others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority, which may have any number of certificates."""

    name: x509.Name
    key: EllipticCurvePrivateKey

    def certificate(self, days: int, *, by: Authority) -> bytes:
        """Return one that ends in some days, in PEM."""
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            by.name,
            self.name,
            self.key.public_key(),
            x509.random_serial_number(),
            now - timedelta(hours=1),
            now + timedelta(days=days),
        ).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        return builder.sign(by.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def authority_of(folder: Path) -> Authority:
    """Return the authority that signs in a folder of `allfold certs`."""
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    return Authority(certificate.subject, key)


def let_authority_end(folder: Path, days: int) -> None:
    """Replace the certificate of a folder's authority by one that ends in some days."""
    found = authority_of(folder)
    made = found.certificate(days, by=found)
    for each in (folder / "ca.crt", *folder.glob("*/ca.crt")):
        each.write_bytes(made)
