"""A certificate authority of a deployment's own (X.509, RFC 5280), with keys on P-256."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from allfold_core.errors import InvalidArgument
from allfold_service.tls import HOST_NAME

_AUTHORITY_LASTS = timedelta(days=3650)
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
        .not_valid_after(now + _AUTHORITY_LASTS)
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
        days: for which it is valid, unless the authority ends earlier.
    """
    signer = x509.load_pem_x509_certificate(authority.certificate)
    signing = _load_key(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        x509.CertificateBuilder(
            signer.subject, _name(holder), key.public_key(), x509.random_serial_number()
        )
        .not_valid_before(now - _BEFORE)
        .not_valid_after(min(now + timedelta(days=days), signer.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_signed_by(signing), critical=False)
    )
    if names:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        alternatives = x509.SubjectAlternativeName([general_name(each) for each in names])
        builder = builder.add_extension(alternatives, critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return _packed(builder.sign(signing, hashes.SHA256()), key)


def fits(certificate: bytes, key: bytes) -> bool:
    """Return True if both are in PEM, and the key is that of the certificate."""
    try:
        owner = x509.load_pem_x509_certificate(certificate).public_key()
        return owner == _load_key(key).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
        return False


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    """Return True if a certificate is one of an authority, whose certificate this is."""
    try:
        signer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def end_of(certificate: bytes) -> datetime:
    """Return the time at which a certificate in PEM ends."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def days_left(certificate: bytes) -> int:
    """Return the full days for which a certificate in PEM is valid yet."""
    # One that has just been made for a day is still one of a day.
    return (end_of(certificate) - datetime.now(UTC) + timedelta(minutes=1)).days


def names_of(certificate: bytes) -> list[str]:
    """Return the DNS names and IP addresses that a certificate in PEM is for.

    Raises:
        ValueError: it is not one.
    """
    try:
        found = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return []
    return [str(each.value) for each in found.value]


def for_browsers(pair: KeyPair, holder: str, password: bytes) -> bytes:
    """Return certificate and key in PKCS #12 (RFC 7292), which browsers import."""
    return pkcs12.serialize_key_and_certificates(
        holder.encode(),
        _load_key(pair.key),
        x509.load_pem_x509_certificate(pair.certificate),
        None,
        serialization.BestAvailableEncryption(password),
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def general_name(text: str) -> x509.GeneralName:
    """Return the form that a host name or an IP address has in a certificate.

    Raises:
        InvalidArgument: it is neither.
    """
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        if HOST_NAME.fullmatch(text):
            return x509.DNSName(text)
    raise InvalidArgument(
        f"{text!r} is neither a host name nor an IP address (other letters than those of ASCII are "
        "written as xn--...)"
    )


def _load_key(key: bytes) -> ec.EllipticCurvePrivateKey:
    loaded = serialization.load_pem_private_key(key, password=None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise InvalidArgument("the key is not on an elliptic curve, as those of allfold certs are")
    return loaded


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
