"""The life of an elastic group: ranks and nodes join it, die, are told to leave and come back."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic

from allfold_cluster.processes import wait_for
from chaos.churn_program import ChurnOrders
from chaos.contents import MOST_SEATS
from chaos.faults import TAKES_A_NODE, TAKES_A_RANK, Kind, schedule
from chaos.fleet import Fleet, RankProcess
from chaos.injector import Injector

_PROGRAM = "chaos.churn_program"
# The most are fewer than may be in the group: seats of those that died are not free at once.
_FEWEST, _MOST = 2, 6
_GAP_SECONDS = (0.3, 1.2)
_AWAY_SECONDS = (0.3, 3.0)
# A silent node is given up for lost by the others, who outnumber it, before it comes back.
_SILENT_SECONDS = (0.5, 6.0)
_NODES_BESIDE_A_SILENT_ONE = 2
_HANG_SECONDS = 10.0
_TICK_SECONDS = 0.2


class Change(Enum):
    """A way in which ranks or nodes leave the group or fail."""

    KILL_RANK = "kill-rank"
    """SIGKILL."""
    DRAIN_RANK = "drain-rank"
    """SIGTERM: it leaves in order."""
    KILL_AGENT = "kill-agent"
    """SIGKILL, and it comes back under its name, as do ranks on it."""
    STOP_AGENT = "stop-agent"
    """SIGSTOP, and later the same."""


@dataclass(frozen=True)
class Terms:
    """The settings of the group, the same for all ranks."""

    group: str
    seed: int
    timeout: float
    on_loss: str
    joins: str


def changes_of(kinds: Sequence[Kind]) -> list[Change]:
    """Return the changes that these kinds of faults allow; draining is always one of them."""
    names = {kind.value for kind in kinds}
    return [each for each in Change if each is Change.DRAIN_RANK or each.value in names]


@dataclass
class Churn:
    """One life: starts ranks, and lets them and their nodes come to an end.

    Attributes:
        counts: how often each change happened.
        hanging: seats of ranks that called no op for long, though they live.
    """

    fleet: Fleet
    terms: Terms
    kinds: Sequence[Kind]
    injector: Injector
    counts: Counter[str] = field(default_factory=Counter)
    hanging: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(f"churn/{self.terms.seed}")
        self._changes = changes_of(self.kinds)
        self._away: dict[str, float] = {}
        self._starting: set[str] = set()
        self._silent: set[str] = set()
        self._progress: dict[int, tuple[int, float]] = {}
        self._drained: set[int] = set()
        self._next_seat = 0

    def play(self, seconds: float) -> None:
        """Make changes until the time is up, or a rank hangs."""
        self.fleet.begin_life()
        for _ in range(_FEWEST + 1):
            self._start_rank()
        until = monotonic() + seconds
        disturbances = [kind for kind in self.kinds if kind not in TAKES_A_RANK + TAKES_A_NODE]
        faults = schedule(self.terms.seed, disturbances)
        fault = next(faults, None)
        fault_due = monotonic() + fault.after if fault else until
        due = monotonic() + self._random.uniform(*_GAP_SECONDS)
        while (now := monotonic()) < until and not self.hanging:
            self.injector.end_due(now)
            self._bring_back(now)
            if now >= due:
                self._change()
                due = now + self._random.uniform(*_GAP_SECONDS)
            if fault and now >= fault_due:
                self.injector.inject(fault)
                fault = next(faults)
                fault_due = now + fault.after
            self._watch(now)
            wake = min(until, due, fault_due, self.injector.next_ending, now + _TICK_SECONDS)
            wait_for((), max(0.0, wake - monotonic()))

    @property
    def lost(self) -> frozenset[int]:
        """The seats of ranks that were lost with their nodes, or killed."""
        return frozenset(rank.orders.seat for rank in self.fleet.ranks if rank.lost)

    # Ranks

    def _change(self) -> None:
        living = self.fleet.living
        if len(living) <= _FEWEST or (len(living) < _MOST and self._random.random() < 0.55):
            self._start_rank()
            return
        match self._random.choice(self._changes):
            case Change.KILL_RANK:
                rank = self._random.choice(living)
                rank.killed = rank.lost = True
                rank.child.signal(signal.SIGKILL)
                self.counts[Change.KILL_RANK.value] += 1
            case Change.DRAIN_RANK:
                self._drain(self._random.choice(living))
            case Change.KILL_AGENT:
                self._take_node(Change.KILL_AGENT)
            case Change.STOP_AGENT:
                self._take_node(Change.STOP_AGENT)

    def _start_rank(self) -> None:
        nodes = [each for each in self.fleet.nodes if each not in self._away]
        node = self._random.choice(nodes)
        seat, terms = self._free_seat(), self.terms
        orders = ChurnOrders(
            seat=seat,
            world=0,
            group=terms.group,
            agent=self.fleet.cluster.socket_of(node),
            seed=terms.seed,
            timeout=terms.timeout,
            on_loss=terms.on_loss,
            stop=str(self.fleet.stop_file),
            log=str(self.fleet.log_of(terms.group, seat)),
            joins=terms.joins,
        )
        self.fleet.launch_rank(orders, node, _PROGRAM)
        self.counts["start-rank"] += 1

    def _free_seat(self) -> int:
        """Return the next number; results must tell it from those of all ranks that run.

        One that was starting when its agent was killed counts as lost, and may join all the same.
        """
        taken = {rank.orders.seat % MOST_SEATS for rank in self.fleet.ranks if rank.lives}
        seat = next(each for each in count(self._next_seat) if each % MOST_SEATS not in taken)
        self._next_seat = seat + 1
        return seat

    def _drain(self, rank: RankProcess) -> None:
        seat = rank.orders.seat
        # Before it is ready, nobody handles the signal, and a second one ends it at once.
        if rank.is_ready and seat not in self._drained:
            self._drained.add(seat)
            rank.child.signal(signal.SIGTERM)
            self.counts[Change.DRAIN_RANK.value] += 1

    # Nodes

    def _take_node(self, change: Change) -> None:
        """Take a node away, one at a time, with its ranks."""
        nodes = sorted({rank.node for rank in self.fleet.living})
        beside = _NODES_BESIDE_A_SILENT_ONE if change is Change.STOP_AGENT else 1
        if self._away or len(nodes) <= beside:
            return
        node, now = self._random.choice(nodes), monotonic()
        for rank in self.fleet.living:
            rank.lost = rank.lost or rank.node == node
        if change is Change.KILL_AGENT:
            self.fleet.kill_agent(node)
            self._away[node] = now + self._random.uniform(*_AWAY_SECONDS)
        else:
            self.fleet.cluster.agents[node].child.signal(signal.SIGSTOP)
            self._silent.add(node)
            self._away[node] = now + self._random.uniform(*_SILENT_SECONDS)
        self.counts[change.value] += 1

    def _bring_back(self, now: float) -> None:
        for node, due in list(self._away.items()):
            if node in self._starting:
                if self.fleet.accepts_ranks(node):
                    self.fleet.cluster.await_agent(node, registered=False)
                    self._starting.discard(node)
                    del self._away[node]
            elif now >= due:
                if node in self._silent:
                    self._silent.discard(node)
                    self.fleet.kill_agent(node)
                self.fleet.restart_agent(node)
                self._starting.add(node)

    def end(self) -> None:
        """Kill the nodes that are stopped."""
        for node in self._silent:
            self.fleet.kill_agent(node)

    # Hangs

    def _watch(self, now: float) -> None:
        """Note ranks that are in the group and have no outcome for long."""
        for rank in self.fleet.living:
            if not rank.is_ready:
                continue
            size = Path(rank.orders.log).stat().st_size
            before, since = self._progress.get(rank.orders.seat, (-1, now))
            if size != before or self.injector.services_are_away:
                self._progress[rank.orders.seat] = (size, now)
            elif now > since + _HANG_SECONDS:
                self.hanging.append(rank.orders.seat)
