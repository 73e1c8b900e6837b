"""The peer monitor: what this agent sees of the others, and whom it suspects at the orchestrator.

It watches all links that a group wants. If a node falls silent, the monitor dials it once
more. If that does not help, or if the node refuses connections or does not do its part of a round,
the monitor suspects it. The orchestrator decides what happens to a suspected node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from time import monotonic
from typing import NamedTuple, Protocol

from allfold_agent.membership.links import PING_SECONDS, PeerLinks
from allfold_agent.runtime.reactor import Reactor
from allfold_core.survival.suspicion import (
    Action,
    Awaited,
    Observation,
    OverdueRounds,
    Suspicion,
    SuspicionKind,
)
from allfold_core.survival.term_record import Life

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
# While no link is wanted.
_IDLE_SECONDS = 0.5


class SuspicionReporter(Protocol):
    """Brings suspicions before the orchestrator. Called in the reactor's thread; may not wait."""

    def suspect(
        self, node: str, incarnation: str, kind: SuspicionKind, since: float, lag: float
    ) -> None:
        """Suspect a node.

        Args:
            since: for how many seconds the suspicion holds.
            lag: how late this agent's own thread was of late.
        """

    def withdraw(self, node: str, incarnation: str, kind: SuspicionKind) -> None:
        """Take a suspicion back: the node was heard again, or does its part again."""


class _News(NamedTuple):
    """A snapshot for other threads. Made anew at each tick, and never changed."""

    heard: Mapping[str, float]
    lag: float
    next_tick: float


class PeerMonitor:
    """Watches the other agents, in the reactor's thread.

    Args:
        links: to the other agents.
        reactor: of the links.
        reporter: the way to the orchestrator.
        heard_on_edges: returns when the last byte came from a node on any edge (monotonic).
        awaited: returns what this node waits for in the rounds of its groups.
    """

    def __init__(
        self,
        links: PeerLinks,
        reactor: Reactor,
        reporter: SuspicionReporter,
        heard_on_edges: Callable[[str], float] = lambda _: float("-inf"),
        awaited: Callable[[], Collection[Awaited]] = lambda: (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._links = links
        self._reactor = reactor
        self._reporter = reporter
        self._heard_on_edges = heard_on_edges
        self._awaited = awaited
        self._clock = clock
        self._suspicions: dict[Life, Suspicion] = {}
        self._overdue = OverdueRounds()
        self._stuck: dict[Life, float] = {}
        self._suspected: dict[
            tuple[Life, SuspicionKind], float
        ] = {}  # since when, as the log has it
        self._news = _News({}, 0.0, float("inf"))

    # From any thread

    def start(self) -> None:
        """Begin to watch."""
        self._reactor.call(self._tick)

    def heard(self) -> dict[str, float]:
        """Return how many seconds ago each node was heard last, if ever."""
        now = self._clock()
        return {node: max(0.0, now - at) for node, at in self._news.heard.items()}

    def lag(self) -> float:
        """Return how late the reactor's thread was at most within the last seconds, or is now."""
        news = self._news
        return max(0.0, news.lag, self._clock() - news.next_tick)

    def cleared(self, node: str, incarnation: str, patience: float) -> None:
        """Clear a node that the orchestrator cleared; ``patience``: seconds it may be silent."""
        self._reactor.call(lambda: self._clear((node, incarnation), patience))

    def again(self) -> None:
        """Suspect all again who are still suspected: the orchestrator may not know of it.

        Of rounds nothing is suspected then: this node may have waited for lack of a term that it
        is told of now.
        """
        self._reactor.call(self._suspect_again)

    # In the reactor's thread

    def look(self, node: str) -> None:
        """Decide now whether to suspect a node: something has happened to the link to it."""
        for life in self._links.wanted():
            if life[0] == node:
                self._decide(life)

    def _tick(self) -> None:
        try:
            wanted = self._links.wanted()
            self._suspicions = {life: self._suspicions.get(life) or Suspicion() for life in wanted}
            # The end of those that are gone is logged by their groups.
            self._suspected = {key: at for key, at in self._suspected.items() if key[0] in wanted}
            for life in wanted:
                self._decide(life)
            self._decide_stuck()
        finally:
            seconds = TICK_SECONDS if self._suspicions else _IDLE_SECONDS
            self._publish(seconds)
            self._reactor.later(seconds, self._tick)

    def _publish(self, seconds: float) -> None:
        heard = {node: self._last_heard(node) for node, _ in self._suspicions}
        known = {node: at for node, at in heard.items() if at > float("-inf")}
        self._news = _News(known, self._links.lag(), self._clock() + seconds)

    # Silence

    def _decide(self, life: Life) -> None:
        node, _ = life
        suspicion = self._suspicions.setdefault(life, Suspicion())
        seen = self._observe(node)
        if seen is None:
            return
        before = suspicion.kind
        action = suspicion.decide(self._clock(), seen)
        kind = suspicion.kind
        if kind is None and before is not None:
            self._withdraw(life, before)
        if action is Action.DIAL_AGAIN:
            self._links.dial_again(node)
        elif action is not Action.NOTHING and kind is not None:
            self._suspect(life, kind, self._clock() - seen.last_heard)

    def _observe(self, node: str) -> Observation | None:
        seen = self._links.observe(node)
        if seen is None or self._clock() - seen.last_heard <= PING_SECONDS:
            return seen
        return replace(seen, last_heard=max(seen.last_heard, self._heard_on_edges(node)))

    def _last_heard(self, node: str) -> float:
        heard = self._links.last_heard(node)
        if self._clock() - heard <= PING_SECONDS:
            return heard  # the edges have no better to tell
        return max(heard, self._heard_on_edges(node))

    def _suspect(self, life: Life, kind: SuspicionKind, seconds: float) -> None:
        if (life, kind) not in self._suspected:
            log.warning("node %s is suspected: %s for %.3f s", life[0], kind, seconds)
            self._suspected[life, kind] = self._clock() - seconds
        self._reporter.suspect(*life, kind, seconds, self._links.lag())

    def _withdraw(self, life: Life, kind: SuspicionKind) -> None:
        self._reporter.withdraw(*life, kind)
        self._note_end(life, kind, "is suspected no more")

    def _note_end(self, life: Life, kind: SuspicionKind, how: str) -> None:
        began = self._suspected.pop((life, kind), None)
        if began is not None:
            log.info("node %s %s: it was %s for %.3f s", life[0], how, kind, self._clock() - began)

    def _clear(self, life: Life, patience: float) -> None:
        if life in self._suspicions:
            kind = self._suspicions[life].kind
            if kind is not None:
                self._note_end(life, kind, "is cleared by the orchestrator")
            self._suspicions[life].clear(self._clock(), patience)

    def _suspect_again(self) -> None:
        for life in self._stuck:
            self._reporter.withdraw(*life, "stuck")
        self._overdue, self._stuck = OverdueRounds(), {}
        for life, suspicion in list(self._suspicions.items()):
            kind = suspicion.kind
            self._decide(life)
            seen = self._observe(life[0])
            if seen is not None and kind is not None and kind == suspicion.kind:
                self._suspect(life, kind, self._clock() - seen.last_heard)

    # Rounds

    def _decide_stuck(self) -> None:
        awaited = [each for each in self._awaited() if not self._has_excuse(each)]
        overdue = self._overdue.stuck(self._clock(), awaited, self._links.lag())
        stuck = {life: overdue[life[0]] for life in self._suspicions if life[0] in overdue}
        for life in stuck.keys() - self._stuck.keys():
            self._suspect(life, "stuck", stuck[life])
        for life in self._stuck.keys() - stuck.keys():
            self._withdraw(life, "stuck")
        self._stuck = stuck

    def _has_excuse(self, awaited: Awaited) -> bool:
        """Return True for a node that is silent, and for a leader that waits for others itself."""
        node, group = awaited.node, (awaited.group, awaited.opening)
        seen = self._observe(node)
        if seen is None or seen.is_silent(self._clock()) or not self._links.is_up(node):
            return True
        return any(
            (each.group, each.opening) == group and {*each.waits_for} - {node}
            for each in self._links.floors(node)
        )
