"""Results that go to ranks chunk by chunk, and sends from the memory of ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from select import select
from threading import Event, Lock
from typing import Any

import numpy as np
import pytest

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.codecs import codec_of
from allfold_agent.arithmetic.operands import Operands
from allfold_agent.edges.out_edge import OutEdge
from allfold_core.dtypes import Wire
from allfold_core.errors import PeerMissing, ServiceError
from allfold_core.operations import Kind, ReduceOp
from allfold_core.schedules.parts import Part
from allfold_core.schedules.registry import strategies_for
from allfold_core.survival.judge import packed
from allfold_core.survival.reports import Doubt, Reason
from tests.support.fakes.counted_pool import CountedPool
from tests.support.fakes.damaged_wire import DamagedWire
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import SECONDS, UNWRITTEN, no_outcome
from tests.support.tiers import long, one_in
from tests.support.waiting import wait_until

RANKS = [[0, 3], [1], [2]]
WORLD = 4
ROOT = 3
# Far more than what is handed out at once, and no multiple of a chunk.
ROW = 300_007
KINDS = [kind for kind in Kind if kind is not Kind.BARRIER]
CASES = [(kind, strategy) for kind in KINDS for strategy in strategies_for(kind)]


@dataclass(frozen=True)
class Call:
    """The input of each rank for an op, and its right result (``None`` if it gets nothing)."""

    kind: Kind
    given: list[np.ndarray]
    right: list[np.ndarray | None]
    op: ReduceOp | None
    root: int
    counts: list[tuple[int, ...]]
    row: int

    def run(self, local: LocalGroups, seq: int, rank: int, strategy: str, wire: Wire) -> None:
        right = self.right[rank]
        # Where a rank gets nothing, its agent need not know of any memory for it.
        gets = len(right) if right is not None else ROW * WORLD
        local.ranks[rank].run(
            seq,
            self.kind,
            self.given[rank],
            self.row,
            gets,
            strategy=strategy,
            op=self.op,
            root=self.root,
            wire=wire,
            counts=self.counts[rank],
        )


def numbers(seq: int, rank: int, numel: int) -> np.ndarray:
    return ((np.arange(numel) * 7 + rank * 131 + seq) % 127 - 60).astype(np.float32)


def call_of(kind: Kind, seq: int, row: int = ROW) -> Call:
    """An op of the kind; the blocks of a rank differ in size, and one is empty."""
    everyone = range(WORLD)
    root = ROOT if kind.has_root else -1
    op = ReduceOp.SUM if kind.reduces else None
    if kind is Kind.ALL_TO_ALL:
        return exchange_of(seq, row)
    if not kind.has_blocks:
        brings = [row if kind is not Kind.BROADCAST or rank == root else 0 for rank in everyone]
        given = [numbers(seq, rank, numel) for rank, numel in enumerate(brings)]
        whole = np.sum(given, axis=0) if kind.reduces else given[root]
        gets = [kind is not Kind.REDUCE or rank == root for rank in everyone]
        right = [whole if got else None for got in gets]
        return Call(kind, given, right, op, root, [()] * WORLD, row)
    counts = (row, 0, row // 2, row + 5)
    bounds = np.cumsum((0, *counts))
    blocks = [slice(bounds[rank], bounds[rank + 1]) for rank in everyone]
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        given = [numbers(seq, rank, counts[rank]) for rank in everyone]
        whole = np.concatenate(given)
        gets = [kind is Kind.ALL_GATHER or rank == root for rank in everyone]
        right = [whole if got else None for got in gets]
    else:
        brings = [sum(counts) if kind.reduces or rank == root else 0 for rank in everyone]
        given = [numbers(seq, rank, numel) for rank, numel in enumerate(brings)]
        whole = np.sum(given, axis=0) if kind.reduces else given[root]
        right = [whole[block] for block in blocks]
    return Call(kind, given, right, op, root, [counts] * WORLD, 1)


def exchange_of(seq: int, row: int) -> Call:
    """An all-to-all; what one node sends another ends within a chunk of 256 KiB."""
    sent = [[row // 3 * ((giver + taker) % 3) for taker in range(WORLD)] for giver in range(WORLD)]
    given = [numbers(seq, rank, sum(sizes)) for rank, sizes in enumerate(sent)]
    pieces = [
        np.split(each, np.cumsum(sizes)[:-1]) for each, sizes in zip(given, sent, strict=True)
    ]
    right: list[np.ndarray | None] = [
        np.concatenate([pieces[giver][taker] for giver in range(WORLD)]) for taker in range(WORLD)
    ]
    counts = [(*sent[rank], *(sizes[rank] for sizes in sent)) for rank in range(WORLD)]
    return Call(Kind.ALL_TO_ALL, given, right, None, -1, counts, 1)


def run_all(
    local: LocalGroups, seq: int, call: Call, strategy: str, wire: Wire = Wire.NATIVE
) -> None:
    for rank in range(WORLD):
        call.run(local, seq, rank, strategy, wire)


def assert_right(local: LocalGroups, seq: int, call: Call) -> None:
    for rank in local.ranks:
        assert rank.outcome() == (seq, None)
        right = call.right[rank.rank]
        # A root that sends as the wire rounds gets its own; the numbers here are exact in any.
        if right is not None and not (call.kind is Kind.BROADCAST and rank.rank == call.root):
            assert np.array_equal(rank.result(seq), right), rank.rank
        assert np.array_equal(rank.given(seq), call.given[rank.rank])
    assert_all_given_back(local)


def assert_all_given_back(local: LocalGroups) -> None:
    pool = local.buffers
    assert isinstance(pool, CountedPool)

    def idle() -> bool:
        for group in local.groups:
            for other in local.groups:
                if other is not group:
                    group.edges.out(other.node).wake()
        local.links.ping()  # what a node keeps for others goes when all have it
        return pool.held == 0

    wait_until(idle, "all memory is given back")


@pytest.mark.parametrize("wire", [Wire.NATIVE, long(Wire.BFLOAT16)], ids=["native", "bfloat16"])
@pytest.mark.parametrize(("kind", "strategy"), one_in(3, CASES))
def test_large_results_that_lie_elsewhere_are_exact(kind: Kind, strategy: str, wire: Wire) -> None:
    """With two ranks on a node, blocks of unequal sizes, and chunks that span several parts."""
    if wire is not Wire.NATIVE and kind.reduces:
        wire = Wire.FLOAT16  # holds the sums
    with local_groups(RANKS) as local:
        call = call_of(kind, 0)
        run_all(local, 0, call, strategy, wire)
        assert_right(local, 0, call)


@pytest.mark.parametrize(("kind", "strategy"), one_in(3, CASES))
def test_large_results_are_exact_also_over_edges_that_break(kind: Kind, strategy: str) -> None:
    # Frames of at most 1 MiB must get through.
    with local_groups(RANKS, random.Random(f"{kind} {strategy}"), life=2_500_000) as local:
        for seq in range(2):
            call = call_of(kind, seq, ROW // 2)
            run_all(local, seq, call, strategy)
            assert_right(local, seq, call)
        assert local.rounds == 0


# Ops that fail half-way


class Handing:
    """Stops what hands out results, at one of the calls, until it may go on.

    Args:
        later: stop all later calls, too, so that no node gets its whole result.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, later: bool = False) -> None:
        self.inside, self.go_on = Event(), Event()
        self._calls, self._at, self._lock = 0, at, Lock()
        real = Operands.hand_out

        def hand_out(operands: Operands, part: Part, start: int, stop: int, result: Array) -> None:
            with self._lock:
                self._calls += 1
                mine = self._calls == self._at or (later and self._calls > self._at)
            if mine:
                self.inside.set()
                assert self.go_on.wait(SECONDS)
            real(operands, part, start, stop, result)

        monkeypatch.setattr(Operands, "hand_out", hand_out)


def more_than_sockets_hold() -> int:
    """Return so many elements that a connection whose receiver reads no more cannot take them all.

    The kernel lets the memory of both ends grow to the last of the three numbers.
    """
    limits = (Path("/proc/sys/net/ipv4", name).read_text() for name in ("tcp_rmem", "tcp_wmem"))
    held = sum(int(each.split()[-1]) for each in limits)
    return 2_000_000 + held // np.dtype(np.float32).itemsize


def late() -> PeerMissing:
    return PeerMissing("too late", missing_ranks=[0])


def broadcast(local: LocalGroups, seq: int, numel: int) -> None:
    for rank in local.ranks:
        given = np.ones(numel if rank.rank == 0 else 0)
        rank.run(seq, Kind.BROADCAST, given, numel, numel, root=0, strategy="centralized")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_rank_hears_of_a_failure_when_nothing_is_handed_out_to_it_any_more(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """From then on the rank may use its memory for something else."""
    handing = Handing(monkeypatch, at)
    numel = more_than_sockets_hold()  # so that the root is not done
    with local_groups([[0], [1]], wire=DamagedWire(repeat(None))) as local:
        rank = local.ranks[1]
        broadcast(local, 0, numel)
        assert handing.inside.wait(SECONDS)
        local.fail(0, late())
        assert no_outcome(rank, 0.2), "its memory is being written to"
        handing.go_on.set()
        seq, error = rank.outcome()
        assert seq == 0
        assert isinstance(error, PeerMissing)
        assert UNWRITTEN in rank.result(0), "it has failed half-way"
        rank.overwrite(0, 7.0)
        local.ranks[0].outcome()
        broadcast(local, 1, numel)
        for each in local.ranks:
            assert each.outcome() == (1, None)
        assert (rank.result(1) == 1).all()
        assert (rank.result(0) == 7).all()
        assert_all_given_back(local)


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL], ids=str)
def test_the_inputs_of_an_op_that_fails_half_way_are_as_they_were(
    monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    handing = Handing(monkeypatch, at=2, later=True)
    # So long that workers and threads of edges hand it out: the reactor is not to be stopped.
    with local_groups(RANKS, wire=DamagedWire(repeat(None))) as local:
        call = call_of(kind, 0, 3 * ROW)
        run_all(local, 0, call, strategies_for(kind)[0])
        assert handing.inside.wait(SECONDS)
        local.fail(0, late())
        handing.go_on.set()
        for rank in local.ranks:
            assert rank.outcome()[0] == 0
            assert np.array_equal(rank.given(0), call.given[rank.rank])


def test_an_op_does_not_succeed_where_a_part_of_its_result_could_not_be_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, failed = Operands.hand_out, Event()

    def once(operands: Operands, *arguments: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("no memory")
        real(operands, *arguments)

    with local_groups([[0], [1]], wire=DamagedWire(repeat(None))) as local:
        monkeypatch.setattr(Operands, "hand_out", once)
        broadcast(local, 0, 2_000_000)
        errors = [rank.outcome()[1] for rank in local.ranks]
        for error in errors:
            assert isinstance(error, ServiceError)
            assert "no memory" in error.message


def is_in_the_sockets(edge: OutEdge) -> bool:
    """Tell if its first frame was written, or waits for room."""
    if not edge._frames.unacked or edge._connection is None:
        return False
    return edge._frames.unacked[0].counted or not select([], [edge._connection.socket], [], 0)[1]


def test_what_a_rank_writes_after_its_op_has_failed_is_in_nobodys_result() -> None:
    """A frame of it was on its way: its node goes on sending it, or breaks off."""
    numel = 262_144
    with local_groups([[0], [1]]) as local:
        root, giver = local.ranks
        giver.run(0, Kind.GATHER, np.ones(numel), numel, 0, root=0, strategy="centralized")
        local.groups[0].edges.open_in("node1")
        out = local.groups[1].edges.out("node0")
        wait_until(lambda: is_in_the_sockets(out), "they have the frame, or are full of it")
        local.fail(0, late())
        assert isinstance(giver.outcome()[1], PeerMissing)
        giver.overwrite(0, 7.0)
        root.run(0, Kind.GATHER, np.zeros(numel), numel, 2 * numel, root=0, strategy="centralized")
        assert isinstance(root.outcome()[1], PeerMissing)
        assert 7 not in root.result(0)


def test_what_is_decoded_when_the_result_comes_from_elsewhere_goes_into_nobody_elses_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec: Any = type(codec_of(Wire.BFLOAT16))
    real, inside, go_on, done = codec.decode, Event(), Event(), Event()
    numel = 200_000  # received in many pieces

    def decode(*arguments: Any) -> None:
        inside.set()
        assert go_on.wait(SECONDS)
        real(*arguments)
        done.set()

    monkeypatch.setattr(codec, "decode", decode)
    with local_groups([[0], [1]]) as local:
        for rank in local.ranks:
            given = np.ones(numel if rank.rank == 0 else 0)
            rank.run(
                0, Kind.BROADCAST, given, numel, numel, root=0, wire=Wire.BFLOAT16, strategy="chain"
            )
        assert inside.wait(SECONDS)
        assert local.ranks[0].outcome() == (0, None)
        doubt = Doubt(0, Reason.FAILED, error=packed(late()))
        local.groups[0].runs.doubt([doubt])  # the root has the result, which the other one fetches
        assert local.ranks[1].outcome() == (0, None)
        assert local.ranks[1].result(0)[0] == 1.0
        taken = [local.buffers.take(4 * numel) for _ in range(8)]
        for buffer in taken:
            buffer.view[:] = bytes([7]) * len(buffer.view)
        go_on.set()
        assert done.wait(SECONDS)
        assert all(set(buffer.view) == {7} for buffer in taken)


def test_what_was_received_for_an_op_that_fails_before_it_is_folded_is_given_back() -> None:
    """One node has sent its part, and another one never calls the op."""
    numel = 200_000
    with local_groups([[0], [1], [2]]) as local:
        folder, giver, _ = local.groups
        for rank in local.ranks[:2]:
            rank.call(0, np.ones(numel), strategy="centralized")
        wait_until(
            lambda: folder.edges.frames_moved(giver.node), "the node that folds has a part of it"
        )
        local.fail(0, late())
        for rank in local.ranks[:2]:
            assert isinstance(rank.outcome()[1], PeerMissing)
        local.ranks[2].call(0, np.ones(numel), strategy="centralized")
        assert isinstance(local.ranks[2].outcome()[1], PeerMissing)
        assert_all_given_back(local)
