"""MPICH or Open MPI, through mpi4py; the process was started by the ``mpiexec`` of it."""

from __future__ import annotations

from collections.abc import Callable

import mpi4py

# One thread of a rank calls MPI; the default would make every call take a lock.
mpi4py.rc.thread_level = "funneled"

from mpi4py import MPI  # noqa: E402

from allfold.cli._bench.data import Array, Bench  # noqa: E402
from benchmarks.devices import Operation  # noqa: E402
from benchmarks.libraries import Handle  # noqa: E402

_Call = Callable[[MPI.Intracomm, Array, Array], object]


class MpiLibrary:
    """``MPI.COMM_WORLD``, with ordinary arrays."""

    wire = "native"

    def __init__(self, name: str) -> None:
        """Args:
        name: ``mpich`` or ``openmpi``; MPI4PY_MPIABI has chosen that one for ``mpi4py``.
        """
        self.name = name
        self.world = MPI.COMM_WORLD

    def supports(self, _: str, /) -> bool:
        return True

    def empty(self, _: int, /) -> Array | None:
        return None

    def operation(self, bench: Bench, source: Array, target: Array) -> Operation:
        world, call = self.world, _CALLS[bench.kind]
        return lambda: call(world, source, target)

    def barrier(self) -> Operation:
        return self.world.Barrier

    def start_all_reduce(self, tensor: Array) -> Handle:
        handle: Handle = self.world.Iallreduce(MPI.IN_PLACE, tensor)
        return handle

    def close(self) -> None:
        """Nothing: MPI is finalized when the interpreter ends."""


def _reduce(world: MPI.Intracomm, x: Array, _: Array) -> None:
    if world.rank == 0:
        world.Reduce(MPI.IN_PLACE, x, root=0)
    else:
        world.Reduce(x, None, root=0)


def _gather(world: MPI.Intracomm, x: Array, y: Array) -> None:
    world.Gather(x, y if world.rank == 0 else None, root=0)


def _scatter(world: MPI.Intracomm, x: Array, y: Array) -> None:
    world.Scatter(x if world.rank == 0 else None, y, root=0)


def _shift(world: MPI.Intracomm, x: Array, y: Array) -> None:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    world.Sendrecv(x, after, recvbuf=y, source=before)


_CALLS: dict[str, _Call] = {
    "all_reduce": lambda world, x, _: world.Allreduce(MPI.IN_PLACE, x),
    "reduce": _reduce,
    "broadcast": lambda world, x, _: world.Bcast(x, root=0),
    "all_gather": lambda world, x, y: world.Allgather(x, y),
    "reduce_scatter": lambda world, x, y: world.Reduce_scatter_block(x, y),
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": lambda world, x, y: world.Alltoall(x, y),
    "send_recv": _shift,
}
