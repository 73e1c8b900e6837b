"""``allfold certs``: what it makes can be used, and no slip of its user breaks a deployment."""

from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from allfold.cli._certs import authority
from allfold.cli._certs import folder as certificate_folder
from allfold.cli._certs.authority import names_of
from allfold.cli._main import cli
from allfold_core.errors import InvalidArgument
from allfold_service.tls import TlsIdentity


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["certs", *map(str, words)])


def made(*words: str | Path) -> str:
    """Run the command, which succeeds; what it says."""
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str | Path) -> str:
    """Run the command, which is used wrongly; what it says, in one line."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    return line


def names(folder: Path) -> list[str]:
    return names_of((folder / "tls.crt").read_bytes())


def test_it_makes_folders_that_services_and_clients_can_use(tmp_path: Path) -> None:
    assert "a new authority" in made(tmp_path, "a", "b")
    assert "a new authority" not in made(tmp_path, "me", "--client")
    for name in ("a", "b"):
        TlsIdentity(str(tmp_path / name))
    TlsIdentity(str(tmp_path / "me"), serves=False)


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    made(tmp_path, "a")
    made(tmp_path, "me", "--client")
    for secret in ("ca.key", "a/tls.key", "me/tls.key", "me/browser.p12"):
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600, secret


def test_a_renewed_certificate_keeps_its_hosts_until_others_are_named(tmp_path: Path) -> None:
    made(tmp_path, "a", "--host", "a.example.org", "--host", "::1")
    assert names(tmp_path / "a") == ["allfold", "a.example.org", "::1"]
    before = (tmp_path / "a" / "tls.crt").read_bytes()
    made(tmp_path, "a")
    assert (tmp_path / "a" / "tls.crt").read_bytes() != before
    assert names(tmp_path / "a") == ["allfold", "a.example.org", "::1"]
    made(tmp_path, "a", "--host", "*.example.org")
    assert names(tmp_path / "a") == ["allfold", "*.example.org"]


@pytest.mark.parametrize("host", ["two words", "https://a:7400", "ünicode", "a..b", "-a", "a:7400"])
def test_a_host_that_is_none_is_refused_before_anything_is_made(tmp_path: Path, host: str) -> None:
    assert repr(host) in refused(tmp_path / "certs", "a", "--host", host)
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize("name", ["ca.key", "ca.crt", ".", "..", "a/b", "-x", ""])
def test_a_name_that_would_be_another_place_is_refused(tmp_path: Path, name: str) -> None:
    assert repr(name) in refused(tmp_path / "certs", "--", name)
    assert not (tmp_path / "certs").exists()


def test_where_the_authoritys_key_is_elsewhere_no_other_authority_takes_its_place(
    tmp_path: Path,
) -> None:
    made(tmp_path, "a")
    trusted = (tmp_path / "ca.crt").read_bytes()
    key = (tmp_path / "ca.key").rename(tmp_path / "elsewhere")
    said = refused(tmp_path, "b")
    assert "ca.key" in said
    assert "--new-authority" in said
    assert (tmp_path / "ca.crt").read_bytes() == trusted
    key.rename(tmp_path / "ca.key")
    made(tmp_path, "b")
    made(tmp_path, "--new-authority")
    assert (tmp_path / "ca.crt").read_bytes().endswith(trusted)


def test_a_clients_certificate_never_becomes_a_services_nor_the_reverse(tmp_path: Path) -> None:
    made(tmp_path, "me", "--client")
    made(tmp_path, "a")
    assert "--client" in refused(tmp_path, "me")
    assert "without --client" in refused(tmp_path, "a", "--client")
    assert names(tmp_path / "me") == []
    made(tmp_path, "me", "--client")
    made(tmp_path, "a")


def test_an_authority_is_forgotten_only_once_nobody_has_a_certificate_of_it(tmp_path: Path) -> None:
    made(tmp_path, "a", "b")
    made(tmp_path, "me", "--client")
    made(tmp_path, "--new-authority")
    made(tmp_path, "a")
    assert "accept b, me any more" in refused(tmp_path, "--forget-old-authorities")
    made(tmp_path, "b")
    made(tmp_path, "me", "--client")
    made(tmp_path, "--forget-old-authorities")
    assert (tmp_path / "ca.crt").read_text().count("BEGIN CERTIFICATE") == 1
    TlsIdentity(str(tmp_path / "b"))


def test_no_certificate_outlives_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "_AUTHORITY_LASTS", timedelta(days=30, minutes=-5))
    assert "for 29 days (not 365: its authority ends then" in made(tmp_path, "a")
    assert "a client, for 29 days (not 60:" in made(tmp_path, "me", "--client", "--days", "60")
    assert ", for 29 days\n" in made(tmp_path, "a", "--days", "29")
    made(tmp_path, "a")
    end = authority.end_of((tmp_path / "ca.crt").read_bytes())
    for holder in ("a", "me"):
        assert authority.end_of((tmp_path / holder / "tls.crt").read_bytes()) == end


def test_a_certificate_is_for_as_many_days_as_asked_for(tmp_path: Path) -> None:
    for days in (1, 365, 3650):
        assert made(tmp_path, "a", "--days", str(days)).endswith(f"for {days} days\n")


def test_an_authority_that_has_ended_signs_nothing_and_can_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, "a")
    made(tmp_path, "me", "--client")
    with monkeypatch.context() as patch:
        patch.setattr(authority, "_AUTHORITY_LASTS", timedelta(minutes=-1))
        made(tmp_path, "--new-authority")
    before = [(tmp_path / each / "tls.crt").read_bytes() for each in ("a", "me")]
    for words in (["a"], ["me", "--client"], ["b"]):
        said = refused(tmp_path, *words)
        assert f"the authority that signs, in {tmp_path / 'ca.crt'}, ended on 20" in said
        assert f"allfold certs {tmp_path} --new-authority" in said
    assert [(tmp_path / each / "tls.crt").read_bytes() for each in ("a", "me")] == before
    assert not (tmp_path / "b").exists()
    made(tmp_path, "--new-authority")
    made(tmp_path, "a")
    made(tmp_path, "me", "--client")
    made(tmp_path, "--forget-old-authorities")
    TlsIdentity(str(tmp_path / "a"))


@pytest.mark.parametrize("writes", range(6))
def test_a_change_of_authority_that_is_interrupted_leaves_one_that_signs(
    tmp_path: Path, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, "a", "b")
    write, left = certificate_folder._write, iter(range(writes))

    def write_some(path: Path, content: bytes, *, secret: bool = False) -> None:
        if next(left, None) is None:
            raise InvalidArgument("no space is left")
        write(path, content, secret=secret)

    with monkeypatch.context() as patch:
        patch.setattr(certificate_folder, "_write", write_some)
        run(tmp_path, "--new-authority")
    made(tmp_path, "a")
    for name in ("a", "b"):
        TlsIdentity(str(tmp_path / name))


@pytest.mark.parametrize("file", ["ca.key", "ca.crt", "a/tls.crt"])
def test_scrap_in_a_file_is_told_with_its_name(tmp_path: Path, file: str) -> None:
    made(tmp_path, "a")
    (tmp_path / file).write_text("scrap")
    assert file in refused(tmp_path, "a")


def test_a_certificate_that_cannot_be_read_is_told_with_its_name(tmp_path: Path) -> None:
    made(tmp_path, "a")
    (tmp_path / "a" / "tls.crt").unlink()
    (tmp_path / "a" / "tls.crt").mkdir()
    for words in (["a"], ["--forget-old-authorities"]):
        assert f"cannot read {tmp_path / 'a' / 'tls.crt'}: Is a directory" in refused(
            tmp_path, *words
        )


def test_places_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot make the folder" in refused(tmp_path / "file", "a")
    made(tmp_path)
    assert "Not a directory" in refused(tmp_path, "file")
