"""The keys of a Redis, and the commands on them that the orchestrator uses."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any


class Tables:
    """The keys of a database, and the commands on them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[str, Any] = {}
        self._until: dict[str, float] = {}
        self._changes: defaultdict[str, int] = defaultdict(int)
        self._rng = random.Random(1)
        self.on_hset: Callable[[Mapping[str, str], Mapping[str, str]], None] = lambda *_: None
        self.on_publish: Callable[[str], int] = lambda _: 0

    def snapshot(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Return everything as it is now."""
        return copy.deepcopy(self._values), dict(self._until)

    def go_back(self, to: tuple[dict[str, Any], dict[str, float]]) -> None:
        """Have everything be as it was."""
        for key in self._values.keys() | to[0].keys():
            self._changes[key] += 1
        self._values, self._until = copy.deepcopy(to[0]), dict(to[1])

    def version(self, key: str) -> int:
        """Return a number that grows with each change of a key."""
        self._look(key)
        return self._changes[key]

    def _look(self, key: str) -> Any:
        """Return the value of a key, or ``None``."""
        until = self._until.get(key)
        if until is not None and until <= self._clock():
            self._remove(key)
        return self._values.get(key)

    def _remove(self, key: str) -> bool:
        self._until.pop(key, None)
        if self._values.pop(key, None) is None:
            return False
        self._changes[key] += 1
        return True

    def _change(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the value of a key to be changed; makes it if need be."""
        value = self._look(key)
        if value is None:
            value = self._values[key] = make()
        self._changes[key] += 1
        return value

    def _clean(self, key: str) -> None:
        if not self._values.get(key):
            self._remove(key)

    # Strings and keys

    def ping(self) -> bool:
        return True

    def get(self, name: str) -> str | None:
        value = self._look(name)
        assert value is None or isinstance(value, str)
        return value

    def mget(self, keys: Sequence[str]) -> list[str | None]:
        return [self.get(key) for key in keys]

    def set(
        self, name: str, value: str, ex: int | None = None, px: int | None = None, nx: bool = False
    ) -> bool | None:
        if nx and self._look(name) is not None:
            return None
        self._values[name] = value
        self._changes[name] += 1
        self._until.pop(name, None)
        if ex is not None or px is not None:
            self._until[name] = self._clock() + (ex or 0) + (px or 0) / 1000
        return True

    def delete(self, *names: str) -> int:
        return sum(self._look(name) is not None and self._remove(name) for name in names)

    def expire(self, name: str, time: int) -> bool:
        if self._look(name) is None:
            return False
        self._until[name] = self._clock() + time
        return True

    def persist(self, name: str) -> bool:
        return self._look(name) is not None and self._until.pop(name, None) is not None

    # Hashes

    def hget(self, name: str, key: str) -> str | None:
        found: str | None = (self._look(name) or {}).get(key)
        return found

    def hgetall(self, name: str) -> dict[str, str]:
        return dict(self._look(name) or {})

    def hset(
        self,
        name: str,
        key: str | None = None,
        value: str | None = None,
        mapping: Mapping[str, str] | None = None,
    ) -> int:
        table = self._change(name, dict)
        fields = dict(mapping or {})
        if key is not None and value is not None:
            fields[key] = value
        new = len(fields.keys() - table.keys())
        self.on_hset(table, fields)
        table.update(fields)
        return new

    def hmget(self, name: str, keys: Sequence[str]) -> list[str | None]:
        table = self._look(name) or {}
        return [table.get(key) for key in keys]

    def hdel(self, name: str, *keys: str) -> int:
        if not self._look(name):
            return 0
        table = self._change(name, dict)
        gone = [table.pop(key) for key in keys if key in table]
        self._clean(name)
        return len(gone)

    # Lists

    def lpush(self, name: str, *values: str) -> int:
        items = self._change(name, list)
        for value in values:
            items.insert(0, value)
        return len(items)

    def lrange(self, name: str, start: int, end: int) -> list[str]:
        return _part(self._look(name) or [], start, end)

    def ltrim(self, name: str, start: int, end: int) -> bool:
        if self._look(name):
            items = self._change(name, list)
            items[:] = _part(items, start, end)
            self._clean(name)
        return True

    # Sets

    def sadd(self, name: str, *values: str) -> int:
        members = self._change(name, dict)
        before = len(members)
        members.update(dict.fromkeys(values))
        return len(members) - before

    def srem(self, name: str, *values: str) -> int:
        if not self._look(name):
            return 0
        members = self._change(name, dict)
        before = len(members)
        for value in values:
            members.pop(value, None)
        gone = before - len(members)
        self._clean(name)
        return gone

    def smembers(self, name: str) -> AbstractSet[str]:
        return frozenset(self._look(name) or ())

    def srandmember(self, name: str, number: int) -> list[str]:
        members = sorted(self._look(name) or ())
        return self._rng.sample(members, min(number, len(members)))

    # Sorted sets

    def zadd(self, name: str, mapping: Mapping[str, float], xx: bool = False) -> int:
        if xx and not self._look(name):
            return 0
        scores = self._change(name, dict)
        before = len(scores)
        scores.update({k: float(v) for k, v in mapping.items() if not xx or k in scores})
        return len(scores) - before

    def zrem(self, name: str, *values: str) -> int:
        return self.srem(name, *values)

    def zscore(self, name: str, value: str) -> float | None:
        found: float | None = (self._look(name) or {}).get(value)
        return found

    def zmscore(self, key: str, members: list[str]) -> list[float | None]:
        return [self.zscore(key, member) for member in members]

    def _sorted(self, name: str) -> list[tuple[str, float]]:
        return sorted((self._look(name) or {}).items(), key=lambda each: (each[1], each[0]))

    def zrange(self, name: str, start: int, end: int, *, withscores: bool = False) -> list[Any]:
        found = _part(self._sorted(name), start, end)
        return found if withscores else [member for member, _ in found]

    def zrangebyscore(self, name: str, min: float | str, max: float | str) -> list[str]:
        low, above = _bound(min)
        high, below = _bound(max)
        return [
            member
            for member, score in self._sorted(name)
            if (low < score or (low == score and not above))
            and (score < high or (score == high and not below))
        ]

    def publish(self, channel: str, message: str) -> int:
        return self.on_publish(message)


def _part(items: list[Any], start: int, end: int) -> list[Any]:
    """Return the items from one place to another, as Redis counts: the last one is included."""
    start = max(0, start + len(items)) if start < 0 else start
    end = end + len(items) if end < 0 else end
    return items[start : end + 1]


def _bound(text: float | str) -> tuple[float, bool]:
    """Return a score, and whether it is excluded."""
    is_open = isinstance(text, str) and text.startswith("(")
    return float(text[1:] if isinstance(text, str) and is_open else text), is_open
