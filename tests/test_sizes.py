"""The check of sizes: what is too large, and exceptions that are no longer needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import sizes


@pytest.fixture
def source(tmp_path: Path) -> Path:
    room = tmp_path / "package" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text('"""A room."""\n')
    (room / "long.py").write_text("x = 1\n" * 401)
    for number in range(14):
        (room / f"part{number}.py").write_text("class _Own: ...\n")
    for name in ("part0", "part1"):
        (room / f"{name}.py").write_text("class Thing: ...\n")
    return tmp_path


COMPLAINTS = {
    "module": "module package/room/long.py has 401 lines, and may have 400: split it by what it is "
    "about",
    "room": "room package/room has 15 modules, and may have 14: merge modules that are about one "
    "thing, or make a room of some",
    "class": "class Thing has 2 modules, and may have 1: give it a name of its own "
    "(package/room/part0.py, package/room/part1.py)",
}
KNOWN = {
    "module": {"package/room/long.py": 401},
    "room": {"package/room": 15},
    "class": {"Thing": 2},
}


def test_what_is_too_large_is_named_with_its_size_and_what_to_do(source: Path) -> None:
    assert list(sizes.complaints(sizes.measured([source]), {})) == list(COMPLAINTS.values())


def test_a_known_exception_passes_until_it_grows(source: Path) -> None:
    assert list(sizes.complaints(sizes.measured([source]), KNOWN)) == []
    with (source / "package" / "room" / "long.py").open("a") as module:
        module.write("x = 2\n")
    (found,) = sizes.complaints(sizes.measured([source]), KNOWN)
    assert found.startswith("module package/room/long.py has 402 lines, and may have 401: split")


@pytest.mark.parametrize(
    ("kind", "name", "unit"), [("module", "gone.py", "lines"), ("room", "gone", "modules")]
)
def test_an_exception_that_is_no_longer_needed_has_to_go(kind: str, name: str, unit: str) -> None:
    (found,) = sizes.complaints(sizes.Sizes(), {kind: {name: 500}})
    assert found == f"{kind} {name} has 0 {unit}: take it out of [{kind}] in tools/sizes.toml"


def test_the_totals_are_told(source: Path) -> None:
    assert str(sizes.measured([source])) == (
        "416 lines in 16 modules: 26 lines a module; 1 names of classes stand in several"
    )
