"""From specs to what a node does: where the elements lie, and the graph of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.compilation.op_spec import OpSpec, sizes
from allfold_agent.compilation.task_graph import TaskGraph, build
from allfold_core.dtypes import Wire
from allfold_core.operations import Fingerprint, Kind
from allfold_core.plan import Plan
from allfold_core.schedules.compiler import compile_program
from allfold_core.schedules.parts import (
    NodeParts,
    Piece,
    exchange_layout,
    layout,
    with_weights,
)
from allfold_core.schedules.schedule import wire_chunk
from allfold_core.topology import LinkModel

# Of an all-to-all no node knows the size that all would agree on.
EXCHANGE_CHUNK_BYTES = 256 * 1024
_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class Compiled:
    """The tasks of this node in every op of one spec.

    Attributes:
        arithmetic: how elements are folded.
        graph: the exchange with other nodes.
        wholes: all parts.
        results: what local ranks get.
        rest: what of that is left where results are handed out chunk by chunk.
        fold_bytes: memory that is touched where all ranks are here.
        copy_bytes: memory of ranks that the results are copied to.
    """

    layout: NodeParts
    arithmetic: Arithmetic
    graph: TaskGraph
    wholes: tuple[Piece, ...]
    results: tuple[Piece, ...]
    rest: tuple[Piece, ...]
    fold_bytes: int
    copy_bytes: int


class Compiler:
    """Compiles the ops of one group for node ``me``, those that come again only once."""

    def __init__(self, plan: Plan, me: int) -> None:
        self._plan = plan
        self._me = me
        self._ranks = plan.members[me].ranks
        self._placement = tuple(member.ranks for member in plan.members)
        self.compile = lru_cache(maxsize=_REMEMBERED)(self._compile)
        """``compile(calls, on_gpu)``: how the local ranks call, all alike or (an all-to-all) one
        each, and whether any of them has its memory on a GPU."""

    def _compile(self, calls: tuple[OpSpec, ...], on_gpu: bool = False) -> Compiled:
        spec = calls[0]
        fingerprint, kind = spec.fingerprint, spec.fingerprint.kind
        nodes = len(self._plan.members)
        encoded = spec.wire is not Wire.NATIVE
        placed = self._layout(calls, encoded and nodes > 1)
        program = compile_program(
            kind,
            spec.strategy,
            nodes=nodes,
            numel=placed.numel,
            node=self._me,
            root=self._plan.index_of_rank(fingerprint.root) if kind.has_root else -1,
            tree_order=self._plan.tree_order,
            blocks=placed.blocks,
        )
        graph = build(
            program,
            node=self._me,
            numel=placed.numel,
            chunk=chunk_elements(fingerprint, placed.held, nodes, self._plan.links),
            results=placed.results,
            encoded=encoded,
            exact_from=placed.weights.start if placed.weights else None,
            eager=on_gpu,
        )
        wholes = tuple((part, part.slice.start, part.slice.stop) for part in placed.parts)
        results = tuple(whole for whole in wholes if whole[0].targets)
        rest = [piece for bounds in graph.rest for piece in placed.parts_in(*bounds)]
        arithmetic = Arithmetic(fingerprint, self._plan.world_size)
        return Compiled(
            placed,
            arithmetic,
            graph,
            wholes,
            results,
            tuple(piece for piece in rest if piece[0].targets),
            touched(wholes, arithmetic.itemsize),
            touched(results, arithmetic.kept_itemsize),
        )

    def _layout(self, calls: tuple[OpSpec, ...], rounded: bool) -> NodeParts:
        fingerprint, world = calls[0].fingerprint, self._plan.world_size
        if fingerprint.kind is not Kind.ALL_TO_ALL:
            blocks, root = sizes(fingerprint, world), fingerprint.root
            parts = layout(fingerprint.kind, blocks, root, self._placement, self._me, rounded)
            is_apart = calls[0].is_weighted and len(self._placement) > 1
            return with_weights(parts, world) if is_apart else parts
        row = fingerprint.numel
        elements = {
            rank: [count * row for count in call.fingerprint.counts]
            for rank, call in zip(self._ranks, calls, strict=True)
        }
        return exchange_layout(
            {rank: each[:world] for rank, each in elements.items()},
            {rank: each[world:] for rank, each in elements.items()},
            self._placement,
            self._me,
        )


def touched(pieces: Sequence[Piece], itemsize: int) -> int:
    """The bytes that ranks bring to the pieces and get from them."""
    return itemsize * sum(
        (stop - start) * (len(part.sources) + len(part.targets)) for part, start, stop in pieces
    )


def chunk_elements(fingerprint: Fingerprint, numel: int, nodes: int, links: LinkModel) -> int:
    """The elements of a chunk; whole blocks of what shares a scale."""
    wire, itemsize = fingerprint.wire, fingerprint.kept_dtype.itemsize
    nbytes = wire_chunk(wire.nbytes(numel, itemsize), nodes, links)
    if fingerprint.kind is Kind.ALL_TO_ALL:
        nbytes = max(EXCHANGE_CHUNK_BYTES, wire_chunk(0, nodes, links))
    return max(1, nbytes // wire.nbytes(wire.grain, itemsize)) * wire.grain
