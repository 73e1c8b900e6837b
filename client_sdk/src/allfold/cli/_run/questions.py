"""Asking the orchestrator, while ranks run: for incidents, and for whom those that wait wait."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence, Set
from queue import SimpleQueue
from threading import Event, Thread
from time import time
from typing import Any, Self
from urllib.parse import quote

from allfold.cli._asking import ask_replicas
from allfold.cli._parameters import orchestrators, token
from allfold_cluster.http import NoAnswer, get_json
from allfold_core.errors import AllfoldError, OrchestratorUnreachable
from allfold_core.incident import Cause, Effect, Incident, from_dict

_INTERVAL_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_VIEW_SECONDS = 1.0


class IncidentWatch:
    """Asks in a thread of its own, so that an orchestrator that does not answer delays nobody.

    ``fileno`` is readable while there is something to be shown.

    Args:
        env: in which ranks find Allfold.
        group: of the run whose incidents are shown; of an Allfold of this run alone, ``""``: all.
    """

    def __init__(self, env: Mapping[str, str], group: str) -> None:
        self._urls = orchestrators(env.get("ALLFOLD_ORCHESTRATOR_URL"))
        self._token = token(environment=env)
        self._group = group
        self._since = time()
        self._before: set[str] | None = None  # ids of earlier incidents, known once one answers
        self._shown: set[str] = set()
        self._over: set[str] = set()
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="allfold-incidents", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        os.close(self._ready)

    def _stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=2 * _ANSWER_SECONDS)

    def fileno(self) -> int:
        return self._ready

    def take(self) -> list[str]:
        """Return what is to be shown now."""
        os.eventfd_read(self._ready)
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def finish(self, reported: int) -> list[str]:
        """Ask for the last time, after a failure; return what is still to be shown.

        Args:
            reported: the rank that is known to have failed. If another one has ended before it,
                that is shown, too: it may be the cause, and end later, or on another machine.
        """
        self._stop()
        if self._thread.is_alive():
            return []
        found = self._incidents()
        notes = [self._notes.get() for _ in range(self._notes.qsize())] + self._news(found)
        exits = [each for each in found if each.cause is Cause.EXITED_RANK]
        first = min(exits, key=lambda each: each.began, default=None)
        if first is not None and first.culprit.rank != reported:
            notes.append(f"before that, {first.sentence}")
        return notes

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_SECONDS):
            notes = self._news(self._incidents())
            for note in notes:
                self._notes.put(note)
            if notes and not self._stopping.is_set():
                os.eventfd_write(self._ready, 1)

    def _incidents(self) -> list[Incident]:
        try:
            found = ask_replicas(self._urls, self._incidents_of)
        except OrchestratorUnreachable:
            return []  # the ranks go on without any
        if self._before is None:
            self._before = {each.id for each in found if each.seen < self._since}
        return [each for each in found if self._concerns_us(each)]

    def _incidents_of(self, url: str) -> list[Incident]:
        try:
            path = f"{url}/v1/incidents?limit=50"
            answer = get_json(path, self._token, seconds=_ANSWER_SECONDS)
            return [from_dict(each) for each in answer["incidents"]]
        except (AllfoldError, KeyError, TypeError, ValueError) as error:
            # Its store is down, or it is of another version: another replica may know.
            raise NoAnswer(f"{url} shows no incidents: {error}") from None

    def _concerns_us(self, incident: Incident) -> bool:
        # Not by its time alone: the clock of its node may be behind ours.
        return incident.id not in (self._before or ()) and is_of_run(incident.group, self._group)

    def _news(self, incidents: Sequence[Incident]) -> list[str]:
        """Return what is new, the oldest first.

        Without the ends of ranks, which are reported by who has started them.
        """
        others = [each for each in reversed(incidents) if each.cause is not Cause.EXITED_RANK]
        return [note for each in others for note in self._news_of(each)]

    def _news_of(self, incident: Incident) -> list[str]:
        """Return what is new of an incident: that it was found, and that it is over."""
        news = []
        if incident.id not in self._shown:
            self._shown.add(incident.id)
            news.append(incident.sentence)
        if incident.ended is not None and incident.id not in self._over:
            self._over.add(incident.id)
            if incident.effect is not Effect.FAILED:
                seconds = incident.ended - incident.began
                news.append(f"over after {seconds:.1f} s: {incident.culprit}")
        return news


def is_of_run(group: str, run: str) -> bool:
    """Return True for the group of a run, one that torch makes in it, and their sub-groups.

    Args:
        group: of an incident; ``""`` where it concerns all, as that of a store does.
        run: the name of the run's group; ``""`` where all groups are of this run.
    """
    of_torch, of_new_group = r"(-(\d+-)?[0-9a-f]{12,})?", r"(\.[0-9a-f]{20})*"
    return "" in (group, run) or bool(re.fullmatch(re.escape(run) + of_torch + of_new_group, group))


class Latecomers:
    """Asks the orchestrator if ranks wait for others that have ended well.

    Ranks that were started again when their group had ended do: it cannot open anew for them.

    Args:
        group: the run's.
        env: in which ranks find Allfold.
    """

    def __init__(self, group: str, env: Mapping[str, str]) -> None:
        self._group = group
        self._env = env

    def awaited(self, running: Set[int], ended_well: Set[int]) -> list[int]:
        """Return those that have ended well and for which all running ranks wait in ``init``.

        There are none if it is not known: the ranks then wait until their own deadline.
        """
        try:
            view = self._view()
        except AllfoldError:  # no such group, as the script opens none; or nothing answers
            return []
        if view.get("phase") != "forming":
            return []
        present = {place["rank"] for place in view["present"]}
        return sorted(ended_well & set(view["missing"])) if running <= present else []

    def _view(self) -> dict[str, Any]:
        path = f"/v1/groups/{quote(self._group, safe='')}"
        secret = token(environment=self._env)
        return ask_replicas(
            orchestrators(self._env.get("ALLFOLD_ORCHESTRATOR_URL")),
            lambda url: get_json(url + path, secret, seconds=_VIEW_SECONDS),
        )
