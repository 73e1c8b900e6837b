"""Gloo, and torchft on Gloo or Allfold: processes that the contestant kills one by one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any, Self

from allfold_cluster.processes import Child, stop_all
from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed
from benchmarks.faults.changes import read_changes
from benchmarks.faults.measuring import await_all
from benchmarks.faults.torch_ranks import TorchOrders
from benchmarks.usage import peak_bytes
from chaos.faults import Kind
from chaos.injector import Done
from chaos.records import RankLog

_FIRST_OP_SECONDS = 90.0
# For so many milliseconds a quorum waits for replicas whose heartbeats have not stopped for 5 s:
# the shortest of torchft's own tests, and what its README starts the lighthouse with.
_JOIN_TIMEOUTS = {"": 100, "readme": 10_000}
# What has no "allfold" in it runs on Gloo.
PEERS = ("gloo", "torchft", "torchft:readme", "torchft+allfold", "torchft+allfold:readme")


def why_not(library: str) -> str | None:
    """Return why a library cannot take part, or ``None``."""
    modules = ["torch"] if library == "gloo" else ["torch", "torchft"]
    missing = [name for name in modules if find_spec(name) is None]
    return f"not available: {' and '.join(missing)} not installed" if missing else None


class TorchContestant:
    """Ranks of one library, each a process.

    Args:
        kind: of the faults: KILL_RANK, or STOP_AGENT for a process that is stopped for good.
        timeout: of an op, which is what those wait for that are no neighbours of the victim.
        variables: of the environment of each rank.
    """

    def __init__(
        self,
        library: str,
        world: int,
        kind: Kind,
        timeout: float,
        variables: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.name = library
        self._library, _, self._variant = library.partition(":")
        self._kind = kind
        self._world = world
        self._timeout = timeout
        self._variables = variables or [{}] * world
        self._folder = Path()
        self._children: dict[int, Child] = {}
        self._ending = ExitStack()
        self._generation = 0
        self._life = 0
        self._store: Any = None

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="allfold-faults-"))
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, _seed: int) -> None:
        """Begin a life with new processes, and a new store or lighthouse."""
        from torch._C._distributed_c10d import TCPStore

        self._life += 1
        self._generation = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        lighthouse = self._start_lighthouse() if self._library != "gloo" else ""
        for seat in range(self._world):
            orders = TorchOrders(
                self._library, seat, self._world, self._store.port, lighthouse,
                self._timeout, str(self._log(seat)),
            )  # fmt: skip
            command = python("benchmarks.faults.torch_ranks", json.dumps(asdict(orders)))
            self._children[seat] = self._spawn(str(seat), command, self._variables[seat])
        try:
            await_all(self._all_have_begun, _FIRST_OP_SECONDS, f"the first op of {self.name}")
        except TimeoutError as error:
            raise BenchmarkFailed(f"{error}\n{self._said()}") from error

    def _all_have_begun(self) -> bool:
        """True once every rank has a result of all; torchft begins with those who are there."""
        if any(child.ended for child in self._children.values()):
            raise BenchmarkFailed(f"a rank of {self.name} ended\n{self._said()}")
        everybody = (1 << self._world) - 1
        return all(any(each.mask == everybody for each in log.records) for log in self.logs())

    def _said(self) -> str:
        """Return the last words of the ranks."""
        return "\n".join(self._output(str(seat)).read_text()[-1000:] for seat in self._children)

    def can_lose(self) -> bool:
        """Tell if two are left afterwards, and more than half of all."""
        return len(self._children) > 2 and len(self._children) * 2 > self._world

    def fault(self, draw: float) -> Done:
        """Kill one, and tell the others who is left."""
        seats = sorted(self._children)
        seat = seats[int(draw * len(seats))]
        child = self._children.pop(seat)
        resident, at = peak_bytes(child.pid), monotonic()
        child.signal(signal.SIGKILL if self._kind is Kind.KILL_RANK else signal.SIGSTOP)
        self._generation += 1
        self._store.set(f"left/{self._generation}", json.dumps(sorted(self._children)))
        self._ending.callback(stop_all, [child])
        self._ending.callback(child.signal, signal.SIGKILL)
        return Done(self._kind, f"seat {seat}", at, at, frozenset([seat]), resident)

    def logs(self) -> list[RankLog]:
        """Return the logs of those who are left."""
        return [read_changes(self._log(seat), seat) for seat in self._children]

    def end(self) -> None:
        """Kill all."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        stop_all(self._children.values())
        self._children = {}
        self._ending.close()
        self._store = None

    def _start_lighthouse(self) -> str:
        address = self._folder / f"{self._life}.address"
        arguments = str(address), str(_JOIN_TIMEOUTS[self._variant])
        child = self._spawn("lighthouse", python("benchmarks.faults.lighthouse", *arguments))
        self._ending.callback(stop_all, [child])
        await_all(lambda: address.exists() or child.ended, _FIRST_OP_SECONDS, "the lighthouse")
        return address.read_text()

    def _spawn(
        self, name: str, command: list[str], variables: Mapping[str, str] | None = None
    ) -> Child:
        with self._output(name).open("wb") as output:
            return Child(
                f"{self.name} {name}",
                command,
                env=environment() | {"GLOO_SOCKET_IFNAME": "lo"} | dict(variables or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _log(self, seat: int) -> Path:
        return self._folder / f"{self._life}-{seat}.jsonl"

    def _output(self, name: str) -> Path:
        return self._folder / f"{self._life}-{name}.log"
