"""allfold_core is algebra: standard library only, no input or output, no clock, no threads."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import allfold_core

MODULES = sorted(Path(allfold_core.__file__).parent.rglob("*.py"))
IMPURE = {
    "asyncio",
    "http",
    "os",
    "random",
    "select",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "time",
}


def imported(path: Path) -> set[str]:
    """The top-level packages that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in {path}"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_the_standard_library_is_imported(path: Path) -> None:
    assert imported(path) <= sys.stdlib_module_names | {"allfold_core"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_nothing_reaches_outside_the_process(path: Path) -> None:
    assert not imported(path) & IMPURE
