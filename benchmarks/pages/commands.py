"""The measurements of the page, each a command of its own: a quarter of an hour together."""

from __future__ import annotations

COMMANDS = (
    # Every library, in both rhythms.
    "--parts collectives --kinds all_reduce --sizes 4,4K,64K,256K,1M,4M,16M --seconds 1",
    # One core per node, and networks.
    "--parts collectives --kinds all_reduce --sizes 4K,64K,256K,1M,16M --seconds 1 --pin"
    " --shapes 2x1",
    "--parts collectives --kinds all_reduce --sizes 4K,64K,256K,1M,16M --seconds 1"
    " --network 1gbit,10gbit --shapes 2x1",
    # Every other collective.
    "--parts collectives --kinds reduce_scatter,all_gather,broadcast,gather,scatter,all_to_all"
    " --sizes 4K,64K,1M,16M --shapes 2x1,4x1 --seconds 0.5 --peers gloo,mpich,openmpi",
    # Training and decoding.
    "--parts ddp,decode --shapes 1x2,2x1,2x2 --peers gloo --seconds 3",
)
