"""Calls in the words of torch's flight recorder: names, sizes and element types. Pure."""

from __future__ import annotations

from allfold_core.agent_answers import Call
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.schedules.parts import input_numel, output_numel

Sizes = list[list[int]]

# torch's analyser knows no backend of other people; Gloo is the one that moves tensors as we do.
_BACKEND = "gloo"
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_UNEQUAL = {"all_gather": "all_gather_v", "reduce_scatter": "reduce_scatter_v"}
_KINDS = {kind.label: kind for kind in Kind}
_REDUCE_OPS = {op.label: op for op in ReduceOp}


def profiling_name(call: Call) -> str:
    """Return the name of a call: ``gloo:all_reduce``."""
    kind = call["kind"]
    return f"{_BACKEND}:{_UNEQUAL.get(kind, kind) if call['counts'] else kind}"


def torch_dtype(call: Call) -> str:
    """Return the name that torch's recorder has for the type of the elements."""
    return _DTYPES.get(call["dtype"], call["dtype"])


def sizes_of(call: Call, rank: int, world_size: int) -> tuple[Sizes, Sizes]:
    """Return the sizes of a rank's inputs and outputs; ``[[]]`` where it has none.

    With unequal blocks the analyser would take sizes that differ between ranks for a mismatch, so
    these are the blocks of all ranks, on which all have to agree.
    """
    kind, shape = _KINDS[call["kind"]], call["shape"]
    if kind is Kind.BARRIER:
        return [[]], [[]]
    if not kind.has_blocks:
        return [shape], [shape]
    if call["counts"] and kind is not Kind.ALL_TO_ALL:
        blocks = [[count, *shape] for count in call["counts"]]
        return blocks, blocks
    asked = Fingerprint(
        kind,
        _REDUCE_OPS.get(call["reduce_op"] or ""),
        DType.UINT8,  # whatever it is, the sizes are in the caller's elements
        tuple(shape),
        call["root"],
        AUTO,
        counts=tuple(call["counts"]),
    )
    brings, gets = (numel(asked, rank, world_size) for numel in (input_numel, output_numel))
    return [[brings] if brings else []], [[gets] if gets else []]
