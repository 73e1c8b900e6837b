"""The cases of a run (shapes, sizes and collectives), as pure data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from allfold.cli._bench.kinds import KINDS as _COLLECTIVES

KIB, MIB = 1 << 10, 1 << 20
BARRIER, BURST, DECODE, DDP = "barrier", "burst", "decode", "ddp"
KINDS = (*_COLLECTIVES, BARRIER)
OURS = "allfold"
PLAIN = "plain"
"""Allfold on ordinary memory; ``allfold`` is on that of ``allfold.empty``."""
THROUGH_TORCH = "allfold-torch"
"""Allfold on ordinary memory, called through ``torch.distributed``."""
NCCL = "nccl"
TORCH = ("gloo", "gloo_host", NCCL)
MPICH, OPENMPI, DEEPSPEED, UCX = "mpich", "openmpi", "deepspeed", "ucx"
MPIS = (MPICH, OPENMPI)
OTHERS = (*TORCH, UCX, *MPIS, DEEPSPEED)
PEERS = {
    "cpu": (PLAIN, THROUGH_TORCH, "gloo", UCX, *MPIS, DEEPSPEED),
    "cuda": (PLAIN, *TORCH),
}
"""Beside Allfold on its own memory, by device."""
WIRES = ("bfloat16", "float16", "int8", "int4", "int2", "sign")

SHORT = 64 * KIB
"""Up to this size an op counts as short."""
_TURN_TOKENS, _FEWEST_TOKENS, _FEWEST_OPS = 8, 50, 15
_LATENCY_SIZES = (4, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
_GPU_LATENCY_SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)

_OF_BLOCKS = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")

_UNITS = {"": 1, "K": KIB, "M": MIB, "G": 1 << 30}


@dataclass(frozen=True, order=True)
class Shape:
    """So many nodes (agents) with so many ranks each."""

    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @classmethod
    def parse(cls, text: str) -> Self:
        """``2x4``: two nodes with four ranks each; ``ValueError`` for anything else."""
        found = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", text.strip())
        if not found:
            raise ValueError(f"{text!r} is not a shape such as 2x4 (nodes x ranks per node)")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}"


@dataclass(frozen=True)
class Case:
    """One collective of one size.

    Attributes:
        size: bytes, as nccl-tests counts them: of the tensor for all-reduce, reduce, broadcast and
            send/recv, of all blocks together for the others; 0 for a barrier.
        computing: about so many seconds of computing come before each op; 0: they are back to back.
    """

    kind: str
    size: int
    computing: float = 0.0

    @property
    def title(self) -> str:
        """The kind, and what comes before each op."""
        return f"{self.kind} after {human_time(self.computing)}" if self.computing else self.kind

    @property
    def is_short(self) -> bool:
        return self.kind in KINDS and self.size <= SHORT

    def fitting(self, world: int) -> Self:
        """With a size that float32 and so many blocks can have."""
        if self.kind == BARRIER:
            return self
        unit = 4 * world if self.kind in _OF_BLOCKS else 4
        return replace(self, size=max(1, self.size // unit) * unit)

    def bus_factor(self, world: int) -> float:
        """busbw / algbw, as nccl-tests has it (its doc/PERFORMANCE.md)."""
        kind = _COLLECTIVES.get("all_reduce" if self.kind == BURST else self.kind)
        return kind.bus_factor(world) if kind else 1.0


TOKEN = Case(DECODE, 16 * 4 * KIB)
"""One token of the example: two all-reduces in each of 8 layers, of 1024 activations."""


@dataclass(frozen=True)
class Model:
    """A transformer that is trained: so wide, and of so many layers."""

    width: int
    layers: int

    @property
    def size(self) -> int:
        """Return the bytes of its gradients, in float32."""
        return 4 * self.layers * (12 * self.width**2 + 13 * self.width)


MODELS = (Model(64, 1), Model(208, 8), Model(420, 8))
"""Of 0.2, 16 and 65 MiB of gradients."""
STEPS = tuple(Case(DDP, model.size) for model in MODELS)


def most_ops(case: Case) -> int:
    """The most ops of one turn."""
    if case.kind == DECODE:
        return _TURN_TOKENS
    size = 1 << 62 if case.kind == BURST else case.size
    for limit, ops in ((64 * KIB, 20), (MIB, 10), (8 * MIB, 3)):
        if size <= limit:
            return ops
    return 1


def fewest_ops(case: Case) -> int:
    """Ops that a case has, whatever else is asked for."""
    return _FEWEST_TOKENS if case.kind == DECODE else _FEWEST_OPS


def warm_up(ops: int) -> int:
    """Unmeasured ops in front of a turn of several: threads are awake and caches are warm."""
    return ops // 4


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``4K``, ``16M``, ``1G``; ``ValueError`` for anything else."""
    found = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not size:
        raise ValueError(f"{text!r} is not a size such as 4096, 4K or 16M")
    return size


def parse_time(text: str) -> float:
    """Seconds of ``2ms``, ``0.5ms``, ``0``; ``ValueError`` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)ms|0", text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a time such as 2ms, nor 0")
    return float(found[1] or 0) / 1e3


def human_time(seconds: float) -> str:
    """``2ms``; ``0`` for none."""
    return f"{seconds * 1e3:g}ms" if seconds else "0"


def human_size(size: int) -> str:
    """``64 MiB``, ``4 KiB``, ``4 B``; of a model's gradients ``0.2 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    if size in [model.size for model in MODELS]:
        return f"{size / MIB:.{1 if size < MIB else 0}f} MiB"
    return f"{size} B"


def cases(kinds: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """Every size of every collective; a barrier has none."""
    return [
        Case(kind, size) for kind in kinds for size in ((0,) if kind == BARRIER else sorted(sizes))
    ]


def latency_cases(*, on_gpus: bool = False) -> list[Case]:
    """All-reduces of short messages, and of some that are not."""
    return cases(["all_reduce"], _GPU_LATENCY_SIZES if on_gpus else _LATENCY_SIZES)


def with_computing(found: Sequence[Case], seconds: Sequence[float]) -> list[Case]:
    """Each of the cases with each of these times of computing before an op."""
    return [replace(case, computing=each) for case in found for each in seconds]


def gpu_cases() -> list[Case]:
    """The same of ranks on GPUs."""
    found = cases(["all_reduce"], [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB])
    return found + cases([kind for kind in KINDS if kind != "all_reduce"], [MIB])


def usual_cases(shape: Shape) -> list[Case]:
    """Return the default cases of a shape."""
    found = cases(["all_reduce"], [4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB])
    if str(shape) in ("1x4", "2x2"):
        others = [kind for kind in KINDS if kind != "all_reduce"]
        found += cases(others, [4 * KIB, MIB, 16 * MIB])
    return found


def network_cases(shape: Shape) -> list[Case]:
    """The same on a network."""
    sizes = [64 * MIB] if shape.per_node > 1 else [64 * KIB, MIB, 16 * MIB, 64 * MIB]
    return cases(["all_reduce"], sizes)


def full_cases() -> list[Case]:
    """Every collective from 4 B to 256 MiB, by factors of 4."""
    return cases(KINDS, [4 << shift for shift in range(0, 27, 2)])
