"""The identity of a collective call: its kind, its reduce operation and its fingerprint."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from math import inf, prod
from typing import NamedTuple

from allfold_core.dtypes import NO_ALIAS, Alias, DType, Wire


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

    __hash__ = object.__hash__  # there is one object for each; Enum would hash its name, in Python

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
        """True where the tensor consists of one block per rank (or per pair of ranks)."""
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
    WEIGHTED_MEAN = (10, "weighted_mean")

    __hash__ = object.__hash__  # as for a kind

    def __init__(self, code: int, label: str) -> None:
        self.code = code
        self.label = label

    def accumulation_dtype(self, dtype: DType) -> DType:
        """The type a fold of ``dtype`` is kept in: float32 for sums and products of half types.

        Minimum and maximum never round, so they stay in the type they are given.
        """
        if dtype.is_half and self in _ROUNDING:
            return DType.FLOAT32
        return dtype

    def refusal(self, dtype: DType) -> str | None:
        """Return why this reduction is meaningless for ``dtype``; ``None`` where it is fine.

        Booleans follow NCCL's convention: sum and max are "any", product and min are "all".
        """
        if self in _BITWISE and dtype.is_float:
            return f"{self.label} of {dtype.label} is not defined: it is for integers and booleans"
        if self in (ReduceOp.MEAN, ReduceOp.WEIGHTED_MEAN) and not dtype.is_float:
            return (
                f"mean of {dtype.label} is not defined: an integer mean would have to round; "
                "convert to a float dtype, or use sum and divide as you need"
            )
        if self is ReduceOp.PREMUL_SUM and not dtype.is_float:
            return f"premul_sum of {dtype.label} is not defined: its factor is a real number"
        return None


_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_ADDING = frozenset({ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PREMUL_SUM, ReduceOp.WEIGHTED_MEAN})
_ROUNDING = _ADDING | {ReduceOp.PRODUCT}
_KINDS = {kind.code: kind for kind in Kind}
_REDUCE_OPS = {op.code: op for op in ReduceOp}
_HEADER = struct.Struct("<BBBBBBHiIIdQ32s")
_WITHIN = struct.Struct("<d")
MAX_DIMENSIONS = 64
MAX_STRATEGY_LABEL = 32
AUTO = "auto"
"""The name that stands for the choice of a strategy by the cost model."""
LEAST_WEIGHT, GREATEST_WEIGHT = 1e-12, 1e15
"""Of an input that counts in a weighted mean. A weight between these has 48 bits in two elements of
float32, and leaves room for tensors on both sides in the type that weight times tensor has."""
_SHOWN = 16
_SHOWN_AS = {"alias": "dtype"}


def is_weight(number: float) -> bool:
    """Return True for what an input may count by in a weighted mean; 0 is that of none."""
    return number == 0 or LEAST_WEIGHT <= number <= GREATEST_WEIGHT


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


class Quorum(NamedTuple):
    """How many ranks are enough for an op, and for how long the others are waited for.

    Attributes:
        ranks: those that must have called; 0 for all of them, however long that takes.
        within: the seconds from then on in which the others may still call.
    """

    ranks: int
    within: float


ALL_RANKS = Quorum(0, 0.0)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The properties of a call on which all ranks of an op must agree.

    Attributes:
        dtype: the type in which the elements travel, and are folded.
        shape: of the tensor, in the caller's elements; of one rank's block for kinds with blocks;
            of one row of it, its other dimensions, where the blocks have ``counts``.
        root: a rank of the group, -1 for kinds without one.
        strategy: what the caller asked for ("auto" unless overridden), because two overrides
            compile different schedules.
        wire: how the data travels between nodes.
        factor: what a premultiplied sum multiplies every input with; the weight of the caller's
            input in a weighted mean, which is the caller's own.
        feedback: which series of ops shares its rounding errors; 0 for none.
        counts: the rows of each rank's block; () where all blocks are equal. For an all-to-all,
            first those that the caller sends to each rank, then those that it receives from each:
            these are the caller's own, and must only match those of the others.
        alias: the caller's type, where its elements travel as those of another.
        quorum: how many ranks are enough.
    """

    kind: Kind
    reduce_op: ReduceOp | None
    dtype: DType
    shape: tuple[int, ...]
    root: int
    strategy: str
    wire: Wire = Wire.NATIVE
    factor: float = 1.0
    feedback: int = 0
    counts: tuple[int, ...] = ()
    alias: Alias = NO_ALIAS
    quorum: Quorum = ALL_RANKS

    @property
    def numel(self) -> int:
        """The elements that travel of a tensor of ``shape``."""
        return prod(self.shape) * self.alias.width

    @property
    def label(self) -> str:
        """The name of the caller's element type."""
        return self.alias.label(self.dtype)

    @property
    def kept_dtype(self) -> DType:
        """The type in which the op is computed."""
        return self.reduce_op.accumulation_dtype(self.dtype) if self.reduce_op else self.dtype

    @property
    def common(self) -> Fingerprint:
        """The part that must be equal on all ranks: all but an all-to-all's counts, or a weight."""
        if self.reduce_op is ReduceOp.WEIGHTED_MEAN:
            return replace(self, factor=1.0)
        return replace(self, counts=()) if self.kind is Kind.ALL_TO_ALL else self

    def sent(self) -> tuple[int, ...]:
        """Return the number of rows that the caller of an all-to-all sends to each rank."""
        return self.counts[: len(self.counts) // 2]

    def received(self) -> tuple[int, ...]:
        """Return the number of rows that the caller of an all-to-all receives from each rank."""
        return self.counts[len(self.counts) // 2 :]

    def wire_refusal(self) -> str | None:
        """Return why the call cannot travel in its format; ``None`` if it can."""
        if self.wire.is_sparse and not (self.feedback and self.reduce_op in _ADDING):
            return (
                f"wire={self.wire.label!r} is for sums and means with feedback='name': one of "
                f"{self.wire.one_of} elements travels, and the others are kept for the next call "
                "of that name"
            )
        return self.range_refusal()

    def range_refusal(self) -> str | None:
        """Return why its format has no room for its elements; ``None`` if it has."""
        if self.wire is Wire.FLOAT16 and self.reduce_op is ReduceOp.WEIGHTED_MEAN:
            return (
                "wire='float16' is not for weighted means, because weight times tensor travels and "
                "it ends at 65504; take wire='bfloat16'"
            )
        return self.wire.refusal(self.kept_dtype)

    def pack(self) -> bytes:
        """The canonical bytes: equal fingerprints, and only those, have equal bytes.

        ``ValueError`` for a strategy that is no ASCII name of at most :data:`MAX_STRATEGY_LABEL`.
        """
        strategy, alias = self.strategy.encode("ascii"), self.alias.encode()
        if len(strategy) > MAX_STRATEGY_LABEL:
            raise ValueError(f"a strategy's name has at most {MAX_STRATEGY_LABEL} characters")
        head = _HEADER.pack(
            self.kind.code,
            self.reduce_op.code if self.reduce_op else 0,
            self.dtype.code,
            len(self.shape),
            self.wire.code,
            len(alias),
            self.quorum.ranks,
            self.root,
            len(self.counts),
            self.alias.width,
            self.factor + 0.0,  # -0.0 equals 0.0, so it has the same bytes
            self.feedback,
            strategy,
        )
        sizes = self.shape + self.counts
        within = _WITHIN.pack(self.quorum.within) if self.quorum.ranks else b""
        return head + struct.pack(f"<{len(sizes)}Q", *sizes) + within + alias

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Fingerprint:
        """The inverse of :meth:`pack`; ``ValueError`` for bytes that are no fingerprint."""
        if len(data) < _HEADER.size:
            raise ValueError(f"a fingerprint has at least {_HEADER.size} bytes, got {len(data)}")
        head = _HEADER.unpack_from(data)
        kind, op, dtype, ndim, wire, nalias, needed, root, ncounts, *rest = head
        width, factor, feedback, strategy = rest
        end = _HEADER.size + 8 * (ndim + ncounts + (needed > 0))
        if len(data) != end + nalias:
            raise ValueError(
                f"a fingerprint of {ndim} dimensions, {ncounts} counts and a dtype's name of "
                f"{nalias} bytes cannot have {len(data)} bytes"
            )
        quorum = ALL_RANKS
        if needed:
            quorum = Quorum(needed, *_WITHIN.unpack_from(data, end - _WITHIN.size))
            if not 0 < quorum.within < inf:
                raise ValueError(f"a quorum waits for some seconds, got {quorum.within}")
        sizes = struct.unpack_from(f"<{ndim + ncounts}Q", data, _HEADER.size)
        return cls(
            kind_from_code(kind),
            reduce_op_from_code(op),
            DType.from_code(dtype),
            sizes[:ndim],
            root,
            strategy.rstrip(b"\0").decode("ascii"),
            Wire.from_code(wire),
            factor,
            feedback,
            sizes[ndim:],
            Alias.decode(data[end:], width),
            quorum,
        )

    def describe(self) -> str:
        """One line for people: ``all_reduce(sum, float32[1024, 8])``."""
        parts = [self.reduce_op.label] if self.reduce_op else []
        if self.reduce_op is ReduceOp.PREMUL_SUM:
            parts.append(f"factor={self.factor:g}")
        if self.kind is not Kind.BARRIER:
            shape = ["*", *self.shape] if self.counts else self.shape
            parts.append(f"{self.label}[{', '.join(map(str, shape))}]")
        if self.kind is Kind.ALL_TO_ALL and self.counts:
            parts.append(f"sends {_listed(self.sent())} and receives {_listed(self.received())}")
        elif self.counts:
            parts.append(f"rows {_listed(self.counts)}")
        if self.kind.has_root:
            parts.append(f"root={self.root}")
        if self.quorum.ranks:
            parts.append(f"quorum={self.quorum.ranks}, within={self.quorum.within:g}")
        if self.wire is not Wire.NATIVE:
            parts.append(f"wire={self.wire.label}")
        if self.strategy != AUTO:
            parts.append(f"strategy={self.strategy}")
        return f"{self.kind.label}({', '.join(parts)})"

    def differences(self, other: Fingerprint) -> list[str]:
        """The names of the fields in which the two differ, e.g. ``["shape", "dtype"]``."""
        differing = (
            _SHOWN_AS.get(field.name, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )
        return list(dict.fromkeys(differing))


def _listed(counts: Sequence[int]) -> str:
    more = f" ... of {len(counts)}" if len(counts) > _SHOWN else ""
    return f"({', '.join(map(str, counts[:_SHOWN]))}{more})"
