"""The tiers of the tests: which cases ``make check``, ``make test`` and ``make test-all`` run.

A case is in one of three sets, by a marker that is put here:

* ``pure``: of the core and of membership. ``make check`` runs them, and shows that they run every
  branch of both.
* ``long``: for ``make test-all`` alone, which runs each night. A case is long by its own marker, or
  because it shows for another shape, size or seed what a case of the gate shows for one (``GATE``).
* neither: ``make test`` runs them after ``make check``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import pytest

PURE = ("tests/core/", "tests/orchestrator/membership/")


class Kept(NamedTuple):
    """The cases of some parametrized tests that the gate runs; it leaves out the others.

    Attributes:
        where: what their node ids begin with: a folder, a file or a function.
        values: by parameter, which of its values the gate keeps.
    """

    where: str
    values: Mapping[str, frozenset[str]]

    def leaves_out(self, nodeid: str, parameters: Mapping[str, object]) -> bool:
        """Return True for a case with a value that the gate does not keep."""
        return nodeid.startswith(self.where) and any(
            name in parameters and str(parameters[name]) not in values
            for name, values in self.values.items()
        )


def mark(items: Iterable[pytest.Item], gate: Iterable[Kept]) -> None:
    """Give each case the marker of its set."""
    rules = list(gate)
    for item in items:
        for name in _sets(item, rules):
            item.add_marker(name)


def _sets(item: pytest.Item, gate: list[Kept]) -> Iterator[str]:
    if item.nodeid.startswith(PURE):
        yield "pure"
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if any(kept.leaves_out(item.nodeid, parameters) for kept in gate):
        yield "long"
