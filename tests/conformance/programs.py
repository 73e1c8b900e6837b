"""Programs for the ranks of tests: :mod:`tests.support.processes.rank_worker` runs them by name.

Each gets its group and JSON values, and returns JSON values.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import AllfoldError
from tests.support import tensors
from tests.support.cases import digest
from tests.support.processes.rank_worker import GROUPS

# One collective


def call(
    group: allfold.Group,
    kind: str = "all_reduce",
    *,
    dtype: str = "float32",
    shape: Sequence[int] = (4,),
    fill: int | None = None,
    torch: bool = False,
    arena: bool = False,
    delay: float = 0.0,
    **options: Any,
) -> list[Any]:
    """One collective on a tensor of equal elements (rank + 1); returns the tensor's elements.

    Where it fails the tensor must be as it was. A ``delay`` is spent while other ranks wait.
    """
    time.sleep(delay)
    if kind == "barrier":
        return [group.barrier(**options)]
    filled = np.full(tuple(shape), group.rank + 1 if fill is None else fill, np.int64)
    tensor = tensors.from_integers(filled, dtype, torch=torch)
    if arena:
        tensor = tensors.in_arena(tensor, group)
    before = tensors.to_bytes(tensor)
    try:
        getattr(group, kind)(tensor, **options)
    except AllfoldError:
        assert tensors.to_bytes(tensor) == before, "a failed op has changed the tensor"
        raise
    return tensors.to_list(tensor)


def calls(group: allfold.Group, count: int, **options: Any) -> list[Any]:
    """The same collective so many times; the last result."""
    return [call(group, **options) for _ in range(count)][-1]


def call_default(kind: str = "all_reduce") -> Any:
    """A module-level function, as a script without an explicit group calls it."""
    if kind in ("rank", "world_size", "barrier", "shutdown"):
        return getattr(allfold, kind)()
    if kind == "empty":
        return list(allfold.empty(3).shape)
    return getattr(allfold, kind)(np.ones(2)).tolist()


# Many ops at once


def many_in_flight(group: allfold.Group, count: int, seed: int) -> int:
    """So many async ops of mixed sizes, waited for in an order of this rank's own."""
    sizes = (1, 7, 0, 1000, 3, 64, 40_000, 2)
    works = [_start(group, sizes[number % len(sizes)], number) for number in range(count)]
    order = list(range(count))
    random.Random(seed + group.rank).shuffle(order)
    for number in order:
        _finish(group, number, works[number])
    assert all(work.is_completed() for work, _ in works)
    return len(group._channel.in_flight())


def _start(group: allfold.Group, numel: int, number: int) -> tuple[allfold.Work, Any]:
    tensor = np.full(numel, number + group.rank, np.int64)
    if number % 3 == 0:
        tensor = tensors.in_arena(tensor, group)
    if number % 5 == 0:
        root = number % group.world_size
        return group.broadcast(tensor, root, async_op=True), tensor
    return group.all_reduce(tensor, async_op=True), tensor


def _finish(group: allfold.Group, number: int, started: tuple[allfold.Work, Any]) -> None:
    work, tensor = started
    assert work.wait() is tensor
    size = group.world_size
    expected = number + number % size if number % 5 == 0 else number * size + sum(range(size))
    assert (tensor == expected).all(), (number, tensor[:4].tolist(), expected)


def interleaved(group: allfold.Group, other: str, count: int) -> None:
    """Async ops on two groups at the same time, in another order on every other rank."""
    chosen = [group, GROUPS[other]]
    if group.rank % 2:
        chosen.reverse()
    works = [(each, n, _start(each, 100, n)) for n in range(count) for each in chosen]
    for each, number, work in reversed(works):
        _finish(each, number, work)


def in_threads(group: allfold.Group, other: str, count: int) -> int:
    """A thread per group, each of which calls one op after the other; how many were right."""
    right: list[int] = []

    def work(group: allfold.Group) -> None:
        for number in range(count):
            _finish(group, number, _start(group, 50, number))
            right.append(number)

    threads = [Thread(target=work, args=(each,)) for each in (group, GROUPS[other])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=25.0)
    return len(right)


def one_op_in_two_threads(group: allfold.Group, count: int) -> int:
    """Two threads that share one group, on every rank in the order of a lock."""
    works = [_start(group, 10, number) for number in range(count)]
    right: list[int] = []

    def wait(share: Sequence[int]) -> None:
        for number in share:
            _finish(group, number, works[number])
            right.append(number)

    threads = [Thread(target=wait, args=(range(half, count, 2),)) for half in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=25.0)
    return len(right)


def stream(group: allfold.Group, numel: int, seconds: float, strategy: str = "auto") -> int:
    """One op after the other for a while (or until one fails); how many were done."""
    tensor = group.empty(numel, np.float32)
    deadline = time.monotonic() + seconds
    done = 0
    going = np.ones(1)
    while True:
        tensor[...] = 1
        group.all_reduce(tensor, strategy=strategy)
        assert tensor[0] == group.world_size
        assert tensor[-1] == group.world_size
        done += 1
        # All ranks stop after the same op.
        going[0] = time.monotonic() < deadline
        group.all_reduce(going, "min")
        if not going[0]:
            return done


# What is behind the scenes


def bookkeeping(group: allfold.Group) -> dict[str, int]:
    """Count the entries that this process still keeps of ops that are over."""
    pending = group.membership.session.connection.requests.open
    return {"in_flight": len(group._channel.in_flight()), "pending": len(pending)}


def speak_for_another_group(group: allfold.Group) -> None:
    """Send the agent an op of a group that this process is not in, past the SDK's own checks."""
    number = group.next_op
    group.membership.number += 1000
    try:
        group.all_reduce(np.ones(20_000), timeout=5.0)  # too large for the short lane
    finally:
        group.membership.number -= 1000
        group._channel.next_op = number


def reduce_and_broadcast(group: allfold.Group, strategy: str, root: int) -> dict[str, Any]:
    """An all-reduce in two steps and in one, of numbers that are not exact."""
    values = np.random.default_rng(group.rank).normal(size=1000).astype(np.float32)
    one_step = group.all_reduce(values.copy(), strategy=strategy)
    two_steps = values.copy()
    group.reduce(two_steps, root, strategy=strategy)
    group.broadcast(two_steps, root, strategy=strategy)
    return {
        "one_step": digest(one_step.tobytes()),
        "two_steps": digest(two_steps.tobytes()),
        "close": bool(np.allclose(one_step, two_steps, rtol=1e-4, atol=1e-4)),
    }


def in_flight_with_an_odd_one(
    group: allfold.Group, count: int, odd: int
) -> tuple[list[int], dict[int, str]]:
    """Async ops, one of which has another shape on the last rank: the good ones, the errors."""
    right: list[int] = []
    errors: dict[int, str] = {}
    works = []
    for number in range(count):
        differs = number == odd and group.rank == group.world_size - 1
        works.append(group.all_reduce(np.full(9 + differs, number), async_op=True))
    for number, work in enumerate(works):
        try:
            assert (work.wait() == number * group.world_size).all()
            right.append(number)
        except AllfoldError as error:
            errors[number] = str(error)
    return right, errors


def counted(group: allfold.Group) -> int:
    """Return the number of ops that this rank has called."""
    return group.next_op


def call_twice(group: allfold.Group, timeout: float) -> list[str]:
    """Two ops at once, while the others call one or none; their errors."""
    works = [
        group.all_reduce(np.ones(4, np.float32), timeout=timeout, async_op=True) for _ in range(2)
    ]
    errors = []
    for work in works:
        try:
            work.wait()
            errors.append("")
        except AllfoldError as error:
            errors.append(str(error))
    return errors


def wait_twice(group: allfold.Group, seconds: float) -> list[Any]:
    """Wait for an op for too short, and then until it is done: the error, the result."""
    tensor = np.full(4, group.rank + 1, np.float32)
    work = group.all_reduce(tensor, async_op=True)
    try:
        work.wait(seconds)
    except AllfoldError as error:
        return [str(error), tensors.to_list(work.wait())]
    return ["", []]


def leave_with_an_op_in_flight(group: allfold.Group) -> list[Any]:
    """Call an op and leave at once: the result must be there afterwards."""
    tensor = np.full(4, group.rank + 1, np.float32)
    group.all_reduce(tensor, async_op=True)
    allfold.shutdown(GROUPS.pop(group.name))
    return tensors.to_list(tensor)


def large_op_and_leave(group: allfold.Group, numel: int) -> bool:
    """One large op, and away."""
    tensor = np.ones(numel, np.float32)
    group.all_reduce(tensor, strategy="ring")
    allfold.shutdown(GROUPS.pop(group.name))
    return bool((tensor == group.world_size).all())


def use_after_shutdown(group: allfold.Group) -> list[str]:
    """The codes of the errors that a group raises which this process has left."""
    allfold.shutdown(GROUPS.pop(group.name))
    uses: list[Callable[[], Any]] = [
        lambda: group.all_reduce(np.ones(2)),
        lambda: group.reduce(np.ones(2)),
        lambda: group.broadcast(np.ones(2), 0),
        lambda: group.barrier(),
        lambda: group.empty(2),
        lambda: group.shutdown(),
        lambda: allfold.shutdown(group),
    ]
    return [_code_of(use) for use in uses]


def _code_of(use: Callable[[], Any]) -> str:
    try:
        use()
    except AllfoldError as error:
        return error.code
    return "no error"


def leave_socket_to_a_child(group: allfold.Group) -> int:
    """Start a process that holds this one's connection to its agent open; return its number."""
    held = group.membership.session.connection._socket.fileno()
    # In a session of its own: the test kills all of the rank's.
    return subprocess.Popen(["sleep", "600"], pass_fds=[held], start_new_session=True).pid


def all_reduce_in_forked_child(group: allfold.Group) -> str:
    """Return the error of a forked child that uses its parent's group."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.all_reduce(np.ones(2))
        except AllfoldError as error:
            os.write(writer, error.message.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        return stream.read()
