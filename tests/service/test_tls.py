"""The certificate of a service: files that fit together, or an error that says what does not."""

from __future__ import annotations

import logging
import shutil
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from allfold_core.errors import InvalidArgument
from allfold_service import tls
from allfold_service.tls import TlsIdentity, end_of, identity
from tests.support.authorities import Authority, authority_of, let_authority_end
from tests.support.credentials import certificates

DAY = 24 * 3600


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> ssl.SSLObject:
    """Return the server's end of a connection in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname="10.0.0.1")
    called = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (caller, called, caller, called):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    called.getpeercert()  # raises unless the handshake is done
    return called


def holder(connected: ssl.SSLObject) -> str:
    """Return the name in the certificate of the other end."""
    shown: Any = connected.getpeercert()
    ((_, name),) = shown["subject"][0]
    return str(name)


def test_two_certificates_of_one_authority_accept_each_other(tmp_path: Path) -> None:
    certificates(tmp_path, "a", "b")
    one, other = (TlsIdentity(str(tmp_path / each)) for each in "ab")
    connected = shake_hands(one.client, other.server)
    assert connected.version() == "TLSv1.3"
    assert holder(connected) == "a"


def test_a_certificate_of_another_authority_is_refused_by_both_ends(tmp_path: Path) -> None:
    certificates(tmp_path / "ours", "a")
    certificates(tmp_path / "theirs", "b")
    one = TlsIdentity(str(tmp_path / "ours" / "a"))
    other = TlsIdentity(str(tmp_path / "theirs" / "b"))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(one.client, other.server)
    # The one that is called looks, too: with a client that trusts everybody.
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    folder = tmp_path / "theirs" / "b"
    careless.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(careless, one.server)


def test_a_client_without_a_certificate_is_refused(tmp_path: Path) -> None:
    certificates(tmp_path, "a")
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake_hands(anybody, TlsIdentity(str(tmp_path / "a")).server)


def test_older_versions_of_tls_are_refused(tmp_path: Path) -> None:
    certificates(tmp_path, "a")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        shake_hands(old, TlsIdentity(str(tmp_path / "a")).server)


def test_a_clients_certificate_serves_nobody_but_opens_every_port(tmp_path: Path) -> None:
    made = certificates(tmp_path, "a")
    made.issue_client("me", 1)
    mine = TlsIdentity(str(tmp_path / "me"), serves=False)
    shake_hands(mine.client, TlsIdentity(str(tmp_path / "a")).server)
    with pytest.raises(InvalidArgument, match="purpose"):
        TlsIdentity(str(tmp_path / "me"))


def test_a_renewed_certificate_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    made = certificates(tmp_path, "a")
    found = TlsIdentity(str(tmp_path / "a"))
    client, server, before = found.client, found.server, found.expires
    made.issue("a", [], "allfold", 120)
    assert found.expires > before + 28 * DAY
    assert holder(shake_hands(client, server)) == "a"


def ends(file: Path) -> float:
    """Return the end of the first certificate in a file."""
    return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp()


def test_a_certificate_ends_with_its_authority_at_the_latest(tmp_path: Path) -> None:
    made, folder = certificates(tmp_path, "a"), tmp_path / "a"
    found = TlsIdentity(str(folder))
    assert found.expires == ends(folder / "tls.crt")
    let_authority_end(tmp_path, 1)
    assert found.expires == ends(tmp_path / "ca.crt") < ends(folder / "tls.crt")
    made.add_authority()  # it has not signed this one
    assert found.expires < ends(folder / "tls.crt")
    made.issue("a", [], "allfold", 90)
    assert found.expires == ends(folder / "tls.crt")


def test_an_authority_between_counts_though_only_the_certificates_file_has_it(
    tmp_path: Path,
) -> None:
    certificates(tmp_path, "a")
    folder, signing = tmp_path / "a", authority_of(tmp_path)
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
    above = Authority(root, ec.generate_private_key(ec.SECP256R1()))
    between = signing.certificate(30, by=above)
    (folder / "ca.crt").write_bytes(above.certificate(365, by=above))
    (folder / "tls.crt").write_bytes((folder / "tls.crt").read_bytes() + between)
    end = x509.load_pem_x509_certificate(between).not_valid_after_utc.timestamp()
    assert TlsIdentity(str(folder)).expires == end < ends(folder / "tls.crt")


def shown(subject: str, issuer: str, year: int) -> dict[str, Any]:
    """Return what ssl shows of a certificate that ends in a year."""
    return {"subject": subject, "issuer": issuer, "notAfter": f"Jan  1 00:00:00 {year} GMT"}


@pytest.mark.parametrize(
    ("authorities", "year"),
    [
        ([], 2040),
        ([shown("root", "root", 2050)], 2040),
        ([shown("root", "root", 2030)], 2030),
        ([shown("other", "other", 2030)], 2040),
        ([shown("root", "root", 2020), shown("root", "root", 2030)], 2030),
        ([shown("root", "top", 2039), shown("top", "top", 2031)], 2031),
        ([shown("root", "top", 2031), shown("top", "root", 2032)], 2031),
    ],
)
def test_the_authority_that_signed_counts_and_all_above_it(
    authorities: list[dict[str, Any]], year: int
) -> None:
    end = end_of(shown("a", "root", 2040), authorities)
    assert end == datetime(year, 1, 1, tzinfo=UTC).timestamp()


def test_a_context_names_the_authorities_of_the_one_in_force(tmp_path: Path) -> None:
    made = certificates(tmp_path, "a")
    found = TlsIdentity(str(tmp_path / "a"))
    assert [len(each.get_ca_certs()) for each in (found.client, found.server)] == [1, 1]
    made.add_authority()
    assert [len(each.get_ca_certs()) for each in (found.client, found.server)] == [2, 2]


def test_an_authority_is_changed_in_three_steps_without_a_moment_of_refusal(
    tmp_path: Path,
) -> None:
    made = certificates(tmp_path, "a", "b")
    one, other = (TlsIdentity(str(tmp_path / each)) for each in "ab")

    def all_accept_each_other() -> None:
        for client, server in ((one.client, other.server), (other.client, one.server)):
            shake_hands(client, server)

    old = tmp_path / "elsewhere" / "old"
    shutil.copytree(tmp_path / "a", old)
    made.add_authority()
    all_accept_each_other()
    made.issue("a", [], "allfold", 1)  # one of them is first
    all_accept_each_other()
    made.issue("b", [], "allfold", 1)
    all_accept_each_other()
    made.forget_old_authorities()
    all_accept_each_other()
    forgotten = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    forgotten.check_hostname, forgotten.verify_mode = False, ssl.CERT_NONE
    forgotten.load_cert_chain(old / "tls.crt", old / "tls.key")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(forgotten, one.server)


def test_a_key_that_is_changed_before_its_certificate_leaves_the_old_pair_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates(tmp_path, "a", "b")
    found = TlsIdentity(str(tmp_path / "a"))
    (tmp_path / "a" / "tls.key").write_bytes((tmp_path / "b" / "tls.key").read_bytes())
    with caplog.at_level(logging.WARNING):
        shake_hands(found.client, found.server)
    assert "the old one stays in force" in caplog.text
    (tmp_path / "a" / "tls.crt").write_bytes((tmp_path / "b" / "tls.crt").read_bytes())
    connected = shake_hands(found.client, found.server)
    assert holder(connected) == "b"


def test_a_file_that_vanishes_while_it_is_read_leaves_the_old_ones_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates(tmp_path, "a")
    found = TlsIdentity(str(tmp_path / "a"))
    monkeypatch.setattr(tls, "_check_file", lambda _: None)
    for name in ("tls.key", "ca.crt"):
        (tmp_path / "a" / name).unlink()
        shake_hands(found.client, found.server)


def test_a_name_that_only_people_read_does_not_count(tmp_path: Path) -> None:
    """An authority that says nothing of purposes, and the deployment's name as common name."""
    made = certificates(tmp_path, "a")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "allfold")])
    signer = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    signing = serialization.load_pem_private_key((tmp_path / "ca.key").read_bytes(), None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    signed = x509.CertificateBuilder(
        signer.subject,
        subject,
        key.public_key(),
        x509.random_serial_number(),
        signer.not_valid_before_utc,
        signer.not_valid_after_utc,
    ).sign(signing, hashes.SHA256())
    made.issue_client("me", 1)
    pem = serialization.Encoding.PEM
    (tmp_path / "me" / "tls.crt").write_bytes(signed.public_bytes(pem))
    (tmp_path / "me" / "tls.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    with pytest.raises(InvalidArgument, match="is not for the name 'allfold'"):
        TlsIdentity(str(tmp_path / "me"))


def without(name: str, folder: Path) -> None:
    (folder / name).unlink()


def with_scrap(name: str, folder: Path) -> None:
    (folder / name).write_text("scrap")


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("spoil", [without, with_scrap])
def test_a_file_that_is_not_there_or_not_pem_is_named(
    tmp_path: Path, spoil: object, name: str
) -> None:
    certificates(tmp_path, "a")
    spoil(name, tmp_path / "a")  # type: ignore[operator]
    with pytest.raises(InvalidArgument) as caught:
        TlsIdentity(str(tmp_path / "a"))
    assert str(tmp_path / "a" / name) in caught.value.message


def test_files_that_do_not_fit_together_say_so(tmp_path: Path) -> None:
    certificates(tmp_path / "1", "a")
    certificates(tmp_path / "2", "b")
    a, b = tmp_path / "1" / "a", tmp_path / "2" / "b"
    with pytest.raises(InvalidArgument, match=r"ALLFOLD_TLS_NAME"):
        TlsIdentity(str(a), "other")
    shutil.copy(b / "ca.crt", a / "ca.crt")
    with pytest.raises(InvalidArgument, match=r"tls\.crt is not signed by an authority in ca\.crt"):
        TlsIdentity(str(a))
    shutil.copy(b / "tls.key", a / "tls.key")
    with pytest.raises(InvalidArgument, match=r"is not the key of"):
        TlsIdentity(str(a))


@pytest.mark.parametrize(
    "name",
    ["allfold..x", ".allfold", "allfold.", "a" * 64, "a\0b", "two words", "-a", "\ud800", "a.b/c"],
)
def test_a_name_that_no_certificate_can_have_is_refused_with_the_setting(
    tmp_path: Path, name: str
) -> None:
    certificates(tmp_path, "a")
    with pytest.raises(InvalidArgument, match="ALLFOLD_TLS_NAME must be a DNS name") as caught:
        identity(str(tmp_path / "a"), name)
    assert caught.value.message.endswith(f"got {name!r}")


@pytest.mark.parametrize("name", ["a" * 63, "a_b.example.org", "10.0.0.1", "::1", "*.example.org"])
def test_a_name_may_be_any_host_or_address(tmp_path: Path, name: str) -> None:
    certificates(tmp_path, "a", name=name)
    assert TlsIdentity(str(tmp_path / "a"), name).name == name


def test_letters_of_others_are_those_of_their_coded_form(tmp_path: Path) -> None:
    certificates(tmp_path, "a", name="xn--bcher-kva.example")
    TlsIdentity(str(tmp_path / "a"), "bücher.example")


def test_without_a_folder_there_is_no_tls() -> None:
    assert identity("", "") is None
