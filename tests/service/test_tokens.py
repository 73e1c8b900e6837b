"""The join tokens of a service: one, several, or those of a file that changes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from allfold_core.errors import InvalidArgument
from allfold_service.credentials import Tokens


def test_without_a_token_nothing_is_sent_and_none_is_asked_for() -> None:
    for tokens in (Tokens(), Tokens(""), Tokens(" \n")):
        assert not tokens
        assert tokens.headers() == {}
        assert not tokens.accept("Bearer anything")
        assert not tokens.accept("Bearer ")


def test_the_first_token_is_sent_and_all_are_accepted() -> None:
    tokens = Tokens("new,old")
    assert tokens.headers() == {"Authorization": "Bearer new"}
    assert tokens.accept("Bearer new")
    assert tokens.accept("bearer  old ")
    for wrong in ("", "Bearer", "Bearer ", "Bearer ol", "Bearer new,old", "Basic new", "new"):
        assert not tokens.accept(wrong), wrong


@pytest.mark.parametrize(
    "text", ["secret\r\nlines", "secret\0", "secret ü", "secret two", "secret,", ",secret", "a,,b"]
)
def test_a_token_that_a_header_cannot_carry_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(InvalidArgument, match="token") as caught:
        Tokens(text)
    assert "secret" not in str(caught.value)


def test_the_tokens_of_a_file_count_where_there_are_no_others(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("kept\n")
    assert Tokens("", str(file)).sent == "kept"
    assert Tokens("given", str(file)).sent == "given"


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    tokens = Tokens("", str(file))
    assert tokens.accept("Bearer old")
    file.write_text("old,new")
    assert tokens.accept("Bearer new")
    assert tokens.sent == "old"
    file.write_text("new")
    assert not tokens.accept("Bearer old")


def test_a_file_that_another_one_takes_the_place_of_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes does it: a link is set to another folder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
    link = tmp_path / "data"
    link.symlink_to("one")
    tokens = Tokens("", str(link / "token"))
    assert tokens.sent == "one"
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(link)
    assert tokens.sent == "two"


@pytest.mark.parametrize("content", ["", "two words", None])
def test_a_change_that_is_of_no_use_leaves_the_old_token_in_force(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    tokens = Tokens("", str(file))
    file.unlink()
    if content is not None:
        file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert tokens.sent == "old"
        assert tokens.accept("Bearer old")
    (told,) = caplog.records  # once, although it was looked at twice
    assert "the old one stays in force" in told.getMessage()
    file.write_text("new")
    assert tokens.sent == "new"


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "cannot be read"), ("", "is empty"), (b"\xff\xfe", "not text")]
)
def test_a_file_without_a_token_is_an_error_that_names_it(
    tmp_path: Path, content: str | bytes | None, expected: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidArgument, match=expected) as caught:
        Tokens("", str(file), variable="ALLFOLD_TOKEN")
    assert f"ALLFOLD_TOKEN_FILE ({file})" in caught.value.message


def test_a_token_may_have_a_name_which_is_not_sent_and_does_not_open_anything() -> None:
    tokens = Tokens("team-a=new,team-a=old,\nplain,b=c2VjcmV0==")
    assert tokens.headers() == {"Authorization": "Bearer new"}
    names = {"new": "team-a", "old": "team-a", "plain": "", "c2VjcmV0==": "b"}
    for token, name in names.items():
        assert tokens.name_of(f"Bearer {token}") == name
    for wrong in ("team-a=new", "team-a", "b=c2VjcmV0=="):
        assert tokens.name_of(f"Bearer {wrong}") is None
        assert not tokens.accept(f"Bearer {wrong}")


@pytest.mark.parametrize("token", ["c2VjcmV0=", "c2VjcmV0==", "a=b=c", "=a", "a/b=c", "="])
def test_a_token_that_has_no_name_is_sent_as_it_stands(token: str) -> None:
    assert Tokens(token).sent == token
    assert Tokens(token).name_of(f"Bearer {token}") == ""


def test_what_is_sent_of_a_token_with_a_name_has_none_itself() -> None:
    """Programs pass it on in the same variable."""
    for text in ("a=b", "a=b==", "a=-"):
        assert Tokens(Tokens(text).sent).sent == Tokens(text).sent


def test_the_names_of_a_file_change_with_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a=one")
    tokens = Tokens("", str(file))
    assert tokens.name_of("Bearer one") == "a"
    file.write_text("a=two,longer=one")
    assert tokens.name_of("Bearer one") == "longer"
