"""The time of an op, the order of events in a turn, and that every op is checked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from allfold.cli._bench.data import Array, Bench
from benchmarks.computing import Computing
from benchmarks.conductor import Budget, Conductor
from benchmarks.control import Message
from benchmarks.devices import Host, Operation
from benchmarks.figures import Figures, op_seconds
from benchmarks.fleet import Fleet
from benchmarks.libraries import Handle
from benchmarks.plan import MIB, TOKEN, Case
from benchmarks.workloads import take_turn
from benchmarks.workloads.collective import CollectiveWorkload

ROOT = Path(__file__).parents[2]


def test_an_op_takes_from_the_last_call_to_the_last_return() -> None:
    calls = [[0.0, 10.0], [3.0, 10.5], [1.0, 12.0]]
    returns = [[4.0, 12.5], [3.5, 12.25], [5.0, 12.125]]
    assert op_seconds(calls, returns) == [5.0 - 3.0, 12.5 - 12.0]


def test_a_rank_that_is_late_costs_the_library_nothing() -> None:
    late = 1000.0
    assert op_seconds([[0.0], [late]], [[late + 2.0], [late + 1.0]]) == [2.0]


def test_one_slow_op_of_a_hundred_is_the_maximum_and_not_the_99th_percentile() -> None:
    figures = Figures.of([1.0] * 99 + [50.0], wrong=0, cpu=0.0)
    assert (figures.median, figures.p99, figures.mean) == (1.0, 1.0, 1.49)
    assert Figures.of([1.0] * 98 + [50.0] * 2, wrong=0, cpu=0.0).p99 == 50.0


def test_short_ops_have_as_many_turns_as_they_need() -> None:
    budget = Budget(ops=500)
    assert budget.rounds_of(Case("all_reduce", 4096), 20) == (25, 100)
    assert budget.rounds_of(Case("all_reduce", 4096), 3) == (167, 167)
    assert budget.rounds_of(Case("all_reduce", MIB), 3) == (5, 100)
    assert budget.rounds_of(TOKEN, 8) == Budget().rounds_of(TOKEN, 8) == (7, 100)


class Ranks:
    """Ranks with one library that answer what a test wants them to."""

    pids: tuple[int, ...] = ()

    def __init__(self, library: str, answers: dict[str, list[Message]]) -> None:
        self._answers = {"prepare": [{"contestants": [library]}], "release": []} | answers
        self.asked: list[tuple[str, Any]] = []

    def ask(self, do: str, **parameters: Any) -> list[Message]:
        self.asked.append((do, parameters.get("ops")))
        return self._answers[do]


def test_a_sample_has_the_ops_of_all_ranks_and_what_was_wrong_on_any() -> None:
    first = {"calls": [0.0, 5.0], "returns": [2.0, 9.0], "cpu": 0.5}
    second = {"calls": [1.0, 6.0], "returns": [1.5, 6.5], "cpu": 0.25}
    ranks = Ranks("any", {"run": [first, second], "check": [{"wrong": 0}, {"wrong": 3}]})
    conductor = Conductor([cast("Fleet", ranks)], [], Budget())
    with conductor.prepared(Case("all_reduce", 4096)):
        sample = conductor.sample("any", 4)
    assert (sample.seconds, sample.cpu, sample.wrong) == ([1.0, 3.0], 0.75, 3)
    # One op to warm up is checked too.
    assert ranks.asked == [("prepare", None), ("run", 4), ("check", 5), ("release", None)]


def test_each_library_is_asked_of_the_ranks_that_have_it() -> None:
    turn: Message = {"calls": [0.0], "returns": [1.0], "cpu": 0.5}
    answers: dict[str, list[Message]] = {"run": [turn], "check": [{"wrong": 0}]}
    one, other = Ranks("allfold", answers), Ranks("openmpi", answers)
    conductor = Conductor([cast("Fleet", one), cast("Fleet", other)], [], Budget())
    with conductor.prepared(Case("all_reduce", 4096)) as contestants:
        assert contestants == ["allfold", "openmpi"]
        conductor.sample("openmpi", 1)
    assert [do for do, _ in one.asked] == ["prepare", "release"]
    assert [do for do, _ in other.asked] == ["prepare", "run", "check", "release"]


# --- a turn


class Diary:
    """A workload that writes down what is done with it."""

    contestants = ("one",)

    def __init__(self) -> None:
        self.events: list[str] = []

    def operation(self, _contestant: str, /) -> Operation:
        return lambda: self.events.append("op")

    def write(self, _contestant: str, op: int, /) -> None:
        self.events.append(f"write {op}")

    def keep(self, _contestant: str, op: int, /) -> None:
        self.events.append(f"keep {op}")

    def count_wrong(self, _contestant: str, _ops: int, /) -> int:
        return 0


def test_between_the_two_readings_of_the_clock_there_is_the_op_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diary, ticks = Diary(), count()

    def clock() -> float:
        diary.events.append("clock")
        return float(next(ticks))

    monkeypatch.setattr(time, "monotonic", clock)
    times = take_turn(diary, "one", 2, lambda: diary.events.append("compute"))
    op = ["clock", "op", "clock"]
    assert diary.events == [
        *("compute", "write 0", *op, "keep 0"),
        *("compute", "write 1", *op),
    ]
    assert (times.calls, times.returns) == ([0.0, 2.0], [1.0, 3.0])


def test_the_computing_is_as_many_products_as_take_that_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Iterator[int] = count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 0.25)
    assert Computing(2.0).products == 8
    assert Computing(0.01).products == 1


# --- the check


class Faulty:
    """A library of one rank whose op ``broken`` leaves the tensor as the op before did."""

    name, wire = "faulty", "native"

    def __init__(self, broken: int | None) -> None:
        self._broken = broken

    def supports(self, _: str, /) -> bool:
        return True

    def empty(self, _: int, /) -> Array | None:
        return None

    def operation(self, bench: Bench, source: Array, target: Array) -> Operation:
        del bench, target
        ops, last = count(), np.zeros_like(source)

        def operate() -> None:
            if next(ops) == self._broken:
                np.copyto(source, last)
            np.copyto(last, source)

        return operate

    def barrier(self) -> Operation:
        raise NotImplementedError("these tests measure all-reduces alone")

    def start_all_reduce(self, tensor: Array) -> Handle:
        raise NotImplementedError("these tests measure all-reduces alone")

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("broken", [None, 1, 4, 6])
def test_the_result_of_an_op_before_is_wrong_wherever_it_is_in_a_turn(broken: int | None) -> None:
    case = Case("all_reduce", 4096)
    workload = CollectiveWorkload(case, [Faulty(broken)], Host(), rank=0, nodes=1, world=1)
    take_turn(workload, "faulty", 7)
    wrong = workload.count_wrong("faulty", 7)
    assert (wrong > 1000) if broken else (wrong == 0)


def test_a_token_of_the_suite_is_one_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    from tensor_parallel_llm import SHAPE

    assert TOKEN.size == 2 * SHAPE.layers * SHAPE.width * np.dtype(np.float32).itemsize
