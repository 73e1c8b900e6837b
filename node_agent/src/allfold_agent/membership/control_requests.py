"""Requests on the control link, and who waits for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from allfold_agent.membership.control_messages import Answer
from allfold_core.errors import ServiceError

Pack = Callable[[int], str]
"""Makes the message of a request with its number, whenever it is sent."""


class ControlRequests:
    """The requests that have no answer yet. They outlive a link: the next one carries them again.

    So only what can be repeated is asked here.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._open: dict[int, tuple[Pack, asyncio.Future[Answer]]] = {}

    def begin(self, pack: Pack) -> tuple[int, asyncio.Future[Answer]]:
        """Return the number of a new request, and its answer to be."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = pack, answer
        return number, answer

    def end(self, number: int) -> None:
        """Forget a request that has its answer, or for which nobody waits any more."""
        self._open.pop(number, None)

    def messages(self) -> list[str]:
        """Return the messages of all requests, for a new link."""
        return [pack(number) for number, (pack, _) in self._open.items()]

    def answered(self, answer: Answer) -> None:
        """Hand an answer out."""
        for number in answer.numbers:
            if number in self._open and not self._open[number][1].done():
                self._open[number][1].set_result(answer)

    def fail(self, error: ServiceError) -> None:
        """Fail all requests: there will be no link any more."""
        for _, answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)
