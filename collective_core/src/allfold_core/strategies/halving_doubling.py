"""Recursive halving, then recursive doubling: the bytes of the ring in 2 log2 P steps.

Rabenseifner's all-reduce, as in Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH" (2005). Only a power of two of nodes can take part; the nodes
beyond it hand their contribution to a partner before and get the result from it afterwards.
Barriers take the binary tree.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedule import Fold, Receive, Send, Slice, Step, balanced_slices
from allfold_core.strategies import tree


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of node ``me``: nodes from the greatest power of two on are the extra ones."""
    if kind is Kind.BARRIER:
        yield from tree.program(kind, nodes, numel, me, arity=2)
        return
    core = 1 << (nodes.bit_length() - 1)
    whole = Slice(0, numel)
    if me >= core:
        yield Send(whole, me - core)
        yield Receive(whole, me - core)
        return
    has_extra = me + core < nodes
    if has_extra:
        yield Fold(whole, (me, me + core))
    yield from _exchange(core, balanced_slices(numel, core), me)
    if has_extra:
        yield Send(whole, me + core)


def _exchange(core: int, slices: tuple[Slice, ...], me: int) -> Iterator[Step]:
    """All-reduce among the nodes 0..core-1, a power of two; node i owns slice i."""
    distance = core // 2
    while distance:
        partner = me ^ distance
        theirs, mine = _half(slices, partner, distance), _half(slices, me, distance)
        if theirs:
            yield Send(theirs, partner)
        if mine:
            yield Fold(mine, (min(me, partner), max(me, partner)))
        distance //= 2
    distance = 1
    while distance < core:
        partner = me ^ distance
        mine, theirs = _half(slices, me, distance), _half(slices, partner, distance)
        if mine:
            yield Send(mine, partner)
        if theirs:
            yield Receive(theirs, partner)
        distance *= 2


def _half(slices: tuple[Slice, ...], node: int, distance: int) -> Slice:
    """The ``distance`` slices around ``node``'s that it keeps when it splits at ``distance``."""
    first = node - node % distance
    return Slice(slices[first].start, slices[first + distance - 1].stop)
