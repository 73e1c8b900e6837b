"""The tiers of the tests: which cases ``make check``, ``make test`` and ``make test-all`` run.

A case is in one of these sets, by a marker that is put here:

* ``pure``: of the core and of membership. ``make check`` runs them; ``make test-all`` shows that
  they run every branch of both.
* ``long``: for ``make test-all`` alone, which runs each night. A case is long by its own marker, or
  because it shows for another shape what a case of the gate shows for one (``tests/tiers.py``).
* ``clients``: need libraries of others, in an environment of its own. ``make test-all`` runs them
  by ``make test-clients``.
* none of these: ``make test`` runs them after ``make check``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from _pytest.mark.structures import ParameterSet

NEVER_IN_THE_GATE = pytest.StashKey[set[str]]()
PURE = ("tests/control/", "tests/core/", "tests/orchestrator/membership/")
CLIENTS = "tests/clients/"


class One(NamedTuple):
    """Parameters of which the gate runs each test with one value.

    Attributes:
        where: what the node ids of the tests begin with: a folder, a file or a function.
        parameters: their names.
        preferred: values, as text; the first of them that a test has is kept, else its first value.
    """

    where: str
    parameters: tuple[str, ...]
    preferred: tuple[str, ...] = ()

    def is_for(self, nodeid: str, parameter: str) -> bool:
        """Return True for a parameter of a test that the rule names; the first such rule counts."""
        return nodeid.startswith(self.where) and parameter in self.parameters

    def kept(self, values: Sequence[str]) -> str:
        """Return the value that the gate keeps."""
        return next((each for each in self.preferred if each in values), values[0])


def long(*values: Any) -> ParameterSet:
    """Return values of parameters that the gate leaves to ``make test-all``."""
    return pytest.param(*values, marks=pytest.mark.long)


def one_in(number: int, cases: Sequence[Any]) -> list[Any]:
    """Return the cases of a test, of which the gate runs every so many-th."""
    return [
        case if place % number == 0 else long(*case if type(case) is tuple else (case,))
        for place, case in enumerate(cases)
    ]


def mark(config: pytest.Config, items: Sequence[pytest.Item], gate: Sequence[One]) -> None:
    """Give each case the marker of its set; note the functions of which the gate runs no case."""
    left_out = _left_out(items, gate)
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for item in items:
        if item.nodeid.startswith(PURE):
            item.add_marker("pure")
        if item.nodeid.startswith(CLIENTS):
            item.add_marker("clients")
        if item.nodeid in left_out:
            item.add_marker("long")
        in_gate = item.get_closest_marker("long") is None
        seen[in_gate].add(_function(item).rpartition("::")[2])
    config.stash[NEVER_IN_THE_GATE] = seen[False] - seen[True]


def _left_out(items: Iterable[pytest.Item], gate: Sequence[One]) -> set[str]:
    """Return the cases with a value that the gate does not keep."""
    cases: dict[tuple[str, str, One], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        for name, value in _parameters(item).items():
            if rule := next((each for each in gate if each.is_for(item.nodeid, name)), None):
                cases[_function(item), name, rule][str(value)].append(item.nodeid)
    return {
        nodeid
        for (_, _, rule), by_value in cases.items()
        for value, nodeids in by_value.items()
        if value != rule.kept(list(by_value))
        for nodeid in nodeids
    }


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _parameters(item: pytest.Item) -> Mapping[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}
