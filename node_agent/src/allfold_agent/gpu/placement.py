"""On which GPU an op is folded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def fold_on(homes: Sequence[int], reaches: Callable[[int, int], bool]) -> int:
    """The GPU that reaches the memory of most ranks; of equals the one of the lowest rank.

    Args:
        homes: the GPU that has the memory of each rank with memory on one, in rank order.
        reaches: whether kernels on one GPU can use the memory of another.
    """
    if not homes:
        raise ValueError("no rank has memory on a GPU")
    reached = {home: sum(reaches(home, other) for other in homes) for home in homes}
    return max(reached, key=reached.__getitem__)
