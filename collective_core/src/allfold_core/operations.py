"""What a collective call asks for: its kind, its reduce operation and its fingerprint."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import Enum
from math import prod

from allfold_core.dtypes import DType


class Kind(Enum):
    """The collectives, with their stable wire codes."""

    ALL_REDUCE = (1, "all_reduce")
    REDUCE = (2, "reduce")
    BROADCAST = (3, "broadcast")
    BARRIER = (4, "barrier")
    ALL_GATHER = (5, "all_gather")
    REDUCE_SCATTER = (6, "reduce_scatter")
    GATHER = (7, "gather")
    SCATTER = (8, "scatter")
    ALL_TO_ALL = (9, "all_to_all")

    def __init__(self, code: int, label: str) -> None:
        self.code = code
        self.label = label

    @property
    def reduces(self) -> bool:
        return self in _REDUCING

    @property
    def has_root(self) -> bool:
        return self in _ROOTED

    @property
    def has_blocks(self) -> bool:
        """Whether the tensor consists of one block per rank (or per pair of ranks)."""
        return self in _BLOCKED


_REDUCING = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER})
_ROOTED = frozenset({Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER})
_BLOCKED = frozenset(
    {Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL}
)


class ReduceOp(Enum):
    """The element-wise reductions, with their stable wire codes (0 means "none")."""

    SUM = (1, "sum")
    MEAN = (2, "mean")
    PRODUCT = (3, "product")
    MIN = (4, "min")
    MAX = (5, "max")
    BAND = (6, "band")
    BOR = (7, "bor")
    BXOR = (8, "bxor")
    PREMUL_SUM = (9, "premul_sum")

    def __init__(self, code: int, label: str) -> None:
        self.code = code
        self.label = label

    def accumulation_dtype(self, dtype: DType) -> DType:
        """The type a fold of ``dtype`` is kept in: float32 for sums and products of half types.

        Minimum and maximum never round, so they stay in the type they are given.
        """
        if dtype.is_half and self not in (ReduceOp.MIN, ReduceOp.MAX):
            return DType.FLOAT32
        return dtype

    def refusal(self, dtype: DType) -> str | None:
        """Why this reduction is meaningless for ``dtype``; ``None`` where it is fine.

        Booleans follow NCCL's convention: sum and max are "any", product and min are "all".
        """
        if self is ReduceOp.MEAN and not dtype.is_float:
            return (
                f"mean of {dtype.label} is not defined: an integer mean would have to round; "
                "convert to a float dtype, or use sum and divide as you need"
            )
        return None


_KINDS = {kind.code: kind for kind in Kind}
_REDUCE_OPS = {op.code: op for op in ReduceOp}
_HEADER = struct.Struct("<BBBBi32s")
MAX_DIMENSIONS = 64
MAX_STRATEGY_LABEL = 32


def kind_from_code(code: int) -> Kind:
    """The kind of a wire code; ``ValueError`` for an unknown one."""
    if code not in _KINDS:
        raise ValueError(f"unknown collective code {code}")
    return _KINDS[code]


def reduce_op_from_code(code: int) -> ReduceOp | None:
    """The reduction of a wire code (0 is ``None``); ``ValueError`` for an unknown one."""
    if code == 0:
        return None
    if code not in _REDUCE_OPS:
        raise ValueError(f"unknown reduce operation code {code}")
    return _REDUCE_OPS[code]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that must agree between the ranks of one op, in the order a reader compares it.

    ``root`` is a rank of the group, -1 for kinds without one. ``strategy`` is what the caller
    asked for ("auto" unless overridden), because two overrides compile different schedules.
    """

    kind: Kind
    reduce_op: ReduceOp | None
    dtype: DType
    shape: tuple[int, ...]
    root: int
    strategy: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def kept_dtype(self) -> DType:
        """The type in which the op is computed, and in which it travels."""
        return self.reduce_op.accumulation_dtype(self.dtype) if self.reduce_op else self.dtype

    def pack(self) -> bytes:
        """The canonical bytes: equal fingerprints, and only those, have equal bytes.

        ``ValueError`` for a strategy that is no ASCII name of at most :data:`MAX_STRATEGY_LABEL`.
        """
        strategy = self.strategy.encode("ascii")
        if len(strategy) > MAX_STRATEGY_LABEL:
            raise ValueError(f"a strategy's name has at most {MAX_STRATEGY_LABEL} characters")
        head = _HEADER.pack(
            self.kind.code,
            self.reduce_op.code if self.reduce_op else 0,
            self.dtype.code,
            len(self.shape),
            self.root,
            strategy,
        )
        return head + struct.pack(f"<{len(self.shape)}Q", *self.shape)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Fingerprint:
        """The inverse of :meth:`pack`; ``ValueError`` for bytes that are no fingerprint."""
        if len(data) < _HEADER.size:
            raise ValueError(f"a fingerprint has at least {_HEADER.size} bytes, got {len(data)}")
        kind, op, dtype, ndim, root, strategy = _HEADER.unpack_from(data)
        if len(data) != _HEADER.size + 8 * ndim:
            raise ValueError(f"a fingerprint of {ndim} dimensions cannot have {len(data)} bytes")
        return cls(
            kind_from_code(kind),
            reduce_op_from_code(op),
            DType.from_code(dtype),
            struct.unpack_from(f"<{ndim}Q", data, _HEADER.size),
            root,
            strategy.rstrip(b"\0").decode("ascii"),
        )

    def describe(self) -> str:
        """One line for people: ``all_reduce(sum, float32[1024, 8])``."""
        parts = [self.reduce_op.label] if self.reduce_op else []
        if self.kind is not Kind.BARRIER:
            parts.append(f"{self.dtype.label}{list(self.shape)}")
        if self.kind.has_root:
            parts.append(f"root={self.root}")
        if self.strategy != "auto":
            parts.append(f"strategy={self.strategy}")
        return f"{self.kind.label}({', '.join(parts)})"

    def differences(self, other: Fingerprint) -> list[str]:
        """The names of the fields in which the two differ, e.g. ``["shape", "dtype"]``."""
        return [
            field.name
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]
