"""A small transformer, decoded by several ranks at once, each with a part of every layer.

    allfold run --nodes 2 --nproc-per-node 1 examples/tensor_parallel_llm.py
    allfold run --nproc-per-node 2 examples/tensor_parallel_llm.py --backend gloo    # to compare

Every rank holds some of the attention heads and some of the columns of the feed-forward network
(Megatron-LM's split), so a token costs two all-reduces per layer, of one row of activations: a few
KiB. That is what inference on several small machines (distributed-llama and its like) lives on, and
why the time of a small all-reduce counts. The weights are random; with the same seed a single
process must find the same tokens, which rank 0 checks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

import allfold

VOCABULARY = 512
PROMPT = (17, 4, 256, 99)

Synchronise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The size of the model."""

    layers: int
    width: int
    heads: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SHAPE = Shape(layers=8, width=1024, heads=16)


class Layer:
    """One rank's part of a transformer layer, with its cache of keys and values.

    Args:
        weights: makes a random matrix, the same on every rank that asks in the same order.
        part: which share of the heads and of the feed-forward network is kept: (index, shares).
    """

    def __init__(
        self, shape: Shape, weights: Callable[[int, int], Tensor], part: tuple[int, int]
    ) -> None:
        index, parts = part
        width, hidden = shape.width, 4 * shape.width

        def kept(matrix: Tensor, dim: int) -> Tensor:
            return matrix.tensor_split(parts, dim)[index].contiguous()

        self.shape = shape
        # Rows are split where a matrix makes heads or hidden units, columns where it reads them.
        self.query, self.key, self.value = (kept(weights(width, width), 0) for _ in range(3))
        self.output = kept(weights(width, width), 1)
        self.gate, self.up = (kept(weights(hidden, width), 0) for _ in range(2))
        self.down = kept(weights(width, hidden), 1)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, x: Tensor, synchronise: Synchronise) -> Tensor:
        """The activations after the layer, for one more token."""
        x = x + synchronise(self.output @ self._attend(normalised(x)))
        y = normalised(x)
        return x + synchronise(self.down @ (silu(self.gate @ y) * (self.up @ y)))

    def _attend(self, y: Tensor) -> Tensor:
        heads = (-1, 1, self.shape.head_width)
        self.keys.append((self.key @ y).view(heads))
        self.values.append((self.value @ y).view(heads))
        query = (self.query @ y).view(heads)
        mixed = scaled_dot_product_attention(
            query, torch.cat(self.keys, 1), torch.cat(self.values, 1)
        )
        return mixed.reshape(-1)


def normalised(x: Tensor) -> Tensor:
    """Root-mean-square normalisation."""
    return x * torch.rsqrt(x.square().mean() + 1e-6)


class Model:
    """One rank's part of the model; ``(0, 1)`` is all of it."""

    def __init__(self, shape: Shape, part: tuple[int, int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / sqrt(columns)

        self.embedding = weights(VOCABULARY, shape.width) * shape.width**0.5
        self.layers = [Layer(shape, weights, part) for _ in range(shape.layers)]
        self.head = weights(VOCABULARY, shape.width)

    def next_token(self, token: int, synchronise: Synchronise) -> int:
        """The most likely token after this one and all before it."""
        x = self.embedding[token]
        for layer in self.layers:
            x = layer(x, synchronise)
        return int((self.head @ normalised(x)).argmax())

    def forget(self) -> None:
        """Begin anew: no token came before the next one."""
        for layer in self.layers:
            layer.keys.clear()
            layer.values.clear()

    def decode(self, count: int, synchronise: Synchronise) -> list[int]:
        """So many tokens after the prompt."""
        token = 0
        for each in PROMPT:
            token = self.next_token(each, synchronise)
        tokens = [token]
        while len(tokens) < count:
            tokens.append(self.next_token(tokens[-1], synchronise))
        return tokens


@dataclass(frozen=True)
class Ranks:
    """All that decode together, seen from one of them.

    Attributes:
        row: the memory of what is added up.
        how: what adds it up.
    """

    rank: int
    world_size: int
    setup: str
    how: str
    row: Tensor
    all_reduce: Callable[[Tensor], object]
    barrier: Callable[[], object]
    leave: Callable[[], object]


def on_allfold(width: int) -> Ranks:
    """Meet the other ranks by Allfold's own functions."""
    group = allfold.init()
    return Ranks(
        group.rank,
        group.world_size,
        f"{group.world_size} ranks on {group.nodes} nodes",
        f"strategy {group.strategy_for('all_reduce', 4 * width)}",
        allfold.empty(width, torch.float32),
        allfold.all_reduce,
        allfold.barrier,
        allfold.shutdown,
    )


def on_torch(backend: str, width: int) -> Ranks:
    """Meet them by torch.distributed."""
    dist.init_process_group(backend)
    return Ranks(
        dist.get_rank(),
        dist.get_world_size(),
        f"{dist.get_world_size()} ranks",
        f"backend {backend}",
        torch.empty(width),
        dist.all_reduce,
        dist.barrier,
        dist.destroy_process_group,
    )


class Synchroniser:
    """Adds up the ranks' shares of a row of activations, and keeps the time."""

    def __init__(self, ranks: Ranks) -> None:
        self.seconds: list[float] = []
        self._row, self._all_reduce = ranks.row, ranks.all_reduce

    def __call__(self, share: Tensor) -> Tensor:
        self._row.copy_(share)
        began = perf_counter()
        self._all_reduce(self._row)
        self.seconds.append(perf_counter() - began)
        return self._row.clone()


def main() -> None:
    """Decode with all ranks, then alone, and compare."""
    options = arguments()
    shape = Shape(options.layers, options.width, options.heads)
    own = options.backend == "allfold"
    ranks = on_allfold(shape.width) if own else on_torch(options.backend, shape.width)
    if shape.heads % ranks.world_size:
        sys.exit(f"{shape.heads} heads cannot be split over {ranks.world_size} ranks")
    torch.set_num_threads(1)
    synchronise = Synchroniser(ranks)
    model = Model(shape, (ranks.rank, ranks.world_size))
    ranks.barrier()
    began = perf_counter()
    tokens = model.decode(options.tokens, synchronise)
    seconds = perf_counter() - began
    if ranks.rank == 0:
        print(f"{ranks.setup}, {shape.layers} layers of {shape.width}")
        steps = len(tokens) + len(PROMPT) - 1
        print(f"{speed(synchronise.seconds, steps, seconds, 4 * shape.width)}, {ranks.how}")
        alone = Model(shape, (0, 1)).decode(options.tokens, lambda share: share)
        if tokens != alone:
            print(f"tokens: DIFFERENT {tokens} but alone {alone}")
            sys.exit(1)
        print("tokens: the same as a single process")
    ranks.leave()


def speed(waits: list[float], tokens: int, seconds: float, nbytes: int) -> str:
    """The speed of decoding, and how long the sums of ``nbytes`` each took."""
    middle = sorted(waits)[len(waits) // 2]
    return (
        f"tokens per second: {tokens / seconds:.1f}\n"
        f"synchronisations: {len(waits) // tokens} per token, {nbytes} bytes each, median "
        f"{middle * 1e6:.0f} us, {sum(waits) / seconds:.0%} of the time"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="allfold", help="or one of torch.distributed, as gloo")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--width", type=int, default=SHAPE.width)
    parser.add_argument("--heads", type=int, default=SHAPE.heads)
    parser.add_argument("--tokens", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    main()
