"""Compare-and-set against other writers: attempts that lose are repeated until a deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import WatchError
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from allfold_core.errors import ServiceError
from allfold_orchestrator.store.failures import store_errors

Outcome = TypeVar("Outcome")

DEADLINE_SECONDS = 5.0
# Writers that lose again and again step back further, so that one of them gets through.
FIRST_PAUSE_SECONDS = 0.005
LONGEST_PAUSE_SECONDS = 0.2


async def until_undisputed(what: str, attempt: Callable[[], Awaitable[Outcome]]) -> Outcome:
    """Return the outcome of the first attempt in which nobody else wrote in between.

    Args:
        what: the record that is written, for the error, e.g. ``group train``.
        attempt: one transaction; raises ``WatchError`` if it lost.

    Raises:
        ServiceError: Redis does not answer, or every attempt of the last seconds lost.
    """
    attempts = AsyncRetrying(
        retry=retry_if_exception_type(WatchError),
        stop=stop_after_delay(DEADLINE_SECONDS),
        wait=wait_random_exponential(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS),
    )
    try:
        with store_errors():
            return await attempts(attempt)
    except RetryError:
        raise _too_busy(what) from None


def _too_busy(what: str) -> ServiceError:
    return ServiceError(
        f"{what} is changed by many orchestrators at once: no write succeeded for "
        f"{DEADLINE_SECONDS:g} s; try again",
        component="store",
        record=what,
        retry=True,
    )
