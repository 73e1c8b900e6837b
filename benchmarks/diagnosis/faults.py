"""The faults: how each is injected and lifted, and what should be said of it."""

from __future__ import annotations

import os
import random
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allfold_cluster.processes import Child
from allfold_core.incident import (
    STORE,
    Cause,
    Culprit,
    link_culprit,
    node_culprit,
    rank_culprit,
)
from benchmarks.diagnosis.burners import end_burners, start_burners
from benchmarks.diagnosis.scoring import Expected
from benchmarks.diagnosis.training import Training

# Longer than the time in which a fault is to be named.
LASTS_SECONDS = 4.0


@dataclass
class Fault(ABC):
    """One fault of a training.

    Attributes:
        ends_job: the training does not survive it.
    """

    training: Training
    random: random.Random
    ends_job = False

    @abstractmethod
    def inject(self) -> Expected:
        """Begin the fault; return the incident that is expected."""

    def lift(self) -> None:  # noqa: B027 - most end by themselves
        """End it, where it does not end by itself."""

    # Choices

    def rank(self) -> int:
        """Return some rank."""
        return self.random.randrange(self.training.world)

    def node(self) -> str:
        """Return some node."""
        return self.random.choice(self.training.nodes)

    def of_rank(self, cause: Cause, rank: int, *effects: str) -> Expected:
        """Return the incident that is expected of a rank."""
        culprit = rank_culprit(rank, self.training.node_of(rank))
        return expected(cause, [culprit], effects or ("hang",))


def expected(cause: Cause, culprits: Sequence[Culprit], effects: Sequence[str]) -> Expected:
    """Return the expected incident in the form that reports have."""
    shown: list[dict[str, Any]] = [
        {"kind": each.kind, "node": each.node, "rank": each.rank, "to": each.to}
        for each in culprits
    ]
    return Expected(cause.value, cause.is_communication, shown, effects)


class LateRank(Fault):
    """A rank sleeps in its data loader."""

    def inject(self) -> Expected:
        rank = self.rank()
        self.training.tell(rank, "late", LASTS_SECONDS)
        return self.of_rank(Cause.LATE_RANK, rank)


class StoppedRank(Fault):
    """A rank gets SIGSTOP."""

    chosen = 0

    def inject(self) -> Expected:
        self.chosen = self.rank()
        self.training.ranks[self.chosen].signal(signal.SIGSTOP)
        return self.of_rank(Cause.STOPPED_RANK, self.chosen)

    def lift(self) -> None:
        self.training.ranks[self.chosen].signal(signal.SIGCONT)


class LockedRank(Fault):
    """A rank sleeps in C with the interpreter lock."""

    def inject(self) -> Expected:
        rank = self.rank()
        self.training.tell(rank, "lock", LASTS_SECONDS)
        return self.of_rank(Cause.LOCKED_RANK, rank)


class KilledRank(Fault):
    """A rank gets SIGKILL."""

    ends_job = True

    def inject(self) -> Expected:
        rank = self.rank()
        self.training.ranks[rank].signal(signal.SIGKILL)
        return self.of_rank(Cause.EXITED_RANK, rank, "failed")


class FailedRank(Fault):
    """A rank ends with an exception of its own."""

    ends_job = True

    def inject(self) -> Expected:
        rank = self.rank()
        self.training.tell(rank, "raise")
        return self.of_rank(Cause.EXITED_RANK, rank, "failed")


class WrongShape(Fault):
    """A rank calls an all-reduce of another shape."""

    order = "other_shape"

    def inject(self) -> Expected:
        # Of a tie it could not be said who is right.
        rank = self.rank()
        self.training.tell(rank, self.order)
        return self.of_rank(Cause.WRONG_CALL, rank, "failed")


class WrongType(WrongShape):
    """A rank calls an all-reduce of another dtype."""

    order = "other_type"


class SlowRank(Fault):
    """The computation of a rank takes many times longer."""

    def inject(self) -> Expected:
        rank = self.rank()
        self.training.tell(rank, "slow", LASTS_SECONDS)
        return self.of_rank(Cause.SLOW_RANK, rank, "slow")


class SlowCpu(Fault):
    """A rank shares a core with others that have precedence."""

    chosen = 0
    burners: Sequence[Child] = ()

    def inject(self) -> Expected:
        self.chosen = self.rank()
        core = max(os.sched_getaffinity(0))
        for pid in self._threads():
            os.sched_setaffinity(pid, {core})
        self._give_priority(10)
        self.burners = start_burners(2)
        for burner in self.burners:
            os.sched_setaffinity(burner.pid, {core})
        return self.of_rank(Cause.STARVED_RANK, self.chosen, "slow")

    def lift(self) -> None:
        end_burners(self.burners)
        for pid in self._threads():
            os.sched_setaffinity(pid, os.sched_getaffinity(0))
        self._give_priority(0)

    def _give_priority(self, nice: int) -> None:
        """Set the niceness of the rank, and of its session, by which the kernel may go instead."""
        pid = self.training.ranks[self.chosen].pid
        for thread in self._threads():
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        session = Path("/proc", str(pid), "autogroup")
        if session.exists():
            session.write_text(str(nice))

    def _threads(self) -> list[int]:
        tasks = Path("/proc", str(self.training.ranks[self.chosen].pid), "task")
        return [int(each.name) for each in tasks.iterdir()]


class SlowLink(Fault):
    """Limit the sending rate of a node to a twentieth."""

    chosen = ""

    def inject(self) -> Expected:
        self.chosen = self.node()
        self.training.limit(self.chosen, "100mbit")
        return expected(Cause.SLOW_LINK, self.links(), ["slow"])

    def links(self) -> list[Culprit]:
        """Return the links from the node: it has one cable."""
        others = [node for node in self.training.nodes if node != self.chosen]
        return [link_culprit(self.chosen, node) for node in others]

    def lift(self) -> None:
        self.training.unlimit(self.chosen)


class LossyLink(SlowLink):
    """Drop every twentieth packet that a node sends."""

    def inject(self) -> Expected:
        self.chosen = self.node()
        self.training.lose_packets(self.chosen, percent=5)
        return expected(Cause.LOSSY_LINK, self.links(), ["slow"])

    def lift(self) -> None:
        self.training.lose_no_packets()


class DeadAgent(Fault):
    """The agent of a node is killed, with its ranks, as a node that loses its power."""

    ends_job = True
    chosen = ""

    def inject(self) -> Expected:
        self.chosen = self.node()
        self.training.agent(self.chosen).signal(signal.SIGKILL)
        return expected(Cause.LOST_NODE, [node_culprit(self.chosen)], ["failed"])

    def lift(self) -> None:
        self.training.end_job()
        self.training.restart_agent(self.chosen)


class StoppedAgent(DeadAgent):
    """The agent of a node is stopped."""

    def inject(self) -> Expected:
        self.chosen = self.node()
        self.training.agent(self.chosen).signal(signal.SIGSTOP)
        return expected(Cause.SILENT_NODE, [node_culprit(self.chosen)], ["failed"])


class FullDisk(Fault):
    """A rank writes to a disk that is full, and fails."""

    ends_job = True

    def inject(self) -> Expected:
        rank = self.rank()
        self.training.tell(rank, "disk")
        return self.of_rank(Cause.DISK_FULL, rank, "failed")


class NoMemory(Fault):
    """A rank asks for more memory than there is, and fails."""

    ends_job = True

    def inject(self) -> Expected:
        rank = self.rank()
        self.training.tell(rank, "memory")
        return self.of_rank(Cause.OUT_OF_MEMORY, rank, "failed")


class FullStore(Fault):
    """The orchestrator's Redis has no memory left."""

    def inject(self) -> Expected:
        self.training.redis_command("config", "set", "maxmemory", "1")
        return expected(Cause.STORE_FAILED, [STORE], ["hang"])

    def lift(self) -> None:
        self.training.redis_command("config", "set", "maxmemory", "0")


FAULTS: dict[str, type[Fault]] = {
    "late rank": LateRank,
    "stopped rank": StoppedRank,
    "lock held": LockedRank,
    "killed rank": KilledRank,
    "failed rank": FailedRank,
    "wrong shape": WrongShape,
    "wrong type": WrongType,
    "slow rank": SlowRank,
    "slow CPU": SlowCpu,
    "slow link": SlowLink,
    "lossy link": LossyLink,
    "dead agent": DeadAgent,
    "stopped agent": StoppedAgent,
    "full disk": FullDisk,
    "no memory": NoMemory,
    "full store": FullStore,
}
