"""Incidents that are over when they are known: ranks that have ended, calls that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time

from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.outcomes import FailedOp
from allfold_agent.observation.incidents import Incidents
from allfold_core.errors import MismatchError, PeerLost, ServiceError
from allfold_core.incident import Cause, Culprit, Effect, Incident, node_culprit, rank_culprit
from allfold_core.verdict import LEFT

_NO_MEMORY = ("MemoryError", "Cannot allocate memory", "out of memory", "OutOfMemory", "ENOMEM")
_NO_DISK = ("No space left on device", "Disk quota exceeded", "ENOSPC")
_OF_ALLFOLD = "[AF"
_IN_ORDER = (LEFT, "exited")


class ExitObserver:
    """Reports ranks of this node whose processes have ended, with what is known of the reason."""

    def __init__(self, incidents: Incidents) -> None:
        self._incidents = incidents
        self._killed = _killed_for_memory()

    def rank_ended(self, group: NodeGroup, session: str, how: str) -> None:
        """Report a rank that has ended without leaving the group first.

        An exception of Allfold itself is the consequence of something else, which has its incident.
        So is the end of the last rank of a group that does not go on without the others.

        Args:
            how: a phrase to follow its name.
        """
        if _OF_ALLFOLD in how:
            return
        killed, self._killed = self._killed, _killed_for_memory()
        was_killed = self._killed > killed
        plan = group.current.plan
        if group.current.ordinal and not plan.options.shrinks and len(plan.sessions) == 1:
            return
        epoch = group.epoch_table.newest_with(session)
        if epoch is None:
            return
        rank = epoch.rank_of(session)
        more = ": the kernel has killed a process of this machine for lack of memory"
        self._incidents.report(
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
                evidence={"ranks": len(plan.sessions)},
            )
        )


class FailureObserver:
    """Reports what ops of one group have failed of, where this node is to do it."""

    def __init__(self, group: NodeGroup, incidents: Incidents) -> None:
        self._group = group
        self._incidents = incidents
        self._departed: set[str] = set()  # the sessions that were reported as gone

    def look(self) -> None:
        """Report the failures since the last look."""
        failures = self._group.outcomes.failures
        while failures:
            failed = failures.popleft()
            found = self._culprit_of(failed)
            if found is not None:
                cause, culprit = found
                self._incidents.report(
                    Incident(
                        "",
                        cause,
                        Effect.FAILED,
                        culprit,
                        failed.error.message.removesuffix("."),
                        self._group.name,
                        self._group.opening,
                        failed.seq,
                        time(),
                    )
                )

    def _culprit_of(self, failed: FailedOp) -> tuple[Cause, Culprit] | None:
        """Return cause and culprit of a failed op, if it is for this node to report them."""
        node, error = self._group.node, failed.error
        if isinstance(error, MismatchError):
            odd: Sequence[int] = error.details.get("odd_ranks", ())
            is_ours = bool(odd) and odd[0] in failed.ranks  # else its own node reports it
            return (Cause.WRONG_CALL, rank_culprit(odd[0], node)) if is_ours else None
        if isinstance(error, PeerLost):
            return self._departure(error)
        is_ours = isinstance(error, ServiceError) and f"node {node}:" in error.message
        if is_ours and any(word in error.message for word in _NO_MEMORY):
            return Cause.OUT_OF_MEMORY, node_culprit(node)
        return None

    def _departure(self, error: PeerLost) -> tuple[Cause, Culprit] | None:
        """Return a rank that has left in order, though others still counted on it.

        All other losses are reported by those who see the processes, or by the group's leader.
        """
        lost: Mapping[str, str] = error.details.get("lost", {})
        nodes, ranks = error.details.get("nodes", ()), error.details.get("ranks", ())
        seats = self._group.current.record.seats
        is_reporter = bool(seats) and seats[0].node == self._group.node
        if not is_reporter or len(lost) != 1 or len(nodes) != 1 or len(ranks) != 1:
            return None
        ((session, how),) = lost.items()
        if how not in _IN_ORDER or session in self._departed:
            return None
        self._departed.add(session)
        return Cause.EXITED_RANK, rank_culprit(ranks[0], nodes[0])


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
