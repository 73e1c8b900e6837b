"""The cut of a slice into chunks, so that receiving, folding and sending overlap.

All nodes of a group must cut alike, and predictions must reckon with what agents do: so the rule
stands here, once.
"""

from __future__ import annotations

from allfold_core.topology import LinkModel

SMALLEST_CHUNK = 64 * 1024
LARGEST_CHUNK = 2 * 1024 * 1024
CHUNKS_PER_SLICE = 8

# What a chunk has at least where links are fast, if the tensor has as much.
_SMALL_CHUNK = 1024 * 1024
# How long a slow link should be busy with one chunk.
_SHORTEST_SECONDS = 0.5e-3
_LONGEST_SECONDS = 2e-3
# As good as no cost at all.
_LEAST_SECONDS_PER_BYTE = 1e-15


def wire_chunk(nbytes: int, nodes: int, links: LinkModel) -> int:
    """The bytes of a chunk of a tensor of ``nbytes``: a fraction of a node's slice.

    Each chunk costs some 100 us of Python at either end, so a chunk is not too small. Nothing
    overlaps with a slice's first chunk and last one, so it is not too large; on a slow link, which
    is busy for longer with the same bytes, it is smaller.
    """
    rate = 1 / max(links.seconds_per_byte, _LEAST_SECONDS_PER_BYTE)
    smallest = min(_SMALL_CHUNK, max(SMALLEST_CHUNK, int(_SHORTEST_SECONDS * rate)))
    largest = min(LARGEST_CHUNK, max(smallest, int(_LONGEST_SECONDS * rate)))
    return max(smallest, min(largest, nbytes // (nodes * CHUNKS_PER_SLICE)))
