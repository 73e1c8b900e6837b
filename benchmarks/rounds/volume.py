"""The bytes of rounds against those of a bfloat16 all-reduce in each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.rounds.nodes import Nodes, nodes
from benchmarks.rounds.options import WORLD, Options
from benchmarks.rounds.training_rank import ALL_REDUCE, Orders

HEAD = (
    *("what", "H", "bytes by formula", "by results", "by agents' metric", "rounds"),
    *("bfloat16 bytes / round bytes", "to reach"),
)
_MODULE = "benchmarks.rounds.training_rank"
_SECONDS = 240.0
# Without what each frame of a round says of its weight, 8 bytes, as their number depends on chunks.
# A weight takes the place of two elements, which are not rounded. With so many fewer in the tensor,
# each node's part ends where a block of topk does: in a shorter one the bytes depend on its length.
_WEIGHT_ELEMENTS, _WEIGHT_BYTES = 2, 8
_CASES = (("int4", 100, 400), ("topk", 30, 2000))


def tensor_bytes(wire: str, numel: int) -> int:
    """Return what all nodes together send of the tensor: 2 (P - 1) times its size on the wire.

    Each of P nodes sends 2 (P - 1) / P of it, as rings and two direct exchanges do.
    """
    match wire:
        case "int4":  # half a byte each, and a scale of 2 bytes for each 128
            size = numel // 2 + 2 * -(-numel // 128)
        case "topk":
            size = 118 * -(-numel // 4096)
        case _:
            size = 2 * numel
    return 2 * (WORLD - 1) * size


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """Count the bytes of all nodes, for one round or all-reduce."""
    numel = options.numel - _WEIGHT_ELEMENTS * WORLD
    with nodes(WORLD) as found:
        step = _row(found, "bfloat16", ALL_REDUCE, numel)
        yield step | {"what": "all-reduce of bfloat16", "H": 1}
        for wire, every, to_reach in _CASES:
            row = _row(found, wire, "round", numel)
            ratio = every * step["by agents' metric"] / row["by agents' metric"]
            yield row | {
                "what": f"round of {wire}",
                "H": every,
                "bfloat16 bytes / round bytes": f"{ratio:.0f}",
                "to reach": f">= {to_reach}",
            }


def _row(found: Nodes, wire: str, what: str, numel: int) -> dict[str, Any]:
    orders = Orders(numel, 0.0, 1, 0, 1, wire, what, 0.0)
    told = found.run(_MODULE, [orders] * WORLD, _SECONDS)
    sent = [each["sent"] for each in told.reports]
    rounds = len(sent[0])
    formula = tensor_bytes(wire, numel)
    if what != ALL_REDUCE:
        formula += 2 * (WORLD - 1) * WORLD * _WEIGHT_BYTES
    return {
        "bytes by formula": formula,
        "by results": sum(map(sum, sent)) // rounds if what != ALL_REDUCE else "",
        "by agents' metric": sum(told.sent) // rounds,
        "rounds": rounds,
    }
