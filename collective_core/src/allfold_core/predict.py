"""The textbook time of an op, in closed form: what ``auto`` decides by.

With P nodes, m bytes, and of the :class:`~allfold_core.plan.LinkModel` α (latency), o (overhead),
β (seconds per byte) and γ (seconds per folded byte), an all-reduce takes

==================  ===========================================================================
direct              α + (P-2)o + (P-1)m(β + γ)
direct2             2(α + (P-2)o) + (P-1)/P · m(2β + γ)
ring                2(P-1)α + (P-1)/P · m(2β + γ)
halving_doubling    2 log2 P · α + (P-1)/P · m(2β + γ); beyond a power of two + 2(α + mβ) + mγ
tree(k)             2d(α + (k-1)o + kmβ) + dkmγ, where d is the depth of the tree
double_tree         as tree(2) with m/2
centralized         tree(P-1)
chain               tree(1)
==================  ===========================================================================

when every slice is one message. These are exact where P suits them (any P that divides the tensor
for direct2 and ring, a power of two for halving_doubling, a full tree for tree(k)); in trees that
are not full they are upper bounds.

Long slices are cut into c chunks, so that receiving, folding and sending overlap. Then only the
first chunk pays β + γ one after the other, each further one the greater of them, and

* in ring and direct2, sending goes on while the first chunk of the next step is under way, so a
  latency shorter than a step's transfer costs nothing;
* in trees, the way up and the way down overlap too: beyond the first chunk's way, each chunk costs
  what the busiest port passes, k+1 chunks in tree(k), 4 halves in double_tree. That is less than
  the usual (2d+c-1)(α + ...), in which every chunk waits for a latency of its own;
* in halving_doubling, chunks do harm: what a node may send early to the next partner competes with
  what it still owes to the present one. The next message is half as long, so 3/2 of the time.

Of blocks, m is the size of all P together. With equal blocks

==================  ===========================================================================
direct              α + (P-2)o + (P-1)/P · mβ; reduce-scatter also γ; an all-to-all has a barrier
                    behind it, another α + (P-2)o
ring                (P-1)α + (P-1)/P · mβ, and γ
halving_doubling    log2 P · α + (P-1)/P · mβ, and γ; beyond a power of two + 2α + mβ, and γ
scatter             d(α + (k-1)o) + α + (P-2)o + (P-1)/P · mβ + (d-1)(α + mβ/P) in tree(k): the
                    root sends block by block, and the last one goes all the way down
gather              d(α + (k-1)o) + max(d(α + (k-1)o), α + (P-2)o) + (P-1)/P · mβ in tree(k)
==================  ===========================================================================

An all-gather or reduce-scatter in a tree is a gather or scatter one way and a broadcast or reduce
the other.

A broadcast or reduce has one wave with data and one with signals (nobody may finish before it has
heard from all), so it pays the latencies twice and the bytes once; a barrier has only signals.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from allfold_core.chunking import wire_chunk
from allfold_core.compiler import StrategySpec, strategy_of
from allfold_core.operations import Kind
from allfold_core.plan import LinkModel

_SHARED_PORT = 1.5


def predict(
    kind: Kind,
    strategy: str,
    nodes: int,
    nbytes: int,
    links: LinkModel,
    chunks: int | None = None,
) -> float:
    """Seconds that one op of ``nbytes`` takes, by the formula of its strategy.

    Args:
        kind: the collective.
        strategy: a name as :func:`~allfold_core.compiler.parse_strategy` reads it.
        nodes: the number of nodes.
        nbytes: the size of the tensor.
        links: α, o, β and γ.
        chunks: into how many pieces each slice is cut; as agents do, if not given.
    """
    spec = strategy_of(kind, strategy)
    if nodes == 1:
        return 0.0
    if kind is Kind.BARRIER or not nbytes:
        return _barrier(spec, nodes, links)
    if kind.has_blocks:
        return _of_blocks(kind, spec, nodes, nbytes, links)
    if spec.name == "ring" and nbytes < nodes:
        spec = StrategySpec("tree", 2)
    slice_bytes = nbytes / _slices(spec.name, nodes)
    if chunks is None:
        chunks = ceil(slice_bytes / wire_chunk(nbytes, nodes, links))
    if spec.name in _FORMULAS:
        return _FORMULAS[spec.name](nodes, slice_bytes, links, chunks)
    return _tree(kind, _arity(spec, nodes), nodes, nbytes, links, chunks)


def _burst(messages: int, links: LinkModel) -> float:
    """One step in which a port handles ``messages``, without their bytes."""
    return links.latency + (messages - 1) * links.overhead


def _barrier(spec: StrategySpec, nodes: int, links: LinkModel) -> float:
    if spec.name in ("direct", "direct2"):
        return _burst(nodes - 1, links)
    if spec.name == "double_tree":
        return 2 * _halvings(nodes) * _burst(min(2, nodes - 1), links)
    arity = _arity(spec, nodes) if spec.name in ("tree", "centralized") else min(2, nodes - 1)
    return 2 * _heap_depth(nodes, arity) * _burst(arity, links)


def _direct(nodes: int, size: float, links: LinkModel, chunks: int) -> float:
    return _burst(nodes - 1, links) + (nodes - 1) * size * _folding(links, chunks)


def _direct2(nodes: int, size: float, links: LinkModel, chunks: int) -> float:
    burst, passed = _burst(nodes - 1, links), (nodes - 1) * size
    beta, gamma = links.seconds_per_byte, links.fold_seconds_per_byte
    scatter = max(passed * max(beta, gamma), burst + passed / chunks * (beta + gamma))
    return scatter + burst + passed * beta


def _ring(nodes: int, size: float, links: LinkModel, chunks: int) -> float:
    beta, gamma = links.seconds_per_byte, links.fold_seconds_per_byte
    scatter = max(size * max(beta, gamma), links.latency + size / chunks * (beta + gamma))
    gather = max(size * beta, links.latency + size / chunks * beta)
    return (nodes - 1) * scatter + (nodes - 2) * gather + links.latency + size * beta


def _halving_doubling(nodes: int, size: float, links: LinkModel, chunks: int) -> float:
    """``size`` is that of the first exchange, half of the tensor."""
    steps = _halvings(nodes)
    core, whole = 1 << steps, 2 * size
    per_byte = _folding(links, chunks) + links.seconds_per_byte
    if chunks > 1:
        per_byte *= _SHARED_PORT
    extra = 2 * links.latency + whole * per_byte if nodes > core else 0.0
    return 2 * steps * links.latency + (core - 1) / core * whole * per_byte + extra


def _folding(links: LinkModel, chunks: int) -> float:
    """Seconds per byte to receive and fold, chunk by chunk."""
    beta, gamma = links.seconds_per_byte, links.fold_seconds_per_byte
    return (beta + gamma + (chunks - 1) * max(beta, gamma)) / chunks


def _tree(kind: Kind, arity: int, nodes: int, nbytes: int, links: LinkModel, chunks: int) -> float:
    depth, chunk = _heap_depth(nodes, arity), nbytes / chunks
    beta, gamma = links.seconds_per_byte * chunk, links.fold_seconds_per_byte * chunk
    time = 2 * depth * _burst(arity, links)
    if kind is Kind.ALL_REDUCE:
        # A port of an inner node passes k children's chunks one way and one of the parent.
        passed = arity + 1 if depth > 1 else arity
        time += depth * arity * (2 * beta + gamma)
        return time + (chunks - 1) * max(passed * beta, arity * gamma)
    if kind is Kind.REDUCE:
        return time + arity * (depth * (beta + gamma) + (chunks - 1) * max(beta, gamma))
    return time + arity * (depth + chunks - 1) * beta


def _double_tree(nodes: int, size: float, links: LinkModel, chunks: int) -> float:
    depth, chunk = _halvings(nodes), size / chunks
    beta, gamma = links.seconds_per_byte * chunk, links.fold_seconds_per_byte * chunk
    children = min(2, nodes - 1)
    first = 2 * depth * (_burst(children, links) + children * beta) + depth * children * gamma
    # Per chunk of both trees: an inner node passes 3 (the root of few nodes fewer), a leaf 1.
    return first + (chunks - 1) * max(min(nodes, 4) * beta, children * gamma)


def _of_blocks(kind: Kind, spec: StrategySpec, nodes: int, nbytes: int, links: LinkModel) -> float:
    """Unpipelined: there is little to overlap where a block is only passed on."""
    per_byte = links.seconds_per_byte
    if kind.reduces:
        per_byte += links.fold_seconds_per_byte
    moved = (nodes - 1) / nodes * nbytes * per_byte
    if kind is Kind.ALL_TO_ALL:
        return 2 * _burst(nodes - 1, links) + moved
    if spec.name == "direct":
        return _burst(nodes - 1, links) + moved
    if spec.name == "ring":
        return (nodes - 1) * links.latency + moved
    steps = _halvings(nodes)
    if spec.name == "halving_doubling":
        extra = 2 * links.latency + nbytes * per_byte if nodes > 1 << steps else 0.0
        return steps * links.latency + moved + extra
    return _tree_of_blocks(kind, _arity(spec, nodes), nodes, nbytes, links, per_byte)


def _tree_of_blocks(
    kind: Kind, arity: int, nodes: int, nbytes: int, links: LinkModel, per_byte: float
) -> float:
    depth, block = _heap_depth(nodes, arity), nbytes / nodes
    # One way for signals, or for what is folded; the root's port for the other blocks.
    way, passed = depth * _burst(arity, links), _burst(nodes - 1, links)
    moved = (nodes - 1) * block * per_byte
    if kind is Kind.SCATTER:
        return way + passed + moved + (depth - 1) * (links.latency + block * per_byte)
    time = way + max(way, passed) + moved
    if kind is Kind.GATHER:
        return time
    # What comes back is the whole tensor to each of k children, on every level.
    return time + depth * arity * nbytes * per_byte


_FORMULAS: dict[str, Callable[[int, float, LinkModel, int], float]] = {
    "direct": _direct,
    "direct2": _direct2,
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "double_tree": _double_tree,
}


def _slices(name: str, nodes: int) -> int:
    """How many slices a strategy makes; halving_doubling's longest is half of the tensor."""
    if name in ("direct2", "ring"):
        return nodes
    return 2 if name in ("double_tree", "halving_doubling") else 1


def _arity(spec: StrategySpec, nodes: int) -> int:
    widest = {"centralized": nodes - 1, "chain": 1}
    return min(widest.get(spec.name, spec.arity), nodes - 1)


def _halvings(nodes: int) -> int:
    """⌊log2 nodes⌋, which is also the depth of an in-order tree."""
    return nodes.bit_length() - 1


def _heap_depth(nodes: int, arity: int) -> int:
    """Levels below the root of a heap."""
    if arity == 1:
        return nodes - 1
    depth, level, total = 0, 1, 1
    while total < nodes:
        level *= arity
        total += level
        depth += 1
    return depth
