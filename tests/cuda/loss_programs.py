"""Programs of ranks with memory on GPUs: losses, refusals, and GPUs that are late."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import numpy as np
from cuda.bindings import driver

import allfold
from allfold_core.errors import AllfoldError
from tests.cuda.programs import Memory, copy_on_device, given_by, wrong_in
from tests.support.fakes.fake_cuda.arrays import FakeTensor, check

# What can go wrong


def refused(group: allfold.Group, what: str) -> str:
    """Return the error of tensors that an op cannot take."""
    memory = Memory(group)
    tensor = memory.new(np.ones((4, 4)))
    try:
        if what == "two places":
            group.all_gather(tensor, np.zeros((4 * group.world_size, 4), np.float32))
        elif what == "strides":
            group.all_reduce(Strided(tensor))
        elif what == "read-only":
            group.all_reduce(Strided(tensor, contiguous=True))
        else:
            group.empty(4, device=what)
    except AllfoldError as error:
        return str(error)
    return "nothing"


class Strided:
    """Every other column of a tensor, or all of it but not to be written."""

    def __init__(self, tensor: FakeTensor, contiguous: bool = False) -> None:
        about = dict(tensor.__cuda_array_interface__)
        if contiguous:
            about["data"] = (about["data"][0], True)
        else:
            about |= {"shape": (4, 2), "strides": (16, 8)}
        self._tensor = tensor
        self.__cuda_array_interface__ = about


_arrays: list[Any] = []


def keep_array(group: allfold.Group) -> bool:
    """Have memory on the GPU that the agent has open, as long as this process lives."""
    _arrays.append(group.empty(64, device="cuda:0"))
    return len(_arrays) == 1


def hang(group: allfold.Group, timeout: float) -> str:
    """Return the outcome of an op with a GPU that does nothing any more."""
    try:
        group.all_reduce(FakeTensor(64, own_stream=True), timeout=timeout)
    except AllfoldError as error:
        return f"{type(error).__name__}: {error.message}"
    return "done"


def die_in_flight(group: allfold.Group, numel: int) -> None:
    """Call the op of :func:`all_reduces` for a sum, and end at once."""
    group.all_reduce(Memory(group).new(given_by(group.rank, numel, 1)), async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)


def path(group: allfold.Group) -> str:
    """The path of this rank's tensors to the agent."""
    gpu = group.membership.session.gpu(0)
    return f"{gpu.path.value}: {gpu.why}"


# A GPU that is late


def _keep_busy(tensor: FakeTensor, rounds: int) -> None:
    """Give a tensor's stream work, each piece of which takes its time."""
    with tensor.current():
        for _ in range(rounds):
            check(driver.cuMemsetD8Async(tensor.address, 0, tensor.nbytes, tensor.stream))


def _outcome(group: allfold.Group, tensor: FakeTensor, timeout: float) -> str:
    try:
        group.all_reduce(tensor, timeout=timeout)
    except AllfoldError as error:
        return f"{type(error).__name__}: {error.message}"
    return "done"


def late_for_one(group: allfold.Group) -> list[str]:
    """Return the outcomes of three ops where the GPU of rank 0 is too late for the second."""
    tensor = FakeTensor(64, own_stream=True).put(1)
    said = [_outcome(group, tensor, 10.0)]
    if group.rank == 0:
        _keep_busy(tensor, 40)
    said.append(_outcome(group, tensor, 0.4 if group.rank == 0 else 10.0))
    if group.rank == 0:
        with tensor.current():
            check(driver.cuStreamSynchronize(tensor.stream))
    said.append(_outcome(group, tensor, 10.0))
    return said


def memory_after(group: allfold.Group, numel: int, fails: bool) -> list[str]:
    """Memory for a new array is nobody else's, whatever is still on its way through the arena.

    Either a copy into it, for an op that has failed, or one out of it, behind another op.
    """
    done, late = (FakeTensor(numel, own_stream=True).put(1) for _ in range(2))
    group.all_reduce(done, timeout=20.0)
    done.put(1)
    first = group.all_reduce(done, async_op=True, timeout=20.0)
    first.is_completed()
    _keep_busy(late, 12)
    second = group.all_reduce(late, async_op=True, timeout=0.2 if fails else 20.0)
    first.wait()
    if fails:
        with contextlib.suppress(AllfoldError):
            second.wait()
    fresh = group.empty(numel, np.float32, device="cuda:0")
    copy_on_device(fresh, np.full(numel, 5, np.float32), to_host=False)
    if not fails:
        second.wait()
    with late.current():
        check(driver.cuStreamSynchronize(late.stream))
    group.barrier()
    wrong = wrong_in("the first op", done, np.full(numel, group.world_size))
    return wrong + wrong_in("the new array", fresh, np.full(numel, 5))
