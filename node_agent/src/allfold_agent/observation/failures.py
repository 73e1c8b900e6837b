"""Incidents that are over when they are known: ranks that have ended, calls that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import time

from allfold_agent.groups.group import Group
from allfold_agent.observation.incidents import Incidents
from allfold_core.errors import AllfoldError, MismatchError, ServiceError
from allfold_core.incident import Cause, Culprit, Effect, Incident, node_culprit, rank_culprit

_NO_MEMORY = ("MemoryError", "Cannot allocate memory", "out of memory", "OutOfMemory", "ENOMEM")
_NO_DISK = ("No space left on device", "Disk quota exceeded", "ENOSPC")
_OF_ALLFOLD = "[AF"


class ExitObserver:
    """Reports ranks of this node whose processes have ended, with what is known of the reason."""

    def __init__(self, incidents: Incidents) -> None:
        self._incidents = incidents
        self._killed = _killed_for_memory()

    def note(self, group: Group, session: str, how: str) -> None:
        """A rank is gone, and not in order.

        An exception of Allfold itself is the consequence of something else, which has its incident.

        Args:
            how: a phrase to follow its name.
        """
        if _OF_ALLFOLD in how:
            return
        killed, self._killed = self._killed, _killed_for_memory()
        was_killed = self._killed > killed
        sessions = group.current.plan.sessions
        epoch = group.epoch_table.newest_with(session)
        if epoch is None:
            return
        rank = epoch.rank_of(session)
        more = ": the kernel has killed a process of this machine for lack of memory"
        self._incidents.note(
            Incident(
                "",
                Cause.OUT_OF_MEMORY if was_killed else _cause_of(how, Cause.EXITED_RANK),
                Effect.FAILED,
                rank_culprit(rank, group.node),
                f"rank {rank} of group '{group.name}' on node {group.node} {how}"
                + (more if was_killed else ""),
                group.name,
                group.opening,
                began=time(),
                evidence={"ranks": len(sessions)},
            )
        )


def report_failures(group: Group, incidents: Incidents) -> None:
    """Report the ops that have failed since the last time, where this node is to do it."""
    failures = group.outcomes.failures
    while failures:
        seq, error = failures.popleft()
        found = _incident_of(group, error)
        if found is not None:
            cause, culprit = found
            incidents.note(
                Incident(
                    "",
                    cause,
                    Effect.FAILED,
                    culprit,
                    error.message.removesuffix("."),
                    group.name,
                    group.opening,
                    seq,
                    time(),
                )
            )


def _incident_of(group: Group, error: AllfoldError) -> tuple[Cause, Culprit] | None:
    """Return the incident of a failed op, if its culprit is on this node."""
    if isinstance(error, MismatchError):
        odd: Sequence[int] = error.details.get("odd_ranks", ())
        return _wrong_call(group, odd[0]) if odd else None
    is_ours = isinstance(error, ServiceError) and f"node {group.node}:" in error.message
    if is_ours and any(word in error.message for word in _NO_MEMORY):
        return Cause.OUT_OF_MEMORY, node_culprit(group.node)
    return None


def _wrong_call(group: Group, rank: int) -> tuple[Cause, Culprit] | None:
    if rank not in group.current.ranks:
        return None  # its own node reports it
    return Cause.WRONG_CALL, rank_culprit(rank, group.node)


def _cause_of(how: str, otherwise: Cause) -> Cause:
    if any(word in how for word in _NO_MEMORY):
        return Cause.OUT_OF_MEMORY
    if any(word in how for word in _NO_DISK):
        return Cause.DISK_FULL
    return otherwise


def _killed_for_memory() -> int:
    """Return how many processes the kernel has killed for lack of memory since it started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
