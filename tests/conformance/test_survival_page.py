"""The loop that docs/survival.md shows, as it is printed there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from allfold_cluster.processes import Child, stop_all, wait_for
from tests.support.processes.services import ROOT, Services
from tests.support.waiting import wait_until

SECONDS = 30.0
NODES = ("node0", "node1", "node2")
PAGE = (ROOT / "docs" / "survival.md").read_text()
# What the page leaves to the reader. The rounds of the loop are counted in a file.
BEFORE = """
import os, pathlib
import numpy as np
import allfold

class Training:
    rounds = 0
    def __bool__(self):
        self.rounds += 1
        pathlib.Path(os.environ["ROUNDS"]).write_text(str(self.rounds))
        return True

training, gradients = Training(), np.ones(4, np.float32)
"""


class Rank:
    """A process that runs the loop."""

    def __init__(self, services: Services, folder: Path, rank: int) -> None:
        self._rounds = folder / f"rounds{rank}"
        self._log = folder / f"rank{rank}.log"
        who = {"RANK": str(rank), "WORLD_SIZE": str(len(NODES)), "GROUP": "survival-page"}
        env = services.env | {f"ALLFOLD_{name}": value for name, value in who.items()}
        env |= {"ROUNDS": str(self._rounds), "ALLFOLD_SOCKET": services.socket_of(NODES[rank])}
        command = [sys.executable, "-u", str(folder / "script.py")]
        with self._log.open("wb") as log:
            self.process = Child(
                f"rank{rank}", command, env=env, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def await_printed(self, text: str) -> None:
        wait_until(lambda: text in self.printed, f"{text!r} is printed", SECONDS)

    def await_rounds(self, more: int) -> None:
        """Return once it has gone round the loop so often from now on."""
        last = self._round() + more
        wait_until(lambda: self._round() >= last, f"{last} rounds\n{self.printed}", SECONDS)

    def _round(self) -> int:
        text = self._rounds.read_text() if self._rounds.exists() else ""
        return int(text or 0)


@pytest.fixture
def ranks(services: Services, tmp_path: Path) -> Iterator[list[Rank]]:
    example = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    (tmp_path / "script.py").write_text(BEFORE + example)
    with ExitStack() as ending:
        ranks = [Rank(services, tmp_path, rank) for rank in range(len(NODES))]
        for each in ranks:
            ending.callback(stop_all, [each.process])
            ending.callback(each.process.signal, signal.SIGKILL)
        yield ranks


def test_the_loop_goes_on_after_a_loss_and_ends_where_the_group_goes_on_without_it(
    services: Services, ranks: list[Rank]
) -> None:
    """Otherwise the loop of an evicted rank would never end, with an error in each round."""
    for each in ranks:
        each.await_rounds(5)
    *left, evicted = ranks
    agent = services.agents[NODES[-1]].pid
    os.kill(agent, signal.SIGSTOP)
    try:
        for each in left:
            each.await_printed("PeerLost")
    finally:
        os.kill(agent, signal.SIGCONT)
    assert wait_for([evicted.process], SECONDS), f"it goes on\n{evicted.printed[-2000:]}"
    assert evicted.process.reap() == 1
    assert "allfold_core.errors.Evicted: [AF304 Evicted]" in evicted.printed
    for each in left:
        each.await_rounds(5)
        assert each.printed.count("PeerLost") == 1, each.printed
    services.await_all_registered()
