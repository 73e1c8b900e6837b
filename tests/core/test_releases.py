"""The releases whose services work together."""

from __future__ import annotations

import pytest

from allfold_core.schema import work_together


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.2.0", "0.2.0"),
        ("0.2.0", "0.2.17"),
        ("0.2.0", "0.2.1.dev3+g12"),
        ("1.0.0", "1.9.3"),
        ("", "0.2.0"),
        ("0.2.0", "unknown"),
        ("0.0.0+checkout", "0.0.0"),
    ],
)
def test_patches_work_together_and_so_does_what_is_not_known(one: str, other: str) -> None:
    assert work_together(one, other)
    assert work_together(other, one)


@pytest.mark.parametrize(("one", "other"), [("0.2.9", "0.3.0"), ("0.9.0", "1.0.0"), ("1.2", "2.0")])
def test_releases_that_may_change_the_wire_do_not(one: str, other: str) -> None:
    assert not work_together(one, other)
    assert not work_together(other, one)
