"""Control links as the orchestrator sees them: an agent's life, and what goes down to it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

from allfold_control.messages import BeatAnswered, Probe, Registered, dump
from allfold_core.protocol.traffic import Cap
from allfold_core.survival.term_record import Life, TermRecord

MAX_WAITING = 4096
"""Messages that an agent has not taken yet; one that lags further behind links anew."""

END_KNOWN_SECONDS = 15.0
"""Within so long agents know by themselves that a group is over, and have closed it."""

AnnouncedTerm = tuple[int, int, int]
"""Opening, number and generation of the term that an agent was told of."""


def life_is_over(how: str) -> str:
    """Return the news, also in answer to REGISTER, that the agent was evicted; ``how``: why."""
    return dump(Registered(is_evicted=True, how=how))


@dataclass(eq=False)
class Link:
    """One agent that is connected to this replica.

    Attributes:
        generation: of the store with which it registered on this link.
        groups: of the agent, with the terms that it was told of.
        ended: the agent's groups that are over, and when that was seen here (monotonic).
        asked_again: groups, and their openings, that it still held when they had long been over.
        recalled: groups, and generations of their record, for which it was asked to register again.
        limits: the caps that the agent was told last.
        is_over: the link is to be closed once everything in ``waiting`` is sent.
    """

    life: Life
    generation: int = 0
    groups: dict[str, AnnouncedTerm | None] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    asked_again: set[tuple[str, int]] = field(default_factory=set)
    recalled: set[tuple[str, int]] = field(default_factory=set)
    probes: set[str] = field(default_factory=set)
    limits: tuple[Cap, ...] | None = None
    is_over: bool = False
    waiting: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)

    def send(self, text: str) -> None:
        """Send a message soon, after those that wait already; nothing on a link that is over."""
        if self.is_over:
            return
        self.waiting.put_nowait(text)
        if self.waiting.qsize() > MAX_WAITING:
            self.close()

    def close(self) -> None:
        """Close the link after what waits."""
        if not self.is_over:
            self.is_over = True
            self.waiting.put_nowait(None)

    def _is_concerned(self, group: str, record: TermRecord) -> bool:
        return group in self.groups or record.has(self.life)

    def waits_for(self, group: str, record: TermRecord) -> bool:
        """Return True if the agent was told of no term of the group on this link."""
        return self._is_concerned(group, record) and self.groups.get(group) is None

    def is_due(self, group: str, record: TermRecord) -> bool:
        """Return True if the agent is to be told of this term; note that it is."""
        told = (record.opening, record.term.number, record.generation)
        if not self._is_concerned(group, record) or self.groups.get(group) == told:
            return False
        self.groups[group] = told
        self.ended.pop(group, None)
        if not record.has(self.life):
            self.drop(group)  # it is told that it is out, and no further term concerns it
        return True

    def drop(self, group: str) -> None:
        """Forget a group that is over, or goes on without the agent."""
        self.groups.pop(group, None)
        self.recalled = {each for each in self.recalled if each[0] != group}

    def group_ended(self, group: str, now: float) -> None:
        """Note that a group of the agent is over."""
        if group in self.groups:
            self.ended[group] = now
        self.drop(group)

    def holds_ended(self, held: Collection[tuple[str, int]], now: float) -> bool:
        """Return True, once, if the agent still holds a group whose end it must have missed.

        Normally it learns of the end from the other agents, or notices it itself.

        Args:
            held: names of groups, and their openings.
        """
        late = {group for group, at in self.ended.items() if now > at + END_KNOWN_SECONDS}
        for group in late:
            del self.ended[group]
        missed = {each for each in held if each[0] in late} - self.asked_again
        self.asked_again |= missed
        return bool(missed)

    def is_missed(self, group: str, record: TermRecord) -> bool:
        """Return True, once, if the record waits for the agent to register again.

        It may have done so before the group had a record that was recalled.
        """
        recall, key = record.recall, (group, record.generation)
        is_awaited = recall is not None and self.life[0] not in recall.registered
        if not is_awaited or not record.has(self.life) or key in self.recalled:
            return False
        self.recalled.add(key)
        return True

    def answer_beat(self, number: int, limits: tuple[Cap, ...] | None) -> None:
        """Answer a BEAT, and tell the agent the caps, where it does not know them yet."""
        answer = BeatAnswered(number=number)
        if limits != self.limits and limits is not None:
            self.limits = limits
            ours = [each.to_dict() for each in limits if each.node in ("", self.life[0])]
            answer = BeatAnswered(number=number, limits=ours)
        self.send(dump(answer))

    def ask(self) -> None:
        """Ask the agent for a sign of life, unless it owes one already."""
        if self.probes:
            return
        nonce = secrets.token_hex(8)
        self.probes.add(nonce)
        self.send(dump(Probe(nonce=nonce)))

    def end_life(self, how: str) -> None:
        """Tell the agent that its life is over, and how that is known, and close the link."""
        self.send(life_is_over(how))
        self.close()


class Connected(dict[Life, Link]):
    """The links of this replica by the life of their agent."""

    def send(self, life: Life, text: str) -> None:
        """Send a message to an agent, if it is linked here."""
        if life in self:
            self[life].send(text)
