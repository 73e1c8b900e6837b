"""DeepSpeed's all-reduce through shared memory, which is meant for inference on CPUs.

Of DeepSpeed nothing else is used, nor any of its launchers: this is the op that its own
``ShareMemCommBuilder`` compiles, for ranks of one machine.

    python -m benchmarks.libraries.deepspeed    # compiles it, which takes half a minute once
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from allfold.cli._bench.data import Array, Bench
from benchmarks.devices import Operation
from benchmarks.errors import BenchmarkFailed
from benchmarks.libraries import Handle
from benchmarks.plan import DECODE, DEEPSPEED

_SHARED = Path("/dev/shm")
_ADDRESS = "bench"
_FLOAT32 = 1
"""The level of vector instructions that its sums of float32 take; without them its ranks hang."""


class DeepSpeedLibrary:
    """``inference_all_reduce_``, with ordinary arrays; the ranks spin until all are there."""

    name = DEEPSPEED
    wire = "native"

    def __init__(self, rank: int, world: int, job: str) -> None:
        """Wait for the other ranks.

        Args:
            job: a name that no other group on this machine has.
        """
        module = compiled()
        if module.vector_kernel_level() < _FLOAT32:
            raise BenchmarkFailed("this processor lacks what DeepSpeed's op needs: AVX2")
        with _environment(LOCAL_SIZE=str(world), MASTER_ADDR=_ADDRESS, MASTER_PORT=job):
            module.initialize(world, rank)
        self._all_reduce: Any = torch.ops.deepspeed.inference_all_reduce_
        self._all_reduce(torch.zeros(1))  # after which all have mapped each other's memory
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{_ADDRESS}_{job}_{rank}"
        (_SHARED / name).unlink()  # DeepSpeed itself never removes the file

    def supports(self, kind: str, /) -> bool:
        return kind in ("all_reduce", DECODE)

    def empty(self, _: int, /) -> Array | None:
        return None

    def operation(self, bench: Bench, source: Array, target: Array) -> Operation:
        del bench, target  # an all-reduce in place is all that there is
        all_reduce, tensor = self._all_reduce, torch.from_numpy(source)
        return lambda: all_reduce(tensor)

    def barrier(self) -> Operation:
        raise NotImplementedError("DeepSpeed has no barrier; supports() says so")

    def start_all_reduce(self, tensor: Array) -> Handle:
        raise NotImplementedError("DeepSpeed has no asynchronous all-reduce; supports() says so")

    def close(self) -> None:
        """Nothing: the memory goes with the processes."""


def compiled() -> Any:
    """The module of the op; it is compiled if it has not been yet."""
    path = os.pathsep.join([_scripts(), os.environ.get("PATH", "")])
    with _environment(PATH=path, DS_ACCELERATOR="cpu"):
        return import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder().load()


def _scripts() -> str:
    """Return the folder of ``ninja``, which DeepSpeed looks for on the path."""
    return sysconfig.get_path("scripts")


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    compiled()
