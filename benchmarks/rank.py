"""One rank: does what the conductor says, with several libraries in turn.

    python -m benchmarks.rank CONTROL-SOCKET [RANK]

Under the starter of an MPI the rank is what that says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import allfold
from benchmarks import mpi
from benchmarks.computing import Computing
from benchmarks.control import Message, serve, sleep_until
from benchmarks.devices import CUDA, Device, Host, Operation, TorchDevice, gpus
from benchmarks.libraries import Library
from benchmarks.plan import (
    BURST,
    DDP,
    DECODE,
    DEEPSPEED,
    MPIS,
    THROUGH_TORCH,
    TORCH,
    UCX,
    Case,
)
from benchmarks.workloads import Workload, take_turn

_CONDUCTOR_SECONDS = 3600.0


class Rank:
    """The state of this process between two messages."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._nodes = self._world = 1
        self._group: allfold.Group | None = None
        self._libraries: dict[str, Library] = {}
        self._workload: Workload | None = None
        self._compute: Operation | None = None
        self._device: Device = Host()

    def obey(self, message: Message) -> Message:
        """Do what a message says; the answer."""
        do: dict[str, Callable[..., Message | None]] = {
            "join": self._join,
            "prepare": self._prepare,
            "write": self._write,
            "run": self._run,
            "check": self._check,
            "release": self._release,
        }
        return do[message.pop("do")](**message) or {}

    def leave(self) -> None:
        """Leave the libraries' groups, the last first."""
        self._release()
        for library in reversed(self._libraries.values()):
            library.close()
        if self._group is not None:
            allfold.shutdown()

    # --- what the messages say

    def _join(
        self,
        world: int,
        nodes: int,
        device: str,
        libraries: list[str],
        environment: dict[str, str],
        store: str,
        seconds: float,
        core: int | None,
    ) -> Message:
        if core is not None:  # before the libraries start threads, which inherit it
            os.sched_setaffinity(0, {core})
        os.environ.update(environment)
        self._world, self._nodes = world, nodes
        if device == CUDA:
            self._device = TorchDevice(f"{CUDA}:{self._number % gpus()}")
        for name in libraries:
            self._libraries[name] = self._library(name, store, seconds)
        return {"path": self._device.path}

    def _library(self, name: str, store: str, seconds: float) -> Library:
        """Imported here: what is not asked for need not be installed."""
        if name in (*TORCH, UCX, THROUGH_TORCH):
            from benchmarks.libraries.torch_library import join

            return join(name, self._number, self._world, store, seconds, self._device)
        if name in MPIS:
            from benchmarks.libraries.mpi_library import MpiLibrary

            return MpiLibrary(name)
        if name == DEEPSPEED:
            from benchmarks.libraries.deepspeed import DeepSpeedLibrary

            return DeepSpeedLibrary(self._number, self._world, Path(store).parent.name)
        from benchmarks.libraries.allfold_library import AllfoldLibrary

        if self._group is None:
            self._group = allfold.init(
                rank=self._number, world_size=self._world, timeout=seconds, init_timeout=seconds
            )
            self._device.open(self._group)
        return AllfoldLibrary(name, self._group, self._device)

    def _prepare(self, **case: Any) -> Message:
        found = Case(**case)
        self._workload = self._made(found)
        self._compute = Computing(found.computing) if found.computing else None
        return {"contestants": list(self._workload.contestants) if self._workload else []}

    def _made(self, case: Case) -> Workload | None:
        libraries = list(self._libraries.values())
        where = (self._number, self._nodes, self._world)
        if case.kind == BURST:
            from benchmarks.workloads.burst import BurstWorkload

            return BurstWorkload(libraries, self._device, *where)
        if case.kind == DECODE:
            from benchmarks.workloads.decode import DecodeWorkload

            return DecodeWorkload(libraries, self._device, self._number, self._world)
        if case.kind == DDP:
            if "gloo" not in self._libraries:  # whose default group it trains in, too
                return None
            from benchmarks.workloads.training import DdpWorkload

            return DdpWorkload(self._number, self._world, case.size)
        from benchmarks.workloads.collective import collective

        return collective(case, libraries, self._device, *where)

    def _write(self, contestant: str) -> None:
        self._prepared.write(contestant, 0)

    def _run(self, contestant: str, warm_up: int, ops: int, at: float) -> Message:
        sleep_until(at)
        times = take_turn(self._prepared, contestant, warm_up + ops, self._compute)
        return {
            "calls": times.calls[warm_up:],
            "returns": times.returns[warm_up:],
            "cpu": times.cpu / (warm_up + ops),
        }

    def _check(self, contestant: str, ops: int) -> Message:
        return {"wrong": self._prepared.count_wrong(contestant, ops)}

    def _release(self) -> None:
        self._workload = self._compute = None
        self._device.clear()

    @property
    def _prepared(self) -> Workload:
        if self._workload is None:
            raise RuntimeError("nothing was prepared")
        return self._workload


def main() -> None:
    control, *given = sys.argv[1:]
    number = int(given[0]) if given else mpi.rank()
    serve(control, number, Rank(number), _CONDUCTOR_SECONDS)


if __name__ == "__main__":
    main()
