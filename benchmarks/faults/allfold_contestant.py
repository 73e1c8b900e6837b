"""Allfold, with agents on this machine and a proxy in front of each."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults.changes import read_changes
from benchmarks.faults.measuring import await_all
from chaos.faults import Fault, Kind
from chaos.fleet import Fleet, RankProcess
from chaos.injector import Done, Injector
from chaos.records import RankLog

PROGRAM = "benchmarks.faults.allfold_rank"
# As a user runs them: locks are not checked, as they are in whatever imports the tests.
VARIABLES = {"ALLFOLD_CHECK_LOCKS": "0"}
_FIRST_OP_SECONDS = 30.0


class Allfold:
    """Ranks of Allfold that lose somebody by faults of one kind.

    Args:
        away: kill orchestrator and Redis before each fault.
    """

    name = "allfold"

    def __init__(
        self, fleet: Fleet, kind: Kind, on_loss: str, timeout: float, *, away: bool = False
    ) -> None:
        self._fleet = fleet
        self._kind = kind
        self._on_loss = on_loss
        self._timeout = timeout
        self._away = away
        self._injector = Injector(fleet)
        self._lost: set[int] = set()

    def start(self, seed: int) -> None:
        """Begin a life: a new group, of new processes."""
        if self._fleet.cluster.orchestrator_ended:
            self._fleet.redis.start()
            self._fleet.cluster.start_orchestrator()
        self._fleet.start_agents()
        self._lost = set()
        self._injector = Injector(self._fleet)
        self._fleet.start_ranks(f"faults{seed}", seed, self._timeout, self._on_loss)
        await_all(self._all_have_begun, _FIRST_OP_SECONDS, "the first op")

    def _all_have_begun(self) -> bool:
        return all(log.records for log in self.logs())

    def can_lose(self) -> bool:
        """Two ranks of two nodes are left afterwards."""
        nodes = {rank.node for rank in self._left()}
        return len(nodes) > 2 and len(self._left()) * 2 > self._fleet.world

    def fault(self, draw: float) -> Done:
        """Take a rank or a node away."""
        if self._away and not self._fleet.cluster.orchestrator_ended:
            self._fleet.cluster.kill_orchestrator()
            self._fleet.redis.stop()
        self._injector.inject(Fault(self._kind, 0.0, 0.0, draw, 0.0))
        done = self._injector.done[-1]
        self._lost |= done.seats
        return done

    def logs(self) -> list[RankLog]:
        """Return the logs of those who are not lost."""
        return [
            read_changes(Path(rank.orders.log), rank.orders.seat, rank.node)
            for rank in self._left()
        ]

    def end(self) -> None:
        """End the ranks, and what was done to the nodes."""
        self._fleet.end_ranks()
        self._injector.end_all()

    def _left(self) -> list[RankProcess]:
        return [rank for rank in self._fleet.ranks if rank.orders.seat not in self._lost]
