"""A rank of the measurement: it holds the state, or pulls it in every round.

python -m benchmarks.state.rank '{"rank": 0, "world": 3, ...}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

import allfold
from allfold._state.transfer import StateTransfer
from allfold_core.wire.state_wire import BLOCK_BYTES, Block

STEP = 7


@dataclass(frozen=True)
class Orders:
    """The arguments of a rank.

    Attributes:
        nbytes: the size of the state.
        rounds: the number of times that the last rank pulls the state.
        dies_after: the number of served blocks after which the rank is killed; 0 for never.
        results: the file for the report of the last rank.
    """

    rank: int
    world: int
    group: str
    nbytes: int
    rounds: int
    dies_after: int
    results: str

    def pack(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Report:
    """The measurements of the rank that pulls.

    Attributes:
        seconds: the duration of each round.
        cpu: CPU seconds of this process in all rounds.
        wrong: the number of rounds after which its state was not equal to that of the holders.
    """

    seconds: list[float]
    cpu: float
    wrong: int


def main() -> None:
    """Run the rounds, and write the report."""
    orders = Orders(**json.loads(sys.argv[1]))
    group = allfold.init(
        rank=orders.rank,
        world_size=orders.world,
        group=orders.group,
        timeout=60.0,
        on_loss="shrink",
    )
    if orders.dies_after:
        _die_after(orders.dies_after)
    is_late = orders.rank == orders.world - 1
    right = np.random.default_rng(1).integers(0, 2**63, orders.nbytes // 8, np.int64)
    # As in a process that has trained before, the memory is mapped already.
    weights = np.full_like(right, -1) if is_late else right
    report = _measure(group, weights, right, orders.rounds, is_late)
    Path(orders.results).write_text(json.dumps(asdict(report)))


def _measure(
    group: allfold.Group, weights: np.ndarray, right: np.ndarray, rounds: int, is_late: bool
) -> Report:
    seconds, cpu, wrong = [], 0.0, 0
    state = allfold.State(weights=weights, step=STEP)
    if not is_late:
        state.commit(group)
        state._lineage = 1  # as if the holders had been in step for long
    for _ in range(rounds):
        if is_late:
            weights.fill(-1)
            state = allfold.State(weights=weights, step=0)
        group.barrier()
        began, busy = perf_counter(), process_time()
        state.sync(group)
        seconds.append(perf_counter() - began)
        cpu += process_time() - busy
        wrong += not (state.step == STEP and np.array_equal(weights, right))
    return Report(seconds, cpu, wrong)


def _die_after(blocks: int) -> None:
    """Have this process killed in the middle of a pull."""
    served = 0
    give_back = StateTransfer.give_back

    def count(self: StateTransfer, block: Block) -> None:
        nonlocal served
        served += block.nbytes == BLOCK_BYTES
        if served > blocks:
            os.kill(os.getpid(), signal.SIGKILL)
        give_back(self, block)

    StateTransfer.give_back = count  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
