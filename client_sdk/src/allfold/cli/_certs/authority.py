"""A certificate authority of a deployment's own (X.509, RFC 5280), with keys on P-256."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY_YEARS = 10
# The clocks of machines that have just started may be behind.
_BEFORE = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


def new_authority() -> KeyPair:
    """Return the certificate and key of a new authority, valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    # The serial number tells two authorities of one deployment apart.
    number = x509.random_serial_number()
    name = _name(f"Allfold certificate authority {number:x}"[:64])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), number)
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + timedelta(days=365 * _AUTHORITY_YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _packed(certificate, key)


def issue(authority: KeyPair, holder: str, names: Sequence[str], days: int) -> KeyPair:
    """Return a certificate of an authority, and its key.

    Args:
        holder: who has it, for people.
        names: DNS names and IP addresses that it is for; without any it is a client's only.
        days: for which it is valid.
    """
    signer = x509.load_pem_x509_certificate(authority.certificate)
    signing = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        x509.CertificateBuilder(
            signer.subject, _name(holder), key.public_key(), x509.random_serial_number()
        )
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_signed_by(signing), critical=False)
    )
    if names:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        alternatives = x509.SubjectAlternativeName([_general_name(each) for each in names])
        builder = builder.add_extension(alternatives, critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return _packed(builder.sign(signing, hashes.SHA256()), key)


def names_of(certificate: bytes) -> list[str]:
    """Return the DNS names and IP addresses that a certificate in PEM is for."""
    try:
        found = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return []
    return [str(each.value) for each in found.value]


def for_browsers(pair: KeyPair, holder: str, password: bytes) -> bytes:
    """Return certificate and key in PKCS #12 (RFC 7292), which browsers import."""
    key = serialization.load_pem_private_key(pair.key, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return pkcs12.serialize_key_and_certificates(
        holder.encode(),
        key,
        x509.load_pem_x509_certificate(pair.certificate),
        None,
        serialization.BestAvailableEncryption(password),
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed_by(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _packed(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
