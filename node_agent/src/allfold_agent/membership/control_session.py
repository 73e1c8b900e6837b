"""One control link: its due times, and the terms that count on it. Pure; time is an argument."""

from __future__ import annotations

from collections import deque

# As many unanswered BEATs as this, and the orchestrator is taken for dead or frozen.
MOST_UNANSWERED = 3
# Other nodes are pinged every 0.1 s: by then the age of one that lives is a fresh one.
EXTRA_BEAT_SECONDS = 0.2
REGISTER_SECONDS = 5.0

_NEVER = float("inf")


class Session:
    """One connection to the orchestrator: its registrations and its BEATs.

    Registering is a promise to take no term that an earlier generation of the store has announced.
    So a term only counts if no registration waits for an answer, and if the term was announced in
    the generation that the last answer named.

    Attributes:
        generation: of the store with which the agent has registered last, here or elsewhere.
        number: of the last BEAT.
        due: when there is something to do: to send a BEAT, unless :meth:`is_silent`.
    """

    def __init__(self, generation: int, beat_seconds: float) -> None:
        self.generation = generation
        self.number = 0
        self._beat_seconds = beat_seconds
        self._pending = 0
        self._answer_due = _NEVER
        self._beat_due = _NEVER
        self._extra_due = _NEVER
        self._unanswered: deque[int] = deque()

    @property
    def due(self) -> float:
        return min(self._answer_due, self._beat_due, self._extra_due)

    @property
    def is_registered(self) -> bool:
        """True while no registration waits for its answer."""
        return self._pending == 0

    def registers(self, now: float) -> None:
        """Note that REGISTER is sent."""
        self._pending += 1
        self._answer_due = min(self._answer_due, now + REGISTER_SECONDS)

    def registered(self, generation: int, now: float) -> None:
        """Note the answer to a REGISTER; with the first one, BEATs begin."""
        self._pending = max(0, self._pending - 1)
        self.generation = generation
        self._answer_due = now + REGISTER_SECONDS if self._pending else _NEVER
        if self._beat_due == _NEVER:
            self._beat_due = now

    def takes_term_of(self, generation: int) -> bool:
        """Return True if a term that was announced in this generation counts."""
        return self.is_registered and generation == self.generation

    def beat(self, now: float) -> int:
        """Note that a BEAT is sent, and return its number."""
        self.number += 1
        if now >= self._beat_due:
            self._beat_due = now + self._beat_seconds
            self._unanswered.append(self.number)
        if now >= self._extra_due:
            self._extra_due = _NEVER
        return self.number

    def answered(self, number: int) -> None:
        """Note the answer to a BEAT."""
        while self._unanswered and self._unanswered[0] <= number:
            self._unanswered.popleft()

    def wants_extra_beat(self, now: float) -> None:
        """Have a BEAT sent as soon as another node had the time to answer a ping."""
        self._extra_due = min(self._extra_due, now + EXTRA_BEAT_SECONDS)

    def is_silent(self, now: float) -> bool:
        """Return True if the orchestrator owes answers for too long."""
        return now >= self._answer_due or (
            now >= self._beat_due and len(self._unanswered) >= MOST_UNANSWERED
        )
