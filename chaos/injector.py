"""Does to a fleet what a schedule says, and ends what does not last."""

from __future__ import annotations

import heapq
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TypeVar

from chaos.faults import TAKES_A_NODE, TAKES_A_RANK, Fault, Kind
from chaos.fleet import Fleet, RankProcess
from chaos.judge import Loss
from chaos.proxy import Pair

_SLOW_BYTES_PER_SECOND = 1e6

T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """A fault that has happened, on the clock of the ranks' records.

    Attributes:
        at: when it began.
        over: when it ended; ``at`` for one that does not last, or never ends.
        seats: those it took for good.
        resident: bytes of the process that was killed, which the kernel frees first.
    """

    kind: Kind
    target: str
    at: float
    over: float
    seats: frozenset[int] = frozenset()
    resident: int = 0

    @property
    def loss(self) -> Loss | None:
        return Loss(self.at, self.seats) if self.seats else None


class Injector:
    """The faults of one life."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._endings: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._away: set[Kind] = set()
        self._parted: set[Pair] = set()
        self._stopped: set[str] = set()
        self.done: list[Done] = []

    @property
    def next_ending(self) -> float:
        """Return when the next fault that lasts is due to end."""
        return self._endings[0][0] if self._endings else float("inf")

    @property
    def services_are_away(self) -> bool:
        """True while the orchestrator or Redis does not run: nobody is given up for lost then."""
        return bool(self._away) or not self._fleet.orchestrator_answers

    def end_due(self, now: float) -> None:
        """End what is due."""
        while self._endings and self.next_ending <= now:
            heapq.heappop(self._endings)[2]()

    def end_all(self) -> None:
        """End all that lasts, now."""
        self.end_due(float("inf"))

    def inject(self, fault: Fault) -> None:
        """Let a fault happen, unless nobody is left whom it could happen to."""
        living = self._fleet.living
        nodes = sorted({rank.node for rank in living})
        if len(nodes) < 2:
            return
        rank, node = _drawn(fault.victim, living), _drawn(fault.victim, nodes)
        other = _drawn(fault.other, [each for each in nodes if each != node])
        if fault.kind in TAKES_A_RANK:
            self._take_rank(fault, rank)
        elif fault.kind in TAKES_A_NODE:
            self._take_node(fault, node)
        elif fault.kind in (Kind.PAUSE_RANK, Kind.PAUSE_AGENT):
            self._pause(fault, rank, node)
        elif fault.kind in (Kind.RESTART_ORCHESTRATOR, Kind.RESTART_REDIS):
            self._restart(fault)
        else:
            self._disturb(fault, node, other)

    def _take_rank(self, fault: Fault, rank: RankProcess) -> None:
        resident = _resident(rank.child.pid)
        rank.killed = rank.lost = True
        at = monotonic()
        rank.child.signal(signal.SIGKILL)
        seat = rank.orders.seat
        self.done.append(Done(fault.kind, f"seat {seat}", at, at, frozenset([seat]), resident))

    def _take_node(self, fault: Fault, node: str) -> None:
        taken = [each for each in self._fleet.ranks if each.node == node]
        for each in taken:
            each.lost = True
        seats = frozenset(each.orders.seat for each in taken)
        agent = self._fleet.cluster.agents[node]
        resident, at = _resident(agent.pid), monotonic()
        match fault.kind:
            case Kind.KILL_AGENT:
                self._fleet.kill_agent(node)
            case Kind.STOP_AGENT:
                self._stopped.add(node)
                agent.child.signal(signal.SIGSTOP)
                # When the life is over: what it knew of the group is of no use to the next one.
                self._end_later(float("inf"), partial(self._fleet.kill_agent, node))
            case Kind.PART | Kind.PART_ONE_WAY:
                one_way = fault.kind is Kind.PART_ONE_WAY
                pairs = self._fleet.away_from(node) if one_way else self._fleet.between(node)
                self._parted |= set(pairs)
                self._fleet.proxy.ask("block", pairs)
                self._end_later(float("inf"), self._unite)
        self.done.append(Done(fault.kind, node, at, at, seats, resident))

    def _pause(self, fault: Fault, rank: RankProcess, node: str) -> None:
        if fault.kind is Kind.PAUSE_RANK:
            child, target = rank.child, f"seat {rank.orders.seat}"
            end = partial(child.signal, signal.SIGCONT)
        else:
            child, target = self._fleet.cluster.agents[node].child, node
            end = partial(self._continue, node)
        child.signal(signal.SIGSTOP)
        self._lasting(fault, target, end)

    def _continue(self, node: str) -> None:
        """Let an agent go on after a pause, but not one that is stopped for good."""
        if node not in self._stopped:
            self._fleet.cluster.agents[node].child.signal(signal.SIGCONT)

    def _restart(self, fault: Fault) -> None:
        if fault.kind in self._away:
            return
        self._away.add(fault.kind)
        if fault.kind is Kind.RESTART_REDIS:
            self._fleet.redis.stop()
        else:
            self._fleet.cluster.kill_orchestrator()
        self._lasting(fault, "", partial(self._bring_back, fault.kind))

    def _bring_back(self, kind: Kind) -> None:
        self._away.discard(kind)
        if kind is Kind.RESTART_REDIS:
            self._fleet.redis.start()
        else:
            self._fleet.cluster.launch_orchestrator()

    def _disturb(self, fault: Fault, node: str, other: str) -> None:
        proxy, pairs = self._fleet.proxy, [(node, other)]
        at = monotonic()
        match fault.kind:
            case Kind.RESET | Kind.FLIP:
                proxy.ask(fault.kind.value, pairs)
                self.done.append(Done(fault.kind, f"{node} to {other}", at, at))
                return
            case Kind.SLOW:
                proxy.ask("rate", pairs, rate=_SLOW_BYTES_PER_SECOND)
            case Kind.CUT:
                pairs = self._fleet.between(node)
                proxy.ask("block", pairs)
            case Kind.CUT_ONE_WAY:
                pairs = self._fleet.away_from(node)
                proxy.ask("block", pairs)
        self._lasting(fault, f"{node} to {other}", partial(self._open, pairs))

    def _open(self, pairs: Iterable[Pair]) -> None:
        """Let everything pass again, but not what is cut off for good."""
        self._fleet.proxy.ask("open", set(pairs) - self._parted)

    def _unite(self) -> None:
        parted, self._parted = self._parted, set()
        self._fleet.proxy.ask("open", parted)

    def _lasting(self, fault: Fault, target: str, end: Callable[[], None]) -> None:
        at = monotonic()
        self._end_later(at + fault.lasts, end)
        self.done.append(Done(fault.kind, target, at, at + fault.lasts))

    def _end_later(self, at: float, end: Callable[[], None]) -> None:
        heapq.heappush(self._endings, (at, next(self._numbers), end))


def _drawn(fraction: float, among: list[T]) -> T:
    return among[int(fraction * len(among))]


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
