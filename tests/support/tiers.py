"""The tiers of the tests: which cases ``make check``, ``make test`` and ``make test-all`` run.

A case is in one of these sets, by a marker that is put here:

* ``pure``: of the core and of membership. ``make check`` runs them, and shows that they run every
  branch of both.
* ``long``: for ``make test-all`` alone, which runs each night. A case is long by its own marker, or
  because it shows for another shape, size or seed what a case of the gate shows for one (``GATE``).
* ``clients``: need libraries of others, in an environment of its own. ``make test-all`` runs them
  by ``make test-clients``.
* none of these: ``make test`` runs them after ``make check``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from _pytest.mark.structures import ParameterSet

NEVER_IN_THE_GATE = pytest.StashKey[set[str]]()
PURE = ("tests/core/", "tests/orchestrator/membership/")
CLIENTS = "tests/clients/"


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


def long(*values: Any) -> ParameterSet:
    """Return values of parameters that the gate leaves to ``make test-all``."""
    return pytest.param(*values, marks=pytest.mark.long)


def one_in(number: int, cases: Sequence[Any]) -> list[Any]:
    """Return the cases of a test, of which the gate runs every so many-th."""
    return [
        case if place % number == 0 else long(*case if type(case) is tuple else (case,))
        for place, case in enumerate(cases)
    ]


def mark(config: pytest.Config, items: Iterable[pytest.Item], gate: Iterable[Kept]) -> None:
    """Give each case the marker of its set; note the functions of which the gate runs no case."""
    rules = list(gate)
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for item in items:
        for name in _sets(item, rules):
            item.add_marker(name)
        in_gate = item.get_closest_marker("long") is None
        seen[in_gate].add(item.nodeid.rpartition("::")[2].partition("[")[0])
    config.stash[NEVER_IN_THE_GATE] = seen[False] - seen[True]


def _sets(item: pytest.Item, gate: list[Kept]) -> Iterator[str]:
    if item.nodeid.startswith(PURE):
        yield "pure"
    if item.nodeid.startswith(CLIENTS):
        yield "clients"
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if any(kept.leaves_out(item.nodeid, parameters) for kept in gate):
        yield "long"
