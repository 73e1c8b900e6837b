"""Several ranks in one process, whose rounds are exact, and DiLoCo's formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

import allfold
from allfold._handles.round import RoundResult
from allfold_core.errors import InvalidArgument

SECONDS = 20.0
Result = TypeVar("Result")
# An element of each tensor of a model counts for itself: rank r adds this to it in step t.
Inner = Callable[[int, int], float]


@dataclass
class Call:
    """What a rank gave to a round."""

    step: int
    numel: int
    options: dict[str, Any]


@dataclass
class Late:
    """What a round that has not waited for its rank tells it."""

    mean: float
    behind: int
    kept: bool = False


@dataclass
class Ranks:
    """Where the rounds of all ranks meet.

    Attributes:
        number: of ranks.
        fails: by number of a round, what its first wait raises, and whether it is over then.
        late: by number of a round, what it tells a rank that comes late.
    """

    number: int
    fails: dict[int, tuple[Exception, bool]] = field(default_factory=dict)
    late: dict[int, Late] = field(default_factory=dict)
    _met: Condition = field(default_factory=Condition)
    _rounds: list[dict[int, tuple[np.ndarray, float]]] = field(default_factory=list)

    def run(self, program: Callable[[FakeGroup], Result]) -> list[Result]:
        """Let each rank run a program in a thread of its own; their results in rank order."""
        with ThreadPoolExecutor(self.number) as pool:
            groups = [FakeGroup(self, rank) for rank in range(self.number)]
            return list(pool.map(program, groups, timeout=SECONDS))

    def bring(self, rank: int, number: int, tensor: np.ndarray, weight: float) -> None:
        with self._met:
            while len(self._rounds) <= number:
                self._rounds.append({})
            self._rounds[number][rank] = tensor.astype(np.float64), weight
            self._met.notify_all()

    def mean(self, number: int) -> np.ndarray:
        with self._met:
            there = self._rounds[number]
            assert self._met.wait_for(lambda: len(there) == self.number, SECONDS)
            total = sum(weight * tensor for tensor, weight in there.values())
            return cast(np.ndarray, total / sum(weight for _, weight in there.values()))


class FakeGroup:
    """The group as one rank has it, and all that the rank has called."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.calls: list[Call] = []
        self.refuses: set[int] = set()  # by their numbers
        self.step = 0

    @property
    def as_group(self) -> allfold.Group:
        return cast(allfold.Group, self)

    def empty(self, shape: int, dtype: torch.dtype, *, device: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def start_round(self, tensor: torch.Tensor, **options: Any) -> FakeRound:
        number = len(self.calls)
        self.calls.append(Call(self.step, tensor.numel(), options))
        if number in self.refuses:
            raise InvalidArgument("refused")
        self.ranks.bring(self.rank, number, tensor.numpy(), options["weight"])
        return FakeRound(self.ranks, number, tensor)


class FakeRound:
    def __init__(self, ranks: Ranks, number: int, tensor: torch.Tensor) -> None:
        self._ranks, self._number, self._tensor = ranks, number, tensor
        self._error: tuple[Exception, bool] | None = ranks.fails.get(number)
        self._is_over = False

    def is_completed(self) -> bool:
        return self._is_over

    def wait(self) -> RoundResult:
        if self._error is not None:
            error, self._is_over = self._error
            self._error = None
            raise error
        self._is_over = True
        if (late := self._ranks.late.get(self._number)) is not None:
            self._tensor.fill_(late.mean)
            told = (False, late.kept, late.behind)
            return RoundResult(self._tensor, 0, (0.0, 1.0), (1,), *told, 0, 0.0, 0.0)
        self._tensor.copy_(torch.from_numpy(self._ranks.mean(self._number)))
        there = tuple(range(self._ranks.number))
        return RoundResult(self._tensor, 0, (1.0,) * len(there), there, True, False, 0, 0, 0.0, 0.0)


def model_of(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    """Return tensors of zeros."""
    return nn.ParameterList(torch.zeros(size, dtype=dtype) for size in sizes)


def add(model: nn.ParameterList, amount: float) -> None:
    """Do an inner step."""
    with torch.no_grad():
        for each in model:
            each += amount


def reference(
    inner: Inner,
    weights: Sequence[float],
    *,
    steps: int,
    every: int,
    offset: int,
    delay: int,
    outer_lr: float,
    momentum: float,
) -> tuple[list[float], list[list[float]]]:
    """Return θ of one element after each step, and x of each rank, by the papers' formulas.

    Written for all ranks at once, and for one number: as on paper.
    """
    theta = m = 0.0
    x = [0.0 for _ in weights]
    outer: tuple[int, float, list[float]] | None = None  # when to apply, Δ, x of its begin
    thetas, locals_ = [], []
    for t in range(1, steps + 1):
        x = [value + inner(rank, t) for rank, value in enumerate(x)]
        if (t + offset) % every == 0:
            deltas = [theta - value for value in x]
            mean = sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)
            outer = t + delay, mean, list(x)
        if outer is not None and outer[0] == t:
            _, mean, began = outer
            outer = None
            m = momentum * m + mean
            theta = theta - outer_lr * (mean + momentum * m)
            x = [theta + (value - before) for value, before in zip(x, began, strict=True)]
        thetas.append(theta)
        locals_.append(x)
    return thetas, locals_
