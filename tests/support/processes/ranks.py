"""Ranks as processes that live as long as the tests, and jobs that some of them form.

    with RankPool(services) as pool, pool.job((0, 0, 1)) as job:
        totals = job.run(programs.all_reduce, numel=4)

A rank runs one program at a time. Every wait has a deadline; what fails shows the traceback of
the rank, the stacks of a rank that hangs, and what the services wrote last.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from allfold_cluster.processes import stop_all, wait_for
from allfold_core.errors import AllfoldError, from_dict
from tests.support.processes import rank_worker
from tests.support.processes.forked import start_module
from tests.support.processes.services import ROOT, Services
from tests.support.waiting import wait_until

Program = Callable[..., Any]

CALL_SECONDS = 60.0
_LOG_BYTES = 6000


class RankFailed(AssertionError):
    """A program raised, hung or died with its process."""


@dataclass(frozen=True)
class Failure:
    """An Allfold error that a program raised, and when (on ``time.monotonic``)."""

    error: AllfoldError
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def __str__(self) -> str:
        return f"after {self.seconds:.3f} s: {self.error}"


class Rank:
    """One worker process."""

    def __init__(self, name: str, services: Services) -> None:
        self.name = name
        self._services = services
        self._log = services.folder / f"{name}.log"
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as log:
            self._child = start_module(
                name,
                ["tests.support.processes.rank_worker"],
                services.env | {"PYTHONPATH": _python_path()},
                stdin=theirs.fileno(),
                output=log.fileno(),
            )
        self._channel = ours
        self._unread = b""
        self._numbers = itertools.count()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ended(self) -> bool:
        return self._child.ended

    def start(self, program: Program, group: str | None = None, **arguments: Any) -> Call:
        """Let the rank run a program, and do not wait for it."""
        number = next(self._numbers)
        request = {
            "number": number,
            "module": program.__module__,
            "program": program.__qualname__,
            "group": group,
            "arguments": arguments,
        }
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        return Call(self, number, f"{self.name}: {program.__name__}")

    def run(self, program: Program, group: str | None = None, **arguments: Any) -> Any:
        return self.start(program, group, **arguments).result()

    def kill(self) -> None:
        """SIGKILL, as a crash or the kernel's out-of-memory killer would end it."""
        self._child.signal(signal.SIGKILL)
        stop_all([self._child])

    def close(self) -> None:
        self._channel.close()
        stop_all([self._child])

    def fileno(self) -> int:
        return self._channel.fileno()

    def read_answer(self, number: int, deadline: float) -> dict[str, Any] | None:
        """The answer to a call, ``None`` when the process has ended.

        Answers to earlier calls, for which nobody waits any more, are dropped.

        Raises:
            TimeoutError: none came before ``deadline`` (monotonic).
        """
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                answer: dict[str, Any] = json.loads(line)
                if answer["number"] == number:
                    return answer
                continue
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                received = self._channel.recv(1 << 20)
            except ConnectionResetError:  # it left a request unread
                return None
            if not received:
                return None
            self._unread += received

    def describe_failure(self, what: str, details: str = "") -> str:
        log = self._log.read_text(errors="replace")[-_LOG_BYTES:]
        return f"{what}\n{details}\n--- its log:\n{log}\n{self._services.log_tails()}"

    def dump_stacks(self) -> None:
        """Write the stack of every thread into the log."""
        self._child.signal(signal.SIGUSR1)
        time.sleep(0.3)  # nothing tells when the handler is done


class Call:
    """A program that a rank runs."""

    def __init__(self, rank: Rank, number: int, what: str) -> None:
        self.rank = rank
        self._number = number
        self._what = what
        self._answer: dict[str, Any] | None = None

    def poll(self) -> bool:
        """Tell if the program, or its process, is over; take in what has arrived."""
        if self._answer is None:
            try:
                self._answer = self.rank.read_answer(self._number, time.monotonic())
            except TimeoutError:
                return False
        return True

    def answer(self, seconds: float = CALL_SECONDS) -> dict[str, Any]:
        """Return the program's answer, an error or not.

        Raises:
            RankFailed: nothing came, or the process has ended.
        """
        if self._answer is None:
            try:
                answer = self.rank.read_answer(self._number, time.monotonic() + seconds)
            except TimeoutError:
                self.rank.dump_stacks()
                message = self.rank.describe_failure(f"{self._what} hangs ({seconds:g} s)")
                self.rank.kill()
                raise RankFailed(message) from None
            if answer is None:
                raise RankFailed(self.rank.describe_failure(f"{self._what}: the process ended"))
            self._answer = answer
        return self._answer

    def result(self, seconds: float = CALL_SECONDS) -> Any:
        """Return the program's result."""
        answer = self.answer(seconds)
        if "result" not in answer:
            raise RankFailed(self.rank.describe_failure(self._what, answer["traceback"]))
        return answer["result"]

    def failure(self, seconds: float = CALL_SECONDS) -> Failure:
        """The Allfold error that the program is expected to raise."""
        answer = self.answer(seconds)
        if "error" not in answer:
            got = answer.get("traceback") or f"it returned {answer.get('result')!r}"
            what = f"{self._what} did not raise an Allfold error"
            raise RankFailed(self.rank.describe_failure(what, got))
        return Failure(from_dict(answer["error"]), answer["began"], answer["ended"])


class Job:
    """Ranks in one group: ``nodes[r]`` is the name of rank r's node."""

    def __init__(self, name: str, ranks: Sequence[Rank], nodes: Sequence[str]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.nodes = tuple(nodes)
        self.opening = -1

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def node_names(self) -> list[str]:
        return sorted(set(self.nodes))

    def start(self, rank: int, program: Program, **arguments: Any) -> Call:
        """Let one rank run ``program(group, **arguments)``."""
        return self.ranks[rank].start(program, self.name, **arguments)

    def start_all(self, program: Program, **arguments: Any) -> list[Call]:
        return [self.start(rank, program, **arguments) for rank in range(self.world_size)]

    def run(self, program: Program, seconds: float = CALL_SECONDS, **arguments: Any) -> list[Any]:
        """Let all ranks run the same program; their results in rank order."""
        return results(self.start_all(program, **arguments), seconds)

    def enter(self, services: Services, **options: Any) -> None:
        """Register all ranks."""
        self.entered(self.start_entering(services, **options))

    def start_entering(
        self, services: Services, ranks: Sequence[int] | None = None, **options: Any
    ) -> list[Call]:
        """Let ranks (all of them) register, and do not wait for it."""
        return [
            self.ranks[rank].start(
                rank_worker.open_group,
                name=self.name,
                rank=rank,
                world_size=self.world_size,
                agent=services.socket_of(self.nodes[rank]),
                **options,
            )
            for rank in (range(self.world_size) if ranks is None else ranks)
        ]

    def entered(self, calls: Sequence[Call]) -> None:
        """Wait until the ranks that were let in are in."""
        self.opening = results(calls)[0]["opening"]

    def leave(self) -> None:
        """Let all ranks shut the group down in order; those that have done so may do it again."""
        living = [rank for rank in self.ranks if not rank.ended]
        results([rank.start(rank_worker.close_group, name=self.name) for rank in living])


class RankPool:
    """Worker processes, started when they are needed and kept for the next job."""

    # Of all pools: names are not used again, since several pools may have the same services.
    _numbers = itertools.count()

    def __init__(self, services: Services) -> None:
        self.services = services
        self._all: list[Rank] = []
        self._idle: list[Rank] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._all:
            rank.close()

    @contextmanager
    def job(self, nodes: Sequence[int], name: str | None = None, **options: Any) -> Iterator[Job]:
        """A registered group: rank r is on the node ``nodes[r]``. All leave it in the end."""
        with self.unregistered(nodes, name) as job:
            job.enter(self.services, **options)
            yield job
            job.leave()

    @contextmanager
    def unregistered(self, nodes: Sequence[int], name: str | None = None) -> Iterator[Job]:
        """The ranks of a job that have not registered yet. Whatever they are in, they leave."""
        ranks = [self._take() for _ in nodes]
        # They run: no test's timeout has the start of a process in it.
        results([rank.start(rank_worker.threads) for rank in ranks])
        name = name or f"job{next(self._numbers)}"
        job = Job(name, ranks, [f"node{node}" for node in nodes])
        try:
            yield job
        finally:
            self._idle[:0] = self._cleared(job.ranks)

    def replace(self, job: Job, **options: Any) -> None:
        """Let new ranks form a job anew, under another name, after a test has spoilt it."""
        for rank in job.ranks:
            rank.kill()
        job.ranks = tuple(self._take() for _ in job.ranks)
        job.name = f"job{next(self._numbers)}"
        job.enter(self.services, **options)

    def _take(self) -> Rank:
        if not self._idle:
            self._all.append(Rank(f"worker{next(self._numbers)}", self.services))
            return self._all[-1]
        return self._idle.pop(0)

    @staticmethod
    def _cleared(ranks: Sequence[Rank]) -> list[Rank]:
        """The workers that live and have left everything; those that cannot leave are killed."""
        calls = {rank: rank.start(rank_worker.close_everything) for rank in ranks if not rank.ended}
        for rank, call in calls.items():
            try:
                call.result(5.0)
            except RankFailed as failure:
                sys.stderr.write(f"{failure}\n")
                rank.kill()
        return [rank for rank in calls if not rank.ended]


def results(calls: Sequence[Call], seconds: float = CALL_SECONDS) -> list[Any]:
    """Return the results of calls that run at the same time; ``seconds`` is for all of them.

    The first one that fails ends the wait: the others may depend on it.
    """
    for call in _as_answered(calls, seconds):
        call.result()
    return [call.result() for call in calls]


def failures(calls: Sequence[Call], seconds: float = CALL_SECONDS) -> list[Failure]:
    """The errors that calls raised, all of them."""
    for call in _as_answered(calls, seconds):
        call.failure()
    return [call.failure() for call in calls]


def _as_answered(calls: Sequence[Call], seconds: float) -> Iterator[Call]:
    """The calls in the order of their ends; those without one in the end."""
    deadline = time.monotonic() + seconds
    waiting = list(calls)
    while waiting and time.monotonic() < deadline:
        wait_for([call.rank for call in waiting], deadline - time.monotonic())
        for call in list(waiting):
            if call.poll():
                waiting.remove(call)
                yield call
    for call in waiting:
        call.answer(0.001)
        yield call


def await_called(services: Services, job: Job, seq: int, rank: int) -> None:
    """Wait until the agent of ``rank`` has got its call of op ``seq``."""
    node = job.nodes[rank]

    def called() -> bool:
        return int(services.group_status(node, job.name)["last_seq"][str(rank)]) >= seq

    wait_until(called, f"rank {rank} has called op {seq}")


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
