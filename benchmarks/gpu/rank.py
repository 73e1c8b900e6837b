"""One rank on a GPU: does what the conductor says. See :mod:`benchmarks.rank`.

python -m benchmarks.gpu.rank CONTROL-SOCKET RANK
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence

import torch

import allfold
from benchmarks.control import Message, serve, sleep_until
from benchmarks.gpu import copy_limit, devices, plan
from benchmarks.gpu.checking import Checker
from benchmarks.gpu.devices import Device, Gpu, Host
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.plan import AUTO, CPU, OTHERS
from benchmarks.gpu.timing import AllReduce

_CONDUCTOR_SECONDS = 900.0
# Who sleeps wakes up some 0.1 ms late; the rest of the wait is spent awake.
_AWAKE_SECONDS = 0.001
_SHOWN = 5


class PathLog(logging.Handler):
    """Hears which way the tensors of a GPU take, which the SDK says on its logger."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.path = self.why = ""
        logger = logging.getLogger("allfold")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"path (\w+), because (.*)", record.getMessage(), re.DOTALL)
        if found:
            self.path, self.why = found[1], found[2]


class Rank:
    """The state of this process between two messages."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._paths = PathLog()
        self._group: allfold.Group | None = None
        self._device: Device = Host()
        self._peers: Peers | None = None
        self._workload: AllReduce | None = None
        self._path = CPU
        self._contestants: list[str] = []

    def obey(self, message: Message) -> Message:
        """Do what a message says; the answer."""
        do: dict[str, Callable[..., Message | None]] = {
            "look": self._look,
            "copy": self._copy,
            "kernel": self._kernel,
            "join": self._join,
            "check_calls": self._check_calls,
            "prepare": self._prepare,
            "reset": self._reset,
            "run": self._run,
            "check": self._check,
            "release": self._release,
            "part": self._part,
        }
        return do[message.pop("do")](**message) or {}

    def leave(self) -> None:
        """Leave what has been joined."""
        self._part()

    # --- on the card alone

    def _look(self, ordinal: int) -> Message:
        return devices.look(ordinal)

    def _copy(self, ordinal: int, size: int, rounds: int) -> Message:
        found = copy_limit.measure(ordinal, size, rounds)
        Gpu(ordinal).clear()
        return found

    def _kernel(self, ordinal: int, size: int, ranks: int, rounds: int) -> Message:
        """Imported here: it needs the agent's package and a GPU."""
        from benchmarks.gpu import fold_kernel

        rows = fold_kernel.measure(ordinal, size, ranks, rounds)
        Gpu(ordinal).clear()
        return {"rows": rows}

    # --- in a group

    def _join(
        self,
        world: int,
        way: str,
        ordinal: int,
        contestants: list[str],
        environment: dict[str, str],
        store: str,
        seconds: float,
    ) -> Message | None:
        """Take a seat, unless there is none for this rank; open the GPU; try the peers."""
        if self._number >= world:
            return None
        os.environ.update(environment)
        self._device = Host() if way == CPU else Gpu(ordinal)
        self._group = allfold.init(
            rank=self._number, world_size=world, timeout=seconds, init_timeout=seconds
        )
        path, why = self._opened(way)
        self._path = path
        if way not in (AUTO, path):
            return {"refused": f"asked for path {way}, got {path}, because {why}"}
        unable = self._try([each for each in contestants if each in OTHERS], store, seconds)
        self._contestants = [each for each in contestants if each not in unable]
        return {"path": path, "why": why, "unable": unable}

    def _opened(self, way: str) -> tuple[str, str]:
        """The path that tensors take, and why."""
        if way == CPU:
            return CPU, ""
        assert self._group is not None
        self._paths.path = self._paths.why = ""
        self._group.empty(1, torch.float32, device=self._device.name)
        return self._paths.path, self._paths.why

    def _try(self, peers: Sequence[str], store: str, seconds: float) -> dict[str, str]:
        """Why peers do not work here."""
        if not peers or self._group is None:
            return {}
        world = self._group.world_size
        self._peers = Peers(self._number, world, store, seconds, self._device)
        tried = {name: self._peers.why_not(name) for name in peers}
        return {name: why for name, why in tried.items() if why is not None}

    def _check_calls(self, quick: bool) -> Message:
        """Every call of the plan."""
        if self._group is None:
            return {"calls": 0, "wrong": 0, "first": []}
        began = time.perf_counter()
        checker = Checker(self._group, self._device, self._path)
        calls = plan.calls(self._group.world_size, quick=quick)
        wrong = {str(call): checker.count_wrong(call) for call in calls}
        bad = [f"{call}: {count}" for call, count in wrong.items() if count]
        self._device.clear()
        return {
            "calls": len(calls),
            "wrong": sum(wrong.values()),
            "first": bad[:_SHOWN],
            "seconds": time.perf_counter() - began,
        }

    def _prepare(self, workload: str, kind: str, size: int) -> Message:
        assert (workload, kind) == ("collective", "all_reduce")
        if self._group is None:
            return {"contestants": []}
        self._workload = AllReduce(size, self._contestants, self._group, self._device, self._peers)
        return {"contestants": self._contestants}

    def _reset(self, contestant: str) -> None:
        if self._workload is not None:
            self._workload.reset(contestant)

    def _run(self, contestant: str, warm_up: int, ops: int, at: float) -> Message:
        if self._workload is None:
            return {"seconds": 0.0, "cpu": 0.0, "each": [], "done": 0}
        _start_at(at)
        self._workload.run(contestant, warm_up)
        cpu = time.process_time()
        each = self._workload.run(contestant, ops)
        cpu = time.process_time() - cpu
        done = warm_up + ops
        return {"seconds": sum(each) / ops, "cpu": cpu / ops, "each": each, "done": done}

    def _check(self, contestant: str, ops: int) -> Message:
        wrong = self._workload.count_wrong(contestant, ops) if self._workload else 0
        return {"wrong": wrong}

    def _release(self) -> None:
        self._workload = None
        self._device.clear()

    def _part(self) -> None:
        """Leave the group, and the session with the agent."""
        self._release()
        if self._peers is not None:
            self._peers.close()
        group, self._group, self._peers = self._group, None, None
        if group is not None:
            group.shutdown()
        self._device.clear()


def _start_at(moment: float) -> None:
    """All ranks begin at the same moment of the clock that they share."""
    sleep_until(moment - _AWAKE_SECONDS)
    while time.monotonic() < moment:
        pass


def main() -> None:
    control, number = sys.argv[1], int(sys.argv[2])
    serve(control, number, Rank(number), _CONDUCTOR_SECONDS)


if __name__ == "__main__":
    main()
