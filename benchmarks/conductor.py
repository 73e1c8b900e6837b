"""The order of events: the contestants in turn, until there are enough samples."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from benchmarks.control import Message
from benchmarks.devices import CPU
from benchmarks.figures import Figures, op_seconds
from benchmarks.fleet import Fleet
from benchmarks.plan import DECODE, Case, fewest_ops, most_ops, warm_up
from benchmarks.usage import cpu_seconds

ROUNDS = (5, 100)
_TURN_SECONDS = 0.2
# From the message that names the moment of the start to that moment.
_START_AFTER = 0.002


@dataclass(frozen=True)
class Budget:
    """The amount of measuring per case.

    Attributes:
        seconds: about so long, unless the fewest rounds take longer.
        ops: the fewest of each contestant, where they are short.
        rounds: the fewest and the most; in each, every contestant has a turn.
    """

    seconds: float = 4.0
    ops: int = 0
    rounds: tuple[int, int] = ROUNDS

    def rounds_of(self, case: Case, ops: int) -> tuple[int, int]:
        """The fewest and the most turns of so many ops each."""
        fewest, most = self.rounds
        wanted = max(fewest_ops(case), self.ops if case.is_short else 0)
        fewest = max(fewest, math.ceil(wanted / ops))
        return fewest, max(fewest, most)


@dataclass
class _Samples:
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wrong: int = 0

    def add(self, sample: Sample) -> None:
        self.seconds += sample.seconds
        self.cpu.append(sample.cpu)
        self.wrong += sample.wrong


class Conductor:
    """Lets the ranks of fleets measure workloads.

    Each contestant is in one of the fleets: two MPIs cannot be in one process, nor can one start
    the other's. All of them take turns, and the ranks of a fleet that has none sleep.

    Attributes:
        pids: of all processes that take part.
        path: how the agents reach the tensors.
    """

    def __init__(
        self, fleets: Sequence[Fleet], agents: Sequence[int], budget: Budget, path: str = CPU
    ) -> None:
        """Args:
        agents: pids of the processes that work for Allfold.
        """
        self.path = path
        self.pids = [*(pid for fleet in fleets for pid in fleet.pids), *agents]
        self._fleets = fleets
        self._fleet_of: dict[str, Fleet] = {}
        self._agents = agents
        self._budget = budget

    def measure(self, case: Case) -> dict[str, Figures]:
        """The figures of each contestant."""
        with self.prepared(case) as contestants:
            samples = {name: _Samples() for name in contestants}
            # The first op of a size takes memory and opens connections; the second one is usual.
            self._slowest(samples)
            ops = _turn(case, self._slowest(samples))
            self._rounds(samples, ops, *self._budget.rounds_of(case, ops))
        return {name: _figures(found) for name, found in samples.items()}

    @contextmanager
    def prepared(self, case: Case) -> Iterator[list[str]]:
        """While entered, the ranks have what a case needs; the contestants' names."""
        self._fleet_of = {
            name: fleet
            for fleet in self._fleets
            for name in fleet.ask("prepare", **asdict(case))[0]["contestants"]
        }
        yield list(self._fleet_of)
        for fleet in self._fleets:
            fleet.ask("release")

    def write(self, contestant: str) -> None:
        """Let the ranks write the data of an op, which takes the memory for them."""
        self._fleet_of[contestant].ask("write", contestant=contestant)

    def run(self, contestant: str, ops: int) -> list[Message]:
        """Let each rank run its ops, and return the ranks' messages."""
        start = time.monotonic() + _START_AFTER
        return self._fleet_of[contestant].ask(
            "run", contestant=contestant, warm_up=warm_up(ops), ops=ops, at=start
        )

    def sample(self, contestant: str, ops: int) -> Sample:
        """One turn, which all ranks start at one moment; every op of it is checked."""
        before = cpu_seconds(self._agents)
        answers = self.run(contestant, ops)
        agents = cpu_seconds(self._agents) - before
        total = warm_up(ops) + ops
        checks = self._fleet_of[contestant].ask("check", contestant=contestant, ops=total)
        return Sample(
            op_seconds([one["calls"] for one in answers], [one["returns"] for one in answers]),
            sum(answer["cpu"] for answer in answers) + agents / total,
            sum(check["wrong"] for check in checks),
        )

    def _slowest(self, samples: dict[str, _Samples]) -> float:
        """One op of each contestant, checked but no part of its figures; the most seconds."""
        seconds: list[float] = []
        for name, found in samples.items():
            sample = self.sample(name, 1)
            found.wrong += sample.wrong
            seconds += sample.seconds
        return max(seconds)

    def _rounds(self, samples: dict[str, _Samples], ops: int, fewest: int, most: int) -> None:
        until, done = time.monotonic() + self._budget.seconds, 0
        while done < fewest or (done < most and time.monotonic() < until):
            for name, found in samples.items():
                found.add(self.sample(name, ops))
            done += 1


def _turn(case: Case, seconds: float) -> int:
    """Return the ops of a turn, of which one takes so long."""
    if case.kind == DECODE:  # its tokens follow one another
        return most_ops(case)
    return max(1, min(most_ops(case), int(_TURN_SECONDS / (seconds + case.computing))))


@dataclass(frozen=True)
class Sample:
    """One turn of one contestant: seconds of each op, CPU-seconds per op, wrong elements."""

    seconds: list[float]
    cpu: float
    wrong: int


def _figures(samples: _Samples) -> Figures:
    return Figures.of(samples.seconds, samples.wrong, sum(samples.cpu) / len(samples.cpu))
