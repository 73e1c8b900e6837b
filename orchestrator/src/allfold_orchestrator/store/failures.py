"""The seam at which failures of Redis become errors of Allfold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError, ResponseError, WatchError

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
