"""The incidents that this agent knows of: those that it has found, and those of its groups."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import count
from time import time

from allfold_agent.runtime.locks import make_lock
from allfold_core.incident import (
    LOST_SECONDS,
    REPEAT_SECONDS,
    Cause,
    Effect,
    Incident,
    bounded,
)

log = logging.getLogger(__name__)

ENDED_KEPT = 256

Tell = Callable[[Incident], None]


class Incidents:
    """Open and recent incidents. From any thread.

    Args:
        node: the name of this one.
        tell: told of each incident of this node: when it is found, when it changes or ends, and
            from time to time while it lasts. Must not wait.
    """

    def __init__(self, node: str, tell: Tell) -> None:
        self._node = node
        self._tell = tell
        self._numbers = count()
        # Numbers alone would come again after a restart.
        self._run = format(int(time() * 1e3), "x")
        self._lock = make_lock("incidents")
        self._own: dict[Hashable, Incident] = {}
        self._told: OrderedDict[str, tuple[Incident, float]] = OrderedDict()
        self._ended: deque[Incident] = deque(maxlen=ENDED_KEPT)
        self._found: Counter[tuple[Cause, Effect]] = Counter()
        self._repeat_at = 0.0

    def open(self, key: Hashable, incident: Incident) -> Incident:
        """Note that an incident lasts; of one that is known only what has changed is news.

        Args:
            key: the same as long as it is the same incident.
            incident: without id, reporter and time of finding.
        """
        incident = bounded(incident)  # the orchestrator would end the link for a longer text
        with self._lock:
            known = self._own.get(key)
            if known is not None and _says_the_same(known, incident):
                return known
            found = replace(
                incident,
                id=known.id if known else f"{self._node}-{self._run}-{next(self._numbers)}",
                reporter=self._node,
                began=known.began if known else incident.began,
                seen=known.seen if known else time(),
            )
            self._own[key] = found
            if known is None or known.cause is not found.cause:
                self._found[found.cause, found.effect] += 1
        if known is None or known.cause is not found.cause:
            log.warning("%s", found.sentence, extra=_facts(found))
        self._tell(found)
        return found

    def end(self, key: Hashable) -> None:
        """Note that an incident is over, if it was known."""
        ended = self._close(key)
        if ended is not None:
            log.info("over after %.1f s: %s", time() - ended.began, ended.sentence)
            self._tell(ended)

    def _close(self, key: Hashable) -> Incident | None:
        with self._lock:
            known = self._own.pop(key, None)
            if known is None:
                return None
            ended = replace(known, ended=time())
            self._ended.append(ended)
            return ended

    def end_all(self, group: str, opening: int) -> None:
        """Note that a group is over on this node, and all that was wrong with it."""
        with self._lock:
            over = [
                key
                for key, each in self._own.items()
                if (each.group, each.opening) == (group, opening)
            ]
            self._told = OrderedDict(
                (number, told)
                for number, told in self._told.items()
                if (told[0].group, told[0].opening) != (group, opening)
            )
        for key in over:
            self.end(key)

    def report(self, incident: Incident) -> None:
        """Note an incident that is over as soon as it is known."""
        key = object()
        self.open(key, incident)
        ended = self._close(key)
        if ended is not None:
            self._tell(ended)

    def hear(self, incident: Incident, now: float) -> None:
        """Take in what another agent of a group has found.

        Args:
            now: monotonic.
        """
        with self._lock:
            self._told.pop(incident.id, None)
            if incident.is_open:
                self._told[incident.id] = incident, now
            elif all(each.id != incident.id for each in self._ended):
                self._ended.append(incident)

    def repeat(self, now: float) -> None:
        """Tell again of what lasts, if it is time to; forget what others say no more."""
        if now < self._repeat_at:
            return
        self._repeat_at = now + REPEAT_SECONDS
        with self._lock:
            own = list(self._own.values())
            for key, (_, heard) in list(self._told.items()):
                if now - heard > LOST_SECONDS:
                    del self._told[key]
        for incident in own:
            self._tell(incident)

    def open_ones(self, group: str = "") -> list[Incident]:
        """Return what lasts, the oldest first; of one group only, if so asked."""
        with self._lock:
            found = [*self._own.values(), *(each for each, _ in self._told.values())]
        chosen = [each for each in found if not group or each.group == group]
        return sorted(chosen, key=lambda each: each.began)

    def counts(self) -> dict[tuple[Cause, Effect], tuple[int, int]]:
        """Return how many incidents this agent has found, and how many of these are open."""
        with self._lock:
            lasting = Counter((each.cause, each.effect) for each in self._own.values())
            return {
                what: (self._found[what], lasting[what])
                for what in self._found.keys() | lasting.keys()
            }

    def recent(self) -> list[Incident]:
        """Return what was over last, the newest first."""
        with self._lock:
            return list(reversed(self._ended))


def _says_the_same(known: Incident, incident: Incident) -> bool:
    return (known.cause, known.sentence, known.seq) == (
        incident.cause,
        incident.sentence,
        incident.seq,
    )


def _facts(incident: Incident) -> dict[str, object]:
    return {
        "incident": incident.id,
        "cause": incident.cause.value,
        "group": incident.group,
        "seq": incident.seq,
    }
