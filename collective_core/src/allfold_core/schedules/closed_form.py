"""The terms that the closed forms of all strategies are made of.

α is the latency of a message, o the overhead of each further one in a step, β the seconds per byte
of one direction of a port, γ the seconds per folded byte; all of them are in
:class:`~allfold_core.plan.LinkModel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from allfold_core.operations import Kind
from allfold_core.schedules.schedule import wire_chunk
from allfold_core.topology import LinkModel


@dataclass(frozen=True, slots=True)
class PricedOp:
    """One op whose time is wanted.

    Attributes:
        kind: the collective; a barrier for every op without bytes.
        nodes: how many there are, 2 or more.
        nbytes: the size of the tensor, or of all blocks together.
        links: what a link costs.
        parameter: the number in the strategy's name; 0 without one.
        chunks: into how many pieces a slice is cut; ``None``: as agents do.
    """

    kind: Kind
    nodes: int
    nbytes: int
    links: LinkModel
    parameter: int = 0
    chunks: int | None = None

    @property
    def alpha(self) -> float:
        return self.links.latency

    @property
    def beta(self) -> float:
        return self.links.seconds_per_byte

    @property
    def gamma(self) -> float:
        return self.links.fold_seconds_per_byte

    def pieces(self, slice_bytes: float) -> int:
        """Into how many chunks a slice is cut, 1 or more."""
        if self.chunks is not None:
            return self.chunks
        return max(1, ceil(slice_bytes / wire_chunk(self.nbytes, self.nodes, self.links)))

    def burst(self, messages: int) -> float:
        """Seconds of one step in which a port handles ``messages``, without their bytes."""
        return self.links.latency + (messages - 1) * self.links.overhead

    def to_all_others(self) -> float:
        """Seconds of one step in which everybody sends to everybody, without the bytes."""
        return self.burst(self.nodes - 1)

    def folding(self, chunks: int) -> float:
        """Seconds per byte to receive and fold, chunk by chunk.

        Only the first chunk pays β and γ one after the other, each further one the greater of them.
        """
        return (self.beta + self.gamma + (chunks - 1) * max(self.beta, self.gamma)) / chunks

    def block_bytes(self) -> float:
        """Seconds per byte of a block, folded where the kind reduces.

        Blocks are priced unpipelined: there is little to overlap where they are only passed on.
        """
        return self.beta + self.gamma if self.kind.reduces else self.beta

    def all_other_blocks(self) -> float:
        """Seconds to send the blocks of all other nodes through one port."""
        return (self.nodes - 1) / self.nodes * self.nbytes * self.block_bytes()


def halvings(nodes: int) -> int:
    """⌊log2 nodes⌋, which is also the depth of an in-order tree."""
    return nodes.bit_length() - 1


def heap_depth(nodes: int, arity: int) -> int:
    """The levels below the root of a heap; ``ValueError`` for a heap without children."""
    if arity < 1:
        raise ValueError(f"a tree of arity {arity} has no second level; the arity is 1 or more")
    if arity == 1:
        return nodes - 1
    depth, level, total = 0, 1, 1
    while total < nodes:
        level *= arity
        total += level
        depth += 1
    return depth
