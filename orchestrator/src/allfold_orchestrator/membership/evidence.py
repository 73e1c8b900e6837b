"""The signs of life of nodes that one replica knows of: the evidence its failure detector goes by.

Pure: the time comes as an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from allfold_core.survival.term_record import Life

LATELY_SECONDS = 1.0
"""A member that has heard a node within this time is a witness that it lives."""
PROMPT_SECONDS = 0.1
"""A node whose thread for the links lags no more than this is not itself why they are silent."""

_NEVER = float("-inf")


class Evidence:
    """The signs of life of all nodes that this replica knows of."""

    def __init__(self) -> None:
        self._reached: set[Life] = set()
        self._answered: dict[Life, float] = {}  # when it did, to whichever replica
        self._prompt: dict[Life, float] = {}  # when it answered without delay
        self._told: dict[Life, float] = {}  # when it said whom it hears
        self._heard: dict[Life, dict[Life, float]] = {}  # when it heard each of them
        self._late: dict[Life, float] = {}  # how late it was to read

    @property
    def lives(self) -> set[Life]:
        """All lives of which anything is noted."""
        return self._reached | self._answered.keys() | self._told.keys()

    def reached(self, life: Life) -> None:
        """Note that this replica has dialled the node, and that it answered."""
        self._reached.add(life)

    def was_reached(self, life: Life) -> bool:
        """Return True if a refusal of the node says something, as it was reached before."""
        return life in self._reached

    def answered(self, now: float, life: Life, lag: float) -> None:
        """Note an answer of a node whose thread for the links is late by ``lag``."""
        self._answered[life] = now
        if lag < PROMPT_SECONDS:
            self._prompt[life] = now

    def unlinked(self, life: Life) -> None:
        """Note that a node can answer no more: what came last may have been under way for long."""
        self._answered.pop(life, None)
        self._prompt.pop(life, None)

    def told(
        self, now: float, member: Life, ages: Mapping[Life, float], lag: float
    ) -> dict[Life, float]:
        """Note how long ago a member heard the others; return when that was.

        Args:
            lag: how late it is to read: a node that was stopped reads then what others have said
                long before.
        """
        self._told[member], self._late[member] = now, lag
        self._heard[member] = heard = {life: now - age for life, age in ages.items()}
        return heard

    def forget(self, life: Life) -> None:
        """Drop all that was said by and of a life, but not that it was reached."""
        for table in (self._answered, self._prompt, self._told, self._heard, self._late):
            table.pop(life, None)
        for heard in self._heard.values():
            heard.pop(life, None)

    def over(self, life: Life) -> None:
        """Drop all that is known of a life."""
        self.forget(life)
        self._reached.discard(life)

    def is_missed(self, now: float, life: Life) -> bool:
        """Return True if there are members who would hear the node, and none of them does."""
        ages = [
            now - heard[life]
            for member, heard in self._heard.items()
            if life in heard and self._has_told_lately(now, member)
        ]
        return bool(ages) and min(ages) > LATELY_SECONDS

    def both_live(self, now: float, reporter: Life, suspected: Life, since: float) -> bool:
        """Return True if both ends of a link live, so that their silence is the link's.

        A node that died just before it was suspected was heard lately, too: so it has to have given
        a sign of life ``since``.
        """
        heard = max((self._prompt.get(suspected, _NEVER), *self._times_heard(suspected)))
        last = max(heard, self._answered.get(suspected, _NEVER))
        return (
            self._has_told_lately(now, reporter) and now - heard <= LATELY_SECONDS and last > since
        )

    def has_heard_nothing(
        self, reporter: Life, suspected: Life, since: float, until: float
    ) -> bool:
        """Return True if a reporter has said after ``until`` that it heard nothing ``since``."""
        heard = self._heard.get(reporter, {}).get(suspected, _NEVER)
        return self._told.get(reporter, _NEVER) >= until and heard <= since

    def _has_told_lately(self, now: float, member: Life) -> bool:
        return now - self._told.get(member, _NEVER) <= LATELY_SECONDS

    def _times_heard(self, life: Life) -> Iterator[float]:
        """The earliest moments at which members can have heard a node."""
        for member, heard in self._heard.items():
            if life in heard:
                yield heard[life] - self._late[member]
