"""A rank of Allfold in a measurement: all-reduces, one after the other.

python -m benchmarks.faults.allfold_rank '{"seat": 0, "world": 4, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from pathlib import Path
from time import monotonic

import numpy as np

import allfold
from allfold_core.errors import AgentLost, AllfoldError
from benchmarks.faults.changes import ALL_VARIABLE, BYTES_VARIABLE, NUMEL, ChangeLog
from chaos.rank_program import Orders

# So many failures in a row, and the rank takes its group for broken.
_PATIENCE = 20


def main() -> None:
    """Do ops until this process is killed, or nothing works any more."""
    orders = Orders(**json.loads(sys.argv[1]))
    log = ChangeLog(Path(orders.log), everything=ALL_VARIABLE in os.environ)
    group = _join(orders)
    print("ready", flush=True)
    failures, own = 0, np.float32(1 << orders.seat)
    tensor = group.empty(int(os.environ.get(BYTES_VARIABLE, NUMEL * 4)) // 4)
    for number in count():
        tensor[:] = own
        called = monotonic()
        try:
            group.all_reduce(tensor)
        except AllfoldError as error:
            failures += 1
            log.note(number, called, 0, error)
            if failures == _PATIENCE or isinstance(error, AgentLost):
                sys.exit(f"nothing works any more: {error}")
        else:
            failures = 0
            log.note(number, called, int(tensor[0]))


def _join(orders: Orders) -> allfold.Group:
    return allfold.init(
        rank=orders.seat,
        world_size=orders.world,
        group=orders.group,
        agent=orders.agent,
        timeout=orders.timeout,
        on_loss=orders.on_loss,
    )


if __name__ == "__main__":
    main()
