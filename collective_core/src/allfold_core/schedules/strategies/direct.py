"""The mesh: everybody sends to everybody what they need, in one latency.

An all-reduce sends everything to everybody: one latency, the fewest there can be, for (P-1) times
the bytes, so it is for short tensors. Blocks are sent to nobody who does not need them. Whoever
folds does it in node order, so all have the same bits although each computes them itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allfold_core.operations import Kind
from allfold_core.schedules.closed_form import PricedOp
from allfold_core.schedules.schedule import Await, Fold, Receive, Send, Signal, Slice, Step
from allfold_core.schedules.strategy import Description, Problem, Strategy


def others_after(nodes: int, me: int) -> Iterator[int]:
    """Everybody else, from the next node on: in step k no two nodes address the same one."""
    return ((me + distance) % nodes for distance in range(1, nodes))


def others_before(nodes: int, me: int) -> Iterator[int]:
    """Everybody else, in the order in which their messages to ``me`` come."""
    return ((me - distance) % nodes for distance in range(1, nodes))


def barrier(nodes: int, me: int) -> Iterator[Step]:
    """Tell everybody, hear from everybody."""
    yield from (Signal(other) for other in others_after(nodes, me))
    yield from (Await(other) for other in others_before(nodes, me))


def program(problem: Problem, me: int) -> Iterator[Step]:
    """The program of node ``me``."""
    kind, nodes, blocks = problem.kind, problem.nodes, problem.blocks
    if kind is Kind.BARRIER:
        return barrier(nodes, me)
    if kind is Kind.ALL_TO_ALL:
        return all_to_all(blocks[me * nodes : (me + 1) * nodes], blocks[me::nodes], me)
    return block_program(kind, blocks, me) if blocks else _all_reduce(problem, me)


def _all_reduce(problem: Problem, me: int) -> Iterator[Step]:
    yield from (Send(problem.whole, other) for other in others_after(problem.nodes, me))
    yield Fold(problem.whole, tuple(range(problem.nodes)))


def block_program(kind: Kind, blocks: Sequence[Slice], me: int) -> Iterator[Step]:
    """Reduce-scatter: everybody their own block of mine. All-gather: everybody my block."""
    if kind is Kind.ALL_GATHER:
        yield from exchange([blocks[me]] * len(blocks), blocks, me)
        return
    others = list(others_after(len(blocks), me))
    yield from (Signal(other) for other in others if not blocks[other])
    yield from (Send(blocks[other], other) for other in others if blocks[other])
    if blocks[me]:
        yield Fold(blocks[me], tuple(range(len(blocks))))
    else:
        yield from (Await(other) for other in others_before(len(blocks), me))


def all_to_all(outgoing: Sequence[Slice], incoming: Sequence[Slice], me: int) -> Iterator[Step]:
    """Send ``outgoing[j]`` to every node j, receive ``incoming[j]`` from it, and wait for all.

    The nodes agree on sizes in pairs alone, so one for which all is well would not notice that two
    others disagree: nobody is done before everybody has received what it expects.
    """
    nodes = len(outgoing)
    after = list(others_after(nodes, me))
    yield from (Send(outgoing[other], other) for other in after if outgoing[other])
    yield from (
        Receive(incoming[other], other) for other in others_before(nodes, me) if incoming[other]
    )
    yield from barrier(nodes, me)


def exchange(outgoing: Sequence[Slice], incoming: Sequence[Slice], me: int) -> Iterator[Step]:
    """Send ``outgoing[j]`` to every node j and receive ``incoming[j]`` from it.

    A node that has nothing for another one sends it a signal, before everything else, because a
    signal waits for nothing then.
    """
    nodes = len(outgoing)
    yield from (Signal(other) for other in others_after(nodes, me) if not outgoing[other])
    after = list(others_after(nodes, me))
    yield from (Send(outgoing[other], other) for other in after if outgoing[other])
    before = list(others_before(nodes, me))
    yield from (Receive(incoming[other], other) for other in before if incoming[other])
    yield from (Await(other) for other in before if not incoming[other])


def seconds(op: PricedOp) -> float:
    """The time of the mesh; that of an all-to-all has a barrier behind it."""
    if op.kind is Kind.ALL_TO_ALL:
        return 2 * op.to_all_others() + op.all_other_blocks()
    if op.kind.has_blocks:
        return op.to_all_others() + op.all_other_blocks()
    passed = (op.nodes - 1) * op.nbytes
    return op.to_all_others() + passed * op.folding(op.pieces(op.nbytes))


def senders(_kind: Kind, nodes: int) -> int:
    """Everybody sends to everybody else at once."""
    return nodes - 1


STRATEGY = Strategy(
    name="direct",
    kinds=frozenset(
        {
            Kind.ALL_REDUCE,
            Kind.BARRIER,
            Kind.ALL_GATHER,
            Kind.REDUCE_SCATTER,
            Kind.ALL_TO_ALL,
        }
    ),
    compile=program,
    predict=seconds,
    senders=senders,
    # Not whole tensors, which were measured to gain less: 1 MiB over 20 ms takes 67 ms, where 36
    # would be due.
    parallel_kinds=frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL}),
    # Not all-reduces, in which everybody sends a whole selection to everybody.
    sparse_kinds=frozenset({Kind.REDUCE_SCATTER}),
    description=Description(
        summary="everybody sends everything to everybody, and folds on its own",
        steps="1",
        sent="(P−1) m",
        seconds="α + (P−2)o + (P−1)m(β + γ)",
        auto_for="short tensors; barriers",
    ),
)
