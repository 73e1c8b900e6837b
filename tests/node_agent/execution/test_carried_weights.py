"""Every code says which weight is in it, so a sum of several nodes has the sum of theirs."""

from __future__ import annotations

from allfold_agent.arithmetic.weights import CODE_WEIGHT
from allfold_agent.compilation.task_graph import CONTENT, INPUTS, Task, TaskKind
from allfold_agent.execution.carried_weights import CarriedWeights


def task(index: int, kind: TaskKind, *operands: int) -> Task:
    """A task that the next one by number waits for."""
    return Task(index, kind, 0, 8, operands=operands, successors=[index + 1])


def code(weight: float) -> memoryview:
    return memoryview(bytearray(b"elements" + CODE_WEIGHT.pack(weight)))


def encoded(carried: CarriedWeights, index: int) -> float:
    """The weight of a range, which is also behind its code."""
    made = code(-1.0)
    weight = carried.encode(task(index, TaskKind.ENCODE), made)
    assert made.tobytes() == b"elements" + CODE_WEIGHT.pack(weight)
    return weight


def test_what_nothing_was_folded_into_has_the_weight_of_the_node() -> None:
    assert encoded(CarriedWeights(2.5), 0) == 2.5


def test_a_fold_has_the_weights_of_its_operands() -> None:
    carried = CarriedWeights(2.5)
    carried.fold(task(0, TaskKind.FOLD, INPUTS, 7, 8), [code(1.0), code(4.0)])
    carried.fold(task(1, TaskKind.FOLD, 9, CONTENT), [code(16.0)])
    assert encoded(carried, 2) == 23.5
    assert encoded(carried, 9) == 2.5


def test_a_fold_that_this_node_has_no_part_in_has_no_weight_of_it() -> None:
    carried = CarriedWeights(2.5)
    carried.fold(task(0, TaskKind.FOLD, 7, 8), [code(1.0), code(4.0)])
    assert encoded(carried, 1) == 5.0
