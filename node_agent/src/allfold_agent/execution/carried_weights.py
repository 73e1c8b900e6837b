"""The weights in what a node encodes in a weighted mean: its own, and those of what was folded in.

What rounding costs a sum is owed to a later sum by its weight. A node that encodes a sum of several
nodes has not got the weights of all ranks yet, so every code has its own behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from allfold_agent.arithmetic.weights import CODE_WEIGHT
from allfold_agent.compilation.task_graph import CONTENT, INPUTS, Task


class CarriedWeights:
    """The weight in the range of each task of one op.

    Args:
        own: the sum of the weights of this node's ranks, which is in all that nothing was folded
            into.
    """

    def __init__(self, own: float) -> None:
        self._own = own
        self._in_content: dict[int, float] = {}

    def fold(self, task: Task, codes: Sequence[memoryview]) -> None:
        """Take in the weights behind the codes that a task has folded."""
        weight = sum(CODE_WEIGHT.unpack(code[-CODE_WEIGHT.size :])[0] for code in codes)
        if CONTENT in task.operands:
            weight += self._of(task)
        elif INPUTS in task.operands:
            weight += self._own
        self._leave(task, weight)

    def encode(self, task: Task, code: memoryview) -> float:
        """Write the weight in the range of a task behind its code; returns it."""
        weight = self._of(task)
        CODE_WEIGHT.pack_into(code, len(code) - CODE_WEIGHT.size, weight)
        self._leave(task, weight)
        return weight

    def _of(self, task: Task) -> float:
        return self._in_content.get(task.index, self._own)

    def _leave(self, task: Task, weight: float) -> None:
        """Whoever reads the range next waits for the task that wrote it."""
        for index in task.successors:
            self._in_content[index] = weight
