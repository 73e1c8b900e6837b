"""Runs the ops of one group that every local rank has called."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from allfold_agent.buffers import BufferPool
from allfold_agent.dataflow import Dataflow, Task, build
from allfold_agent.edges import Edges
from allfold_agent.exchange import Exchange, Outgoing
from allfold_agent.folding import Arithmetic
from allfold_agent.job import Job
from allfold_agent.op import INLINE_BYTES, Op, over_parts
from allfold_agent.residuals import Residual, Residuals
from allfold_agent.workers import WorkerPool
from allfold_core.choose import choose
from allfold_core.chunking import wire_chunk
from allfold_core.codecs import INT8_BLOCK, Wire
from allfold_core.compiler import compile_program
from allfold_core.operations import Fingerprint, Kind
from allfold_core.parts import Layout, Part, block_numels, exchange_layout, layout
from allfold_core.plan import Plan

# Of an all-to-all no node knows the size that all would agree on.
EXCHANGE_CHUNK_BYTES = 512 * 1024

Counts = tuple[tuple[int, ...], ...]


class Outcomes(Protocol):
    """Who decides on the outcome of ops: the group."""

    def settle(self, op: Op) -> bool:
        """Decide that the op succeeds; false where it has failed before."""

    def tell_end(self, op: Op, error: Exception | None) -> None:
        """Every local rank has its result, or this node failed to give it to them."""

    def cannot_run(self, seq: int, error: Exception) -> None:
        """This node cannot do its part of an op."""


def chunk_elements(fingerprint: Fingerprint, numel: int, nodes: int) -> int:
    """The elements of a chunk; whole blocks of what shares a scale."""
    wire, itemsize = fingerprint.wire, fingerprint.kept_dtype.itemsize
    nbytes = wire_chunk(wire.nbytes(numel, itemsize), nodes)
    if fingerprint.kind is Kind.ALL_TO_ALL:
        nbytes = EXCHANGE_CHUNK_BYTES
    per_block = wire.nbytes(INT8_BLOCK, itemsize)
    return max(1, nbytes // per_block) * INT8_BLOCK


class Runner:
    """Prepares and starts ops, and hands out their results.

    Args:
        plan: of the group.
        me: this node's index.
        edges: to the other nodes.
        outcomes: told when an op may end, and when it has.
    """

    def __init__(
        self,
        plan: Plan,
        me: int,
        workers: WorkerPool,
        buffers: BufferPool,
        edges: Edges,
        outcomes: Outcomes,
    ) -> None:
        self.plan = plan
        self.me = me
        self.ranks = plan.members[me].ranks
        self._workers = workers
        self._buffers = buffers
        self._edges = edges
        self._outcomes = outcomes
        self._placement = tuple(member.ranks for member in plan.members)
        self._residuals = Residuals()
        self._compiled = lru_cache(maxsize=128)(self._compile)

    def strategy_for(self, fingerprint: Fingerprint) -> str:
        """The strategy that every node uses for such an op; ``InvalidArgument`` if none can."""
        wire = fingerprint.wire.effective(fingerprint.kept_dtype)
        nbytes = wire.nbytes(sum(self.sizes(fingerprint)), fingerprint.kept_dtype.itemsize)
        return choose(
            fingerprint.kind,
            self.plan,
            nbytes,
            asked=fingerprint.strategy,
            wire=wire,
            feedback=bool(fingerprint.feedback),
        )

    def prepare(self, op: Op) -> None:
        """Set an op up while the order of ops is locked; :meth:`start` sets it going."""
        fingerprint = op.fingerprint
        op.strategy = self.strategy_for(fingerprint)
        counts: Counts = ()
        if fingerprint.kind is Kind.ALL_TO_ALL:
            counts = tuple(op.arrivals[rank].fingerprint.counts for rank in self.ranks)
        placed, flow = self._compiled(fingerprint.common, op.strategy, counts)
        arithmetic = Arithmetic(fingerprint, self.plan.world_size)
        arrivals = op.arrivals.items()
        op.job = Job(
            placed,
            arithmetic,
            {rank: arithmetic.elements(arrival.source) for rank, arrival in arrivals},
            {rank: arithmetic.elements(arrival.target) for rank, arrival in arrivals},
            fingerprint.wire.effective(fingerprint.kept_dtype),
            self._residual(fingerprint, arithmetic, placed),
        )
        if len(self.plan.members) > 1:
            op.exchange = self._prepare_exchange(op, op.job, flow)
        op.running = True

    def _residual(
        self, fingerprint: Fingerprint, arithmetic: Arithmetic, placed: Layout
    ) -> Residual | None:
        if not fingerprint.feedback:
            return None
        return self._residuals.of(fingerprint.feedback, placed.held, arithmetic.kept_dtype)

    def _prepare_exchange(self, op: Op, job: Job, flow: Dataflow) -> Exchange:
        exchange = Exchange(
            flow,
            job,
            self._buffers,
            on_sendable=self._edges.kick,
            on_finished=lambda: self._distribute(op, job, exchange),
            on_failed=lambda error: self._outcomes.cannot_run(op.seq, error),
        )
        for destination in flow.sends:
            digest = op.digest(self.ranks, self._placement[destination])
            self._edges.out(destination).enqueue(Outgoing(exchange, destination, op.seq, digest))
        for source in flow.receives:
            self._edges.open_in(source)
        return exchange

    # Compiling

    def sizes(self, fingerprint: Fingerprint) -> tuple[int, ...]:
        """Elements: of the tensor, or of each rank's block."""
        if fingerprint.kind is Kind.ALL_TO_ALL:
            return ()
        if fingerprint.kind.has_blocks:
            return block_numels(fingerprint, self.plan.world_size)
        return (fingerprint.numel,)

    def _compile(
        self, fingerprint: Fingerprint, strategy: str, counts: Counts
    ) -> tuple[Layout, Dataflow]:
        kind, nodes = fingerprint.kind, len(self.plan.members)
        encoded = fingerprint.wire.effective(fingerprint.kept_dtype) is not Wire.NATIVE
        placed = self._layout(fingerprint, counts, encoded and nodes > 1)
        program = compile_program(
            kind,
            strategy,
            nodes=nodes,
            numel=placed.numel,
            node=self.me,
            root=self.plan.index_of_rank(fingerprint.root) if kind.has_root else -1,
            tree_order=self.plan.tree_order,
            blocks=placed.blocks,
        )
        flow = build(
            program,
            node=self.me,
            numel=placed.numel,
            chunk=chunk_elements(fingerprint, placed.held, nodes),
            results=placed.results,
            encoded=encoded,
        )
        return placed, flow

    def _layout(self, fingerprint: Fingerprint, counts: Counts, rounded: bool) -> Layout:
        if fingerprint.kind is Kind.ALL_TO_ALL:
            row, world = fingerprint.numel, self.plan.world_size
            elements = {
                rank: [count * row for count in each]
                for rank, each in zip(self.ranks, counts, strict=True)
            }
            return exchange_layout(
                {rank: each[:world] for rank, each in elements.items()},
                {rank: each[world:] for rank, each in elements.items()},
                self._placement,
                self.me,
            )
        sizes = self.sizes(fingerprint)
        return layout(fingerprint.kind, sizes, fingerprint.root, self._placement, self.me, rounded)

    # Running

    def start(self, op: Op) -> None:
        """Set a prepared op going."""
        assert op.job is not None
        if op.exchange is None:
            self._fold_locally(op, op.job)
            return
        exchange = op.exchange
        contributions = exchange.start()
        size = sum(task.stop - task.start for task in contributions)
        inline = size * op.job.arithmetic.kept_itemsize * len(self.ranks) <= INLINE_BYTES
        for task in contributions:
            if inline:
                exchange.contribute(task)
            else:
                self._workers.submit(_contribution(exchange, task))

    def _fold_locally(self, op: Op, job: Job) -> None:
        # With every rank here nothing can fail the op any more, and no verdict may tell the ranks
        # that their memory is theirs again while workers write to it.
        if not self._outcomes.settle(op):
            return
        over_parts(
            job.layout.parts,
            job.arithmetic.itemsize,
            self._workers,
            job.fold_locally,
            lambda error: self._outcomes.tell_end(op, error),
        )

    def _distribute(self, op: Op, job: Job, exchange: Exchange) -> None:
        """Every task is done: copy the result to the local ranks."""
        if not self._outcomes.settle(op):
            return

        def finish(error: Exception | None) -> None:
            exchange.release()
            self._outcomes.tell_end(op, error)

        def copy(part: Part, start: int, stop: int) -> None:
            job.arithmetic.finish(job.outputs_of(part, start, stop), exchange.range(start, stop))

        over_parts(
            [part for part in job.layout.parts if part.targets],
            job.arithmetic.kept_itemsize,
            self._workers,
            copy,
            finish,
        )


def _contribution(exchange: Exchange, task: Task) -> Callable[[], None]:
    return lambda: exchange.contribute(task)
