"""Tensor-parallel decoding: the model of the example, of which every rank holds a part.

One op is one token: 16 all-reduces of 4 KiB, and what is computed between them. The libraries
differ in what adds up the ranks' shares, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensor_parallel_llm import PROMPT, SHAPE, Model, Synchronise

from allfold._calls.options import Options
from allfold.cli._bench.data import Bench
from benchmarks.devices import Device, Operation
from benchmarks.libraries import Library
from benchmarks.plan import DECODE, TOKEN, most_ops, warm_up


class DecodeWorkload:
    """A turn decodes the tokens after one that is given: the same ones as a single process."""

    def __init__(self, libraries: Sequence[Library], device: Device, rank: int, world: int) -> None:
        # A wire that loses bits may find other tokens, and be right.
        some = [each for each in libraries if each.supports(DECODE) and each.wire == "native"]
        most = most_ops(TOKEN)
        self._expected = _alone(warm_up(most) + most)
        self._model = Model(SHAPE, (rank, world))
        self._sums = {library.name: _synchronise(library, device) for library in some}
        self._tokens: list[int] = []
        self.contestants = list(self._sums)

    def operation(self, contestant: str) -> Operation:
        synchronise = self._sums[contestant]

        def decode() -> None:
            self._tokens.append(self._model.next_token(self._tokens[-1], synchronise))

        return decode

    def write(self, _contestant: str, op: int, /) -> None:
        if op == 0:
            self._model.forget()
            self._tokens = [PROMPT[0]]

    def keep(self, _contestant: str, _op: int, /) -> None:
        """Every token is kept, to go on with."""

    def count_wrong(self, _contestant: str, ops: int, /) -> int:
        pairs = zip(self._tokens[1:], self._expected[:ops], strict=True)
        return sum(token != right for token, right in pairs)


def _alone(count: int) -> list[int]:
    """Return the tokens that a single process finds."""
    model, tokens = Model(SHAPE, (0, 1)), [PROMPT[0]]
    for _ in range(count):
        tokens.append(model.next_token(tokens[-1], lambda share: share))
    return tokens[1:]


def _synchronise(library: Library, device: Device) -> Synchronise:
    """Return what adds up a row of activations, as the example does."""
    row = library.empty(SHAPE.width)
    if row is None:
        row = device.empty(SHAPE.width)
    all_reduce = library.operation(
        Bench("all_reduce", "sum", "float32", SHAPE.width, Options()), row, row
    )
    view = torch.from_numpy(row)

    def synchronise(share: torch.Tensor) -> torch.Tensor:
        view.copy_(share)
        all_reduce()
        return view.clone()

    return synchronise
