"""Programs of ranks: states, and ranks that come late."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

import allfold
from allfold._state.transfer import StateTransfer
from tests.support.waiting import wait_until


def trained(seed: int, nbytes: int) -> allfold.State:
    """A state that differs with its seed."""
    generator = np.random.default_rng(seed)
    return allfold.State(
        weights=generator.integers(0, 256, nbytes, np.uint8),
        bias=generator.random(5),
        step=seed,
        history=[seed, {"loss": (0.5, None), 3: b"\0\xff"}],
    )


def content(state: allfold.State) -> list[Any]:
    """All of a state, comparable."""
    digest = hashlib.blake2b(state.weights).hexdigest()
    return [digest, state.bias.tolist(), state.step, repr(state.history)]


STATES: dict[str, allfold.State] = {}


def begin(group: allfold.Group, nbytes: int) -> list[Any]:
    """Sync states that differ from rank to rank, and commit."""
    state = STATES[group.name] = trained(group.rank, nbytes)
    state.sync(group)
    state.commit(group)
    return content(state)


def come_late(group: allfold.Group, late: list[int], nbytes: int) -> dict[str, Any]:
    """Sync, some ranks as if they had just come, the others with what they have."""
    state = STATES[group.name]
    if group.rank in late:
        state = STATES[group.name] = trained(100 + group.rank, nbytes)
    weights = state.weights
    group.barrier()
    began = time.monotonic()
    state.sync(group)
    assert state.weights is weights
    return {"seconds": time.monotonic() - began, "content": content(state)}


def join_while_others_go_on(group: allfold.Group, nbytes: int) -> list[Any]:
    """The last rank catches up with the others, which go on until the op that all do.

    They serve nothing before that op, so a rank that waited for the newcomer earlier would hang.
    """
    state = STATES[group.name]
    if group.rank == group.world_size - 1:
        state = STATES[group.name] = trained(100, nbytes)
        state.catch_up(group)
    else:
        _meet_without_waiting(group, state)
    shown = content(state)
    total = np.ones(3)
    group.all_reduce(total)
    state.weights += 1  # as an optimizer does, on all ranks alike
    state.step += 1
    state.commit(group)
    state.sync(group)  # finds nothing to do: all have the same
    assert content(state)[0] != shown[0] or not nbytes
    return shown + content(state)


def _meet_without_waiting(group: allfold.Group, state: allfold.State) -> None:
    goes_on = Event()
    give_back = StateTransfer.give_back

    def wait(self: StateTransfer, block: Any) -> None:
        assert goes_on.wait(20.0), "it waits for the newcomer, who needs this block"
        give_back(self, block)

    StateTransfer.give_back = wait  # type: ignore[method-assign]
    try:
        state.meet_newcomers(group)
    finally:
        StateTransfer.give_back = give_back  # type: ignore[method-assign]
    goes_on.set()


def nobody_has_a_whole_state(group: allfold.Group) -> None:
    """Sync where every rank has lost its own state in a pull that failed."""
    state = STATES[group.name]
    state._invalidate()
    state.sync(group)


def die_while_serving(group: allfold.Group, blocks: int, folder: str) -> None:
    """Sync as a holder, and be killed after so many blocks were asked of this rank."""
    served = 0
    give_back = StateTransfer.give_back

    def count(self: StateTransfer, block: Any) -> None:
        nonlocal served
        if served == blocks:
            (Path(folder) / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        served += 1
        give_back(self, block)

    StateTransfer.give_back = count  # type: ignore[method-assign]
    group.barrier()
    STATES[group.name].sync(group)


def serve_after_the_other(group: allfold.Group, nbytes: int, folder: str) -> dict[str, Any]:
    """Sync as a holder that serves no tensor before another was killed while it served one."""
    give_back = StateTransfer.give_back

    def wait(self: StateTransfer, block: Any) -> None:
        if block.start:  # it may well be asked for the head first, which comes from one holder
            wait_until((Path(folder) / "killed").exists, "the other holder was killed")
        give_back(self, block)

    StateTransfer.give_back = wait  # type: ignore[method-assign]
    try:
        return come_late(group, late=[], nbytes=nbytes)
    finally:
        StateTransfer.give_back = give_back  # type: ignore[method-assign]


def sync_with_a_missing_value(group: allfold.Group) -> None:
    """Sync states that have not the same names on all ranks."""
    values = {"a": np.zeros(3), "b": 1} if group.rank == 0 else {"a": np.zeros(3)}
    allfold.State(**values).sync(group, timeout=20.0)


def sync_with_another_shape(group: allfold.Group) -> None:
    """Sync states whose array has another size on each rank."""
    allfold.State(weights=np.zeros(3 + group.rank)).sync(group, timeout=20.0)


def kill_while_serving(group: allfold.Group, pid: int, folder: str) -> None:
    """Sync as a holder, and kill the node's agent with the second block."""
    served = 0
    give_back = StateTransfer.give_back

    def count(self: StateTransfer, block: Any) -> None:
        nonlocal served
        served += 1
        if served == 2:
            (Path(folder) / "killed").touch()
            os.kill(pid, signal.SIGKILL)
        give_back(self, block)

    StateTransfer.give_back = count  # type: ignore[method-assign]
    group.barrier()
    try:
        STATES[group.name].sync(group)
    finally:
        StateTransfer.give_back = give_back  # type: ignore[method-assign]
