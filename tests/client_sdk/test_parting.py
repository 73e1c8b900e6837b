"""The description, for the others, of a rank that leaves."""

from __future__ import annotations

import sys

import pytest

from allfold._process.draining import Parting, at_exit, by_call


def test_a_rank_that_calls_shutdown_has_left_the_group() -> None:
    assert by_call() == Parting("left the group", failed=False)


def test_a_rank_that_leaves_while_an_exception_is_under_way_has_failed() -> None:
    try:
        raise RuntimeError("no such file\nand more")
    except RuntimeError:
        found = by_call()
    assert found == Parting(
        "left the group because of an exception (RuntimeError: no such file)", failed=True
    )


@pytest.mark.parametrize("code", [None, 0])
def test_a_rank_that_leaves_while_the_script_ends_well_has_not_failed(code: int | None) -> None:
    """``sys.exit(0)`` is an exception too, which a ``finally: shutdown()`` sees."""
    try:
        sys.exit(code)
    except SystemExit:
        found = by_call()
    assert found == Parting("left the group", failed=False)


@pytest.mark.parametrize(("code", "described"), [(3, "SystemExit: 3"), ("no", "SystemExit: no")])
def test_a_rank_that_leaves_while_the_script_ends_with_a_status_has_failed(
    code: int | str, described: str
) -> None:
    try:
        sys.exit(code)
    except SystemExit:
        found = by_call()
    assert found == Parting(f"left the group because of an exception ({described})", failed=True)


@pytest.mark.parametrize(
    ("error", "described"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RuntimeError("x" * 1000), f"RuntimeError: {'x' * 182} ..."),
    ],
)
def test_a_process_that_ends_with_an_exception_says_which(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, described: str
) -> None:
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert at_exit() == Parting(f"ended with an exception ({described})", failed=True)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert at_exit() == Parting("exited", failed=False), "it may be one of long ago"


def test_a_process_that_ends_without_an_exception_has_exited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert at_exit() == Parting("exited", failed=False)
