"""Who may send how much, and when: the caps of this node, and the classes of its groups.

Nothing here waits or sends. A flow, the sending side of one connection, asks what it may write; if
that is nothing, it asks again after the pause that it is told. Three rules decide:

1. **Caps.** Each is a token bucket, which the flows under it share. Those that wait for one go in
   the order of their classes, and within one in the order in which they came.
2. **Ahead.** A flow of a class that yields writes no more ahead into the kernel than what is under
   way on its line, and on top of that what the line carries in a chunk of 20 ms. So it
   leaves the line within that time.
3. **Floor.** While a class above has had bytes on the line within the last 20 ms, a flow gets a
   twentieth of the line, or of its cap, and goes ahead with that: nothing starves.

Who has bytes on the line the kernel tells (:mod:`allfold_agent.traffic.line`): what goes first pays
nothing for it. A flow that no rule is about is not even asked (:attr:`Flow.is_paced`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple, Protocol

from allfold_agent.runtime.locks import make_lock
from allfold_agent.traffic.rates import CHUNK_SECONDS, UNKNOWN_RATE, Bucket, RateMeter
from allfold_core.protocol.traffic import LEVELS, Cap

FLOOR = 0.05
"""The part of a line that a class has at least while others have bytes for it."""
QUIET_SECONDS = 0.02
"""A class has the line once those above it have had no bytes on it for so long."""
FLOOR_BYTES = 48 * 1024
"""So much of the floor goes at once: a short op behind it waits for no more than this."""
# The least that may be written ahead, on however slow a line.
_LEAST_AHEAD = 16 * 1024
# A change of the caps, and a line that is free again, are noticed after so long at the latest.
_LONGEST_PAUSE = 0.1
_SHORTEST_PAUSE = 0.001
# Who waits for a class above looks so often whether that has become quiet.
_PRESSED_PAUSE = QUIET_SECONDS / 4
# Who has not asked again so long after its turn has lost it.
_LATE_SECONDS = 0.2
# The place of a flow that goes on with its floor: before all classes.
_FIRST = -1

Later = Callable[[float, Callable[[], None]], object]


class LineState(NamedTuple):
    """The kernel's view of a connection.

    Attributes:
        in_flight: segments that are not acknowledged.
        segments: sent so far.
        acked: bytes that are acknowledged so far.
        queued: bytes that are not sent, or not acknowledged.
        round_trip: the shortest that there was, in seconds.
    """

    in_flight: int
    segments: int
    acked: int
    queued: int
    round_trip: float


class Line(Protocol):
    """The connection of a flow."""

    def look(self) -> LineState | None:
        """Return its state; ``None`` where it has ended."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A flow that waits, and what for.

    Attributes:
        order: those with less go before it.
        least: the bytes that it waits for.
        due: when they are there; it asks again then.
    """

    order: tuple[int, int]
    least: float
    due: float
    buckets: tuple[Bucket, ...]


class Flow:
    """What one connection to another machine sends; made by :meth:`Sender.open`.

    Attributes:
        is_paced: False while it may send whatever it likes: then nothing has to be asked.
        pause: seconds after which to ask again, where the last answer was 0.
        level: of its class; 0 goes first.
        yields: to flows that there are, or that may come at any time.
    """

    __slots__ = (
        "_segments",
        "buckets",
        "group",
        "is_paced",
        "level",
        "line",
        "meter",
        "pacer",
        "pause",
        "yields",
        "zone",
    )

    def __init__(self, pacer: Pacer, group: str, zone: str, level: int, line: Line) -> None:
        self.pacer, self.group, self.zone, self.level, self.line = pacer, group, zone, level, line
        self.meter = RateMeter()
        self.is_paced = self.yields = False
        self.pause = 0.0
        self.buckets: tuple[Bucket, ...] = ()
        self._segments = 0

    def ask(self, wanted: int) -> int:
        """Return how many bytes may be written now, at most as many as are wanted."""
        return self.pacer.ask(self, wanted)

    def give_back(self, nbytes: int) -> None:
        """Give back what was not written."""
        if nbytes:
            self.pacer.give_back(self, nbytes)

    def later(self, task: Callable[[], None]) -> None:
        """Do something after the pause, in some thread; soon."""
        self.pacer.later(self.pause, task)

    def close(self) -> None:
        """Send nothing more."""
        self.pacer.forget(self)

    def has_bytes_on_line(self) -> bool:
        """Return True if something is on its way, or was since the last call."""
        state = self.line.look()
        if state is None:
            return False
        has_sent, self._segments = state.segments != self._segments, state.segments
        return has_sent or state.in_flight > 0


class Pacer:
    """The caps and classes of one node, for all its threads.

    Args:
        node, zone: of this node.
        rate: the cap on all that it sends, in bytes per second; 0 for none.
        later: does something after some seconds, in a thread of its own; from any thread.
    """

    def __init__(
        self,
        node: str,
        zone: str,
        rate: int,
        later: Later,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.later = later
        self._node, self._zone, self._own = node, zone, rate
        self._clock = clock
        self._lock = make_lock("pacer")
        self._flows: list[Flow] = []
        self._buckets: dict[str, Bucket] = {}
        self._waiting: dict[Flow, _Turn] = {}
        self._turns = 0
        self._busy_at = [float("-inf")] * len(LEVELS)
        self._floors = [Bucket(FLOOR * UNKNOWN_RATE, clock(), FLOOR_BYTES) for _ in LEVELS]
        self._caps: tuple[Cap, ...] = ()
        self.take(())

    @property
    def caps(self) -> list[Cap]:
        """The caps to which this node keeps, its own among them."""
        own = [Cap(node=self._node, rate=self._own)] if self._own else []
        return own + [each for each in self._caps if self._is_ours(each)]

    def _is_ours(self, cap: Cap) -> bool:
        return self._zone in cap.zones if cap.zones else cap.node in ("", self._node)

    def take(self, caps: Sequence[Cap]) -> None:
        """Keep to these caps from now on, in place of those that were given before."""
        with self._lock:
            self._caps = tuple(caps)
            rates: dict[str, int] = {}
            for cap in self.caps:
                key = self._key(cap)
                rates[key] = min(cap.rate, rates.get(key, cap.rate))
            now, before = self._clock(), self._buckets
            for key, bucket in before.items():
                if key in rates and bucket.rate != rates[key]:
                    bucket.change(rates[key], now)
            self._buckets = {
                key: before.get(key) or Bucket(rate, now) for key, rate in rates.items()
            }
            self._waiting.clear()
            self._assign()

    def _key(self, cap: Cap) -> str:
        if cap.group:
            return f"group {cap.group}"
        if cap.zones:
            first, second = cap.zones
            return f"zone {second if first == self._zone else first}"
        return "node"

    def _assign(self) -> None:
        """Give each flow its buckets, and have those asked that a rule is about."""
        first = min((each.level for each in self._flows), default=0)
        for flow in self._flows:
            keys = ("node", f"group {flow.group}", f"zone {flow.zone}")
            flow.buckets = tuple(self._buckets[key] for key in keys if key in self._buckets)
            flow.yields = flow.level > first or flow.level == len(LEVELS) - 1
            flow.is_paced = flow.yields or bool(flow.buckets)

    def open(self, group: str, zone: str, level: int, line: Line) -> Flow:
        """Return the flow of a new connection."""
        flow = Flow(self, group, zone, level, line)
        with self._lock:
            self._flows.append(flow)
            self._assign()
        return flow

    def forget(self, flow: Flow) -> None:
        """Let go of a flow; a second time is fine."""
        with self._lock:
            self._waiting.pop(flow, None)
            if flow in self._flows:
                self._flows.remove(flow)
                self._assign()

    def ask(self, flow: Flow, wanted: int) -> int:
        """Return how many bytes a flow may write now; 0 sets its pause."""
        with self._lock:
            now = self._clock()
            if not flow.is_paced:
                return wanted
            granted = self._ask(flow, wanted, now)
            if granted:
                self._waiting.pop(flow, None)
            return granted

    def give_back(self, flow: Flow, nbytes: int) -> None:
        """Take back what a flow was granted and has not written."""
        with self._lock:
            for bucket in flow.buckets:
                bucket.level = min(bucket.burst, bucket.level + nbytes)

    def _ask(self, flow: Flow, wanted: int, now: float) -> int:
        if not flow.yields:
            return self._from_buckets(flow, flow.buckets, wanted, now, flow.level)
        state = flow.line.look()
        if state is None:
            return wanted  # it has ended, and the write tells so
        is_pressed, meter = self._is_pressed(flow.level, now), flow.meter
        if is_pressed:
            meter.restart()
        else:
            meter.note(now, state.acked, state.queued, state.round_trip)
        rate = min([meter.rate, *(each.rate for each in flow.buckets)])
        if is_pressed:
            floor = self._floors[flow.level]
            floor.change(FLOOR * rate, now)
            granted = self._from_buckets(flow, (*flow.buckets, floor), wanted, now, _FIRST)
            flow.pause = min(flow.pause, _PRESSED_PAUSE)
            return granted
        # What is under way on a long line keeps it busy; only the rest of it waits there.
        ahead = max(_LEAST_AHEAD, rate * CHUNK_SECONDS)
        most = rate * state.round_trip + ahead
        room = int(most) - state.queued
        if room < min(wanted, ahead / 2):
            flow.pause = _bounded((state.queued - most + ahead / 2) / rate)
            return 0
        return self._from_buckets(flow, flow.buckets, min(wanted, room), now, flow.level)

    def _is_pressed(self, level: int, now: float) -> bool:
        """Return True if a class above this one has had bytes for the line of late."""
        for flow in self._flows:
            if flow.level < level and (self._waits(flow, now) or flow.has_bytes_on_line()):
                self._busy_at[flow.level] = now
        return any(now - at < QUIET_SECONDS for at in self._busy_at[:level])

    def _waits(self, flow: Flow, now: float) -> bool:
        turn = self._waiting.get(flow)
        return turn is not None and now < turn.due + _LATE_SECONDS

    def _from_buckets(
        self, flow: Flow, buckets: tuple[Bucket, ...], wanted: int, now: float, place: int
    ) -> int:
        """Take from all of these buckets, behind those that wait for one of them before this."""
        if not buckets:
            return wanted
        turn = self._waiting.get(flow)
        number = turn.order[1] if turn else self._turns
        order = place, number
        least = min(wanted, *(each.burst / 2 for each in buckets))
        before = [self._before(flow, order, each, now) for each in buckets]
        left = [each.fill(now) - taken for each, taken in zip(buckets, before, strict=True)]
        if min(left) >= least:
            granted = int(min(wanted, *left))
            for bucket in buckets:
                bucket.level -= granted
            return granted
        seconds = max(
            each.seconds_to(least + taken) for each, taken in zip(buckets, before, strict=True)
        )
        self._turns += turn is None
        self._waiting[flow] = _Turn(order, least, now + seconds, buckets)
        flow.pause = _bounded(seconds)
        return 0

    def _before(self, flow: Flow, order: tuple[int, int], bucket: Bucket, now: float) -> float:
        """Return the bytes of a bucket that are for others first."""
        return sum(
            turn.least
            for other, turn in self._waiting.items()
            if other is not flow
            and turn.order < order
            and bucket in turn.buckets
            and now < turn.due + _LATE_SECONDS
        )


def _bounded(seconds: float) -> float:
    return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, seconds))
