"""How finely a slice is cut for receiving, folding and sending to overlap.

All nodes of a group must cut alike, and predictions must reckon with what agents do: so the rule
stands here, once.
"""

from __future__ import annotations

SMALLEST_CHUNK = 256 * 1024
LARGEST_CHUNK = 2 * 1024 * 1024
CHUNKS_PER_SLICE = 8


def wire_chunk(nbytes: int, nodes: int) -> int:
    """The bytes of a chunk of a tensor of ``nbytes``: a fraction of a node's slice.

    Each chunk costs some 100 us of Python at either end, so a chunk is not too small; a slice needs
    several of them to overlap.
    """
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, nbytes // (nodes * CHUNKS_PER_SLICE)))
