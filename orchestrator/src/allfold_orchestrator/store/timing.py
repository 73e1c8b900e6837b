"""Durations and failures of commands to Redis."""

from __future__ import annotations

from collections.abc import Awaitable
from time import perf_counter
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, WatchError

from allfold_service.metrics import Histogram

T = TypeVar("T")

_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class CommandTimes:
    """The times of the commands of one client.

    Attributes:
        seconds: of each, or of each batch that went out together; with the wait for a connection.
        failures: how many had no answer, or an error. A lost race is none.
    """

    def __init__(self) -> None:
        self.seconds = Histogram(_BOUNDS)
        self.failures = 0

    async def of(self, command: Awaitable[T]) -> T:
        """Await a command, and note how long it took."""
        began = perf_counter()
        try:
            return await command
        except WatchError:
            raise
        except (RedisError, OSError):
            self.failures += 1
            raise
        finally:
            self.seconds.note(perf_counter() - began)


class TimedRedis(Redis):
    """A client whose commands are timed, also those of its pipelines."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.times = CommandTimes()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        command = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        return await self.times.of(command)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        pool, callbacks = self.connection_pool, self.response_callbacks
        return _TimedPipeline(self.times, pool, callbacks, transaction, shard_hint)


class _TimedPipeline(Pipeline):
    def __init__(self, times: CommandTimes, *args: Any) -> None:
        super().__init__(*args)
        self._times = times

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        return await self._times.of(super().execute(raise_on_error))

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        command = super().immediate_execute_command(*args, **options)  # type: ignore[no-untyped-call]
        return await self._times.of(command)
