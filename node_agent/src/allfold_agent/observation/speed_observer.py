"""Slow ranks: each node tells the leader how long its ranks take between ops; the leader judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allfold_agent.groups.group import NodeGroup
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.processes import look_at
from allfold_agent.observation.samples import GroupSampler
from allfold_core.diagnosis.processes import ProcessLook, starved_share
from allfold_core.diagnosis.stragglers import OwnTime, Straggler, StragglerWatch
from allfold_core.incident import Cause, Effect, Incident, rank_culprit
from allfold_core.protocol.peer_link import LinkMessageType

WINDOW_SECONDS = 0.5
# More nodes than this say less often what they see, as one node hears all of it.
_NODES_AT_ONCE = 50


class SpeedObserver:
    """Watches the own times of the ranks of one group.

    Args:
        now: monotonic.
    """

    def __init__(
        self, group: NodeGroup, incidents: Incidents, sampler: GroupSampler, now: float
    ) -> None:
        self._group = group
        self._incidents = incidents
        self._sampler = sampler
        self._watch = StragglerWatch()
        self._next = now + WINDOW_SECONDS
        self._looks: dict[int, ProcessLook] = {}
        self._heard: dict[str, tuple[dict[int, OwnTime], float]] = {}
        self._named: int | None = None
        self._epoch = group.current.ordinal

    @property
    def _window(self) -> float:
        return WINDOW_SECONDS * max(1.0, len(self._group.agreement.term.voters) / _NODES_AT_ONCE)

    def hear(self, node: str, body: Mapping[str, Any], now: float) -> None:
        """Take in the own times of another node's ranks."""
        times = {
            int(rank): OwnTime(int(ops), float(seconds), float(window), float(starved))
            for rank, (ops, seconds, window, starved) in body.items()
        }
        self._heard[node] = times, now

    def look(self, now: float, wall: float, pids: Mapping[str, int]) -> None:
        """Complete a window if it is over: tell the leader, or judge as the leader."""
        if now < self._next:
            return
        self._next = now + self._window
        group = self._group
        self._note_epoch()
        times = self._with_starvation(self._sampler.take_window(now), pids)
        leader = group.agreement.term.leader
        if leader == group.node:
            self._judge(times, now, wall)
            return
        self._end()
        if times:
            body = {
                str(rank): [each.ops, each.seconds, each.window, each.starved]
                for rank, each in times.items()
            }
            group.send(leader, LinkMessageType.OBSERVED, {"own": body})

    def _note_epoch(self) -> None:
        """Begin anew where ranks have other numbers: what was measured is not theirs."""
        epoch = self._group.current.ordinal
        if epoch != self._epoch:
            self._epoch = epoch
            self._watch, self._looks = StragglerWatch(), {}
            self._heard.clear()
            self._end()

    def _with_starvation(
        self, times: dict[int, OwnTime], pids: Mapping[str, int]
    ) -> dict[int, OwnTime]:
        sessions = self._group.current.plan.sessions
        before, self._looks = self._looks, {}
        for rank in self._group.current.ranks:
            if rank < len(sessions) and (pid := pids.get(sessions[rank])):
                self._looks[rank] = look_at(pid)
        return {
            rank: OwnTime(
                each.ops,
                each.seconds,
                each.window,
                starved_share(before[rank], self._looks[rank])
                if rank in before and rank in self._looks
                else 0.0,
            )
            for rank, each in times.items()
        }

    # As the leader

    def _judge(self, times: dict[int, OwnTime], now: float, wall: float) -> None:
        for node, (others, heard) in list(self._heard.items()):
            if now - heard > 2 * self._window:
                del self._heard[node]
            else:
                times |= others
        straggler = self._watch.judge(times)
        seats = self._group.current.record.seats
        if straggler is None or straggler.rank >= len(seats):
            self._end()
            return
        if self._named not in (None, straggler.rank):
            self._end()
        self._named = straggler.rank
        self._open(straggler, seats[straggler.rank].node, wall)

    def _open(self, straggler: Straggler, node: str, wall: float) -> None:
        group = self._group
        self._incidents.open(
            self._key,
            Incident(
                "",
                Cause.STARVED_RANK if straggler.is_starved else Cause.SLOW_RANK,
                Effect.SLOW,
                rank_culprit(straggler.rank, node),
                f"rank {straggler.rank} of group '{group.name}' on node {node} {straggler.phrase}",
                group.name,
                group.opening,
                began=wall - 2 * self._window,
                evidence={"own": straggler.own, "others": straggler.others},
            ),
        )

    def _end(self) -> None:
        if self._named is not None:
            self._named = None
            self._incidents.end(self._key)

    @property
    def _key(self) -> tuple[str, int, str]:
        return self._group.name, self._group.opening, "slow"
