"""Failures of the store: one error for all of Redis's, and conflicts, which are tried again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from redis.exceptions import RedisError, ResponseError, WatchError
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from allfold_core.errors import AllfoldError, ServiceError

# No memory left, a replica that is not the primary, a disk that is full, too few replicas.
_REFUSED_WRITES = ("OOM ", "used memory > 'maxmemory'", "READONLY ", "MISCONF ", "NOREPLICAS ")


class Refusal(Exception):
    """An error of the contract, with the HTTP status that says more than the error's own one."""

    def __init__(self, status: int, error: AllfoldError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn exceptions of Redis into ``ServiceError``. Lost races pass: they are retried."""
    try:
        yield
    except WatchError:
        raise
    except ResponseError as cause:
        if not str(cause).startswith("WRONGTYPE"):
            raise store_unavailable(cause) from cause
        raise _wrong_type(cause) from cause
    except (RedisError, OSError, TimeoutError) as cause:
        raise store_unavailable(cause) from cause


def store_unavailable(cause: BaseException) -> ServiceError:
    """Return the error for callers while Redis does not answer, or takes no writes."""
    refuses_writes = any(word in str(cause) for word in _REFUSED_WRITES)
    problem = "cannot write to" if refuses_writes else "cannot reach"
    return ServiceError(
        f"the orchestrator {problem} its state store ({_describe(cause)}); running jobs are "
        "not affected; agents and clients retry until their own deadline",
        component="store",
        cause=_describe(cause),
        refuses_writes=refuses_writes,
        retry=True,
    )


def _wrong_type(cause: ResponseError) -> ServiceError:
    return ServiceError(
        f"a key of the orchestrator in Redis holds another kind of value than it should ({cause}): "
        "it was changed from outside; delete it",
        component="store",
        unreadable=True,
        retry=False,
    )


def _describe(cause: BaseException) -> str:
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


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
