"""The parameters that DiLoCo synchronizes, in fragments: what is agreed on, and the outer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from allfold._handles.round import Round


@dataclass(frozen=True)
class Flight:
    """A round in flight: of ``delta``, in place; ``began`` are the parameters of its begin."""

    round: Round
    delta: Tensor
    began: Tensor
    due: int  # step
    number: int  # of rounds that this rank had called with it
    brings: bool  # what this rank has done counts


class Fragment:
    """Some parameters, and what all ranks have agreed on about them: θ and m, flat, in float32.

    Its rounds are at an ``offset``, and their rounding errors are a ``series``.
    """

    def __init__(self, parameters: Sequence[Tensor], series: str, offset: int) -> None:
        self._parameters = parameters
        self.series, self.offset = series, offset
        self._dtypes = {each.dtype for each in parameters}
        self.synchronized = self.local()
        self.momentum = torch.zeros_like(self.synchronized)
        self.flight: Flight | None = None  # the round that is not applied yet

    def local(self) -> Tensor:
        """Return a copy of this rank's own parameters, flat, as float32."""
        return torch.cat([each.detach().float().reshape(-1) for each in self._parameters])

    def given(self) -> Tensor:
        """Return θ as the parameters have it, where they are of a type that rounds it.

        What that costs is no training: it must not be in what this rank has done since.
        """
        if self._dtypes <= {torch.float32, torch.float64}:
            return self.synchronized
        sizes = [each.numel() for each in self._parameters]
        parts = zip(self._parameters, torch.split(self.synchronized, sizes), strict=True)
        return torch.cat([part.to(parameter.dtype).float() for parameter, part in parts])

    @torch.no_grad()
    def assign(self, flat: Tensor) -> None:
        """Overwrite the parameters."""
        sizes = [each.numel() for each in self._parameters]
        for parameter, part in zip(self._parameters, torch.split(flat, sizes), strict=True):
            parameter.copy_(part.view_as(parameter))

    def apply(self, flight: Flight, outer_lr: float, momentum: float, *, keeps: bool) -> None:
        """Do the outer step; where the round lacks what this rank has done, x ``keeps`` it.

        Each operation rounds by itself: fused ones give other bits on other processors.
        """
        gradient = flight.delta
        before = self.synchronized.clone() if keeps else flight.began
        self.momentum.mul_(momentum).add_(gradient)
        self.synchronized.sub_(self.momentum.mul(momentum).add_(gradient).mul_(outer_lr))
        self.assign(self.local().sub_(before).add_(self.synchronized))


def parts(parameters: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Cut into so many runs of whole tensors, of about equal size."""
    until = [0, *accumulate(each.numel() for each in parameters)]
    cuts = [0]
    for part in range(1, count):
        may_end = range(cuts[-1] + 1, len(parameters) - count + part + 1)
        cuts.append(min(may_end, key=lambda end: abs(until[end] * count - until[-1] * part)))
    return [parameters[begin:end] for begin, end in pairwise([*cuts, len(parameters)])]
