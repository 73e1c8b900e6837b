"""The pings to one peer, and how long it took to answer them."""

from __future__ import annotations

from allfold_core.survival.suspicion import PONG_WINDOW_SECONDS, RecentMaximum

# Answers to older ones are not measured.
_REMEMBERED = 100


class Pings:
    """Numbers the pings to one peer, over all connections to it.

    Attributes:
        last_delay: the seconds to the answer that came last; ``None`` since a connection began.
    """

    def __init__(self) -> None:
        self.last_delay: float | None = None
        self._last = 0
        self._answered = 0
        self._sent: dict[int, float] = {}
        self._delays = RecentMaximum(PONG_WINDOW_SECONDS)

    @property
    def unanswered(self) -> int:
        """The pings that were due since the last one that was answered, sent or not."""
        return self._last - self._answered

    def next(self, now: float) -> int:
        """Return the number of the ping that is due now."""
        self._last += 1
        self._sent[self._last] = now
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return self._last

    def note_answer(self, number: int, now: float) -> None:
        """Note the answer to a ping; any that was never sent is ignored."""
        sent = self._sent.pop(number, None)
        if sent is not None:
            self._answered = max(self._answered, number)
            self.last_delay = now - sent
            self._delays.note(now, self.last_delay)

    def begin_anew(self) -> None:
        """Expect no answer to what went out on an earlier connection."""
        self._answered = self._last
        self._sent.clear()
        self.last_delay = None

    def worst_delay(self, now: float) -> float:
        """Return the longest time to an answer of late."""
        return self._delays.at(now)
