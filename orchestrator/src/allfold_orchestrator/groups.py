"""The groups in Redis: read through a cache, changed by compare-and-set.

Any number of replicas may change one group at once. A change is computed from the state that was
read, and written only if nobody else wrote in between (WATCH / MULTI / EXEC); otherwise it is
computed again. Events that arrive while a write is under way are written together by the next
one, so ten thousand joins at once cost far fewer than ten thousand writes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from redis.exceptions import WatchError

from allfold_core.errors import ServiceError
from allfold_orchestrator import keys
from allfold_orchestrator.failures import store_errors
from allfold_orchestrator.group_state import (
    Event,
    GroupState,
    Instruction,
    PlanReady,
    RanksDeparted,
    Seated,
    SeatsFreed,
)
from allfold_orchestrator.membership import step
from allfold_orchestrator.nodes import NodeRecord
from allfold_orchestrator.records import Snapshot, load, queue_write
from allfold_orchestrator.redis_client import Client, Commands

CONFLICT_DEADLINE_SECONDS = 5.0
CONFLICT_PAUSE_SECONDS = 0.01
MAX_BATCH = 512
MAX_CACHED_GROUPS = 1024
PRUNED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Guard:
    """Apply the event only while this life of the node is alive, or only when it is not."""

    node: str
    incarnation: str
    alive: bool = True

    def holds(self, record: NodeRecord | None) -> bool:
        is_alive = record is not None and record.is_alive_as(self.incarnation)
        return is_alive is self.alive


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    event: Event
    guard: Guard | None
    reply: asyncio.Future[tuple[Instruction, ...] | None]


@dataclass(slots=True)
class _Slot:
    """What this replica remembers of one group."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    pending: list[_Request] = field(default_factory=list)
    snapshot: Snapshot | None = None
    checked_at: float = float("-inf")
    announcements: int = 0


@dataclass(slots=True)
class _Write:
    """The outcome of a batch, before it is written."""

    state: GroupState
    replies: list[tuple[Instruction, ...] | None]

    @property
    def wakes(self) -> bool:
        """Whether somebody may wait for this. A join that completes nothing wakes nobody."""
        return self._has(PlanReady) or self.frees

    @property
    def frees(self) -> bool:
        """Whether a seat was given up."""
        return self._has(SeatsFreed) or self._has(RanksDeparted)

    def _has(self, kind: type[Instruction]) -> bool:
        return any(
            isinstance(instruction, kind) for reply in self.replies for instruction in reply or ()
        )


class GroupStore:
    """All groups, as this replica sees them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._slots: dict[str, _Slot] = {}

    async def names(self) -> list[str]:
        """The groups that have a record."""
        with store_errors():
            return sorted(await self._client.smembers(keys.GROUPS))

    async def read(self, group: str, max_age: float = 0.0) -> GroupState:
        """The group's state, at most ``max_age`` seconds old."""
        slot = self._slot(group)
        async with slot.lock:
            if slot.snapshot is None or monotonic() - slot.checked_at > max_age:
                with store_errors():
                    return (await self._load(self._client, group, slot)).state
            return slot.snapshot.state

    def invalidate(self, group: str) -> None:
        """Another replica changed the group: look before answering."""
        if group in self._slots:
            self._slots[group].announcements += 1
            self._slots[group].checked_at = float("-inf")

    async def prune(self, group: str) -> None:
        """Take a group without a record off the list, unless it is made anew right now."""
        with store_errors(), suppress(WatchError):
            async with self._client.pipeline(transaction=True) as pipe:
                await pipe.watch(keys.group(group))
                if await pipe.hget(keys.group(group), "version") is None:
                    pipe.multi()
                    pipe.srem(keys.GROUPS, group)
                    await pipe.execute()

    async def prune_some(self) -> None:
        """Look at a few names at random; called now and then it keeps the list short."""
        with store_errors():
            names = await self._client.srandmember(keys.GROUPS, PRUNED_AT_ONCE)
        for name in names:
            await self.prune(name)

    async def submit(
        self, group: str, event: Event, guard: Guard | None = None
    ) -> tuple[Instruction, ...] | None:
        """Apply an event; ``None`` if its guard did not hold.

        Raises:
            ServiceError: Redis did not answer, or others kept changing the group for too long.
        """
        slot = self._slot(group)
        request = _Request(event, guard, asyncio.get_running_loop().create_future())
        slot.pending.append(request)
        try:
            async with slot.lock:
                while not request.reply.done():
                    await self._write_pending(group, slot)
            return await request.reply
        finally:
            if request in slot.pending:  # the caller gave up before its turn came
                slot.pending.remove(request)

    # Inside the slot's lock

    async def _write_pending(self, group: str, slot: _Slot) -> None:
        """Write what has piled up, oldest first."""
        batch, slot.pending = slot.pending[:MAX_BATCH], slot.pending[MAX_BATCH:]
        try:
            write = await self._write(group, slot, batch)
        except BaseException as error:
            slot.snapshot = None
            _fail(batch, error)
            if not isinstance(error, Exception):
                raise
            return
        for request, reply in zip(batch, write.replies, strict=True):
            if not request.reply.done():
                request.reply.set_result(reply)

    async def _write(self, group: str, slot: _Slot, batch: Sequence[_Request]) -> _Write:
        deadline = monotonic() + CONFLICT_DEADLINE_SECONDS
        with store_errors():
            while True:
                try:
                    return await self._try_write(group, slot, batch)
                except WatchError:
                    if monotonic() > deadline:
                        raise _too_busy(group) from None
                await asyncio.sleep(random.uniform(0, CONFLICT_PAUSE_SECONDS))

    async def _try_write(self, group: str, slot: _Slot, batch: Sequence[_Request]) -> _Write:
        guards = sorted({request.guard.node for request in batch if request.guard})
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.group(group), *(keys.node(name) for name in guards))
            old = await self._load(pipe, group, slot)
            texts = await pipe.mget([keys.node(name) for name in guards]) if guards else []
            nodes = {
                name: NodeRecord.from_json(text) if text else None
                for name, text in zip(guards, texts, strict=True)
            }
            write = _apply(old.state, batch, nodes)
            if write.state is not old.state:
                pipe.multi()
                snapshot = queue_write(pipe, old, write.state)
                for life in _lives_seated(batch, write.replies):
                    pipe.sadd(keys.groups_of(life), group)
                if write.frees:
                    for life in _lives(old.state) - _lives(write.state):
                        pipe.srem(keys.groups_of(life), group)
                if write.wakes:
                    pipe.publish(keys.CHANGES, group)
                await pipe.execute()
                slot.snapshot, slot.checked_at = snapshot, monotonic()
            return write

    async def _load(self, source: Commands, group: str, slot: _Slot) -> Snapshot:
        """Bring the slot up to date."""
        announcements = slot.announcements
        slot.snapshot = await load(source, group, slot.snapshot)
        # What was announced while we read is not in what we read.
        slot.checked_at = monotonic() if slot.announcements == announcements else float("-inf")
        return slot.snapshot

    def _slot(self, group: str) -> _Slot:
        slot = self._slots.get(group)
        if slot is None:
            self._forget_some()
            slot = self._slots[group] = _Slot()
        return slot

    def _forget_some(self) -> None:
        if len(self._slots) >= MAX_CACHED_GROUPS:
            unused = [n for n, s in self._slots.items() if not s.lock.locked() and not s.pending]
            for name in unused[: MAX_CACHED_GROUPS // 4]:
                del self._slots[name]


def _apply(
    state: GroupState, batch: Sequence[_Request], nodes: dict[str, NodeRecord | None]
) -> _Write:
    write = _Write(state, [])
    for request in batch:
        guard = request.guard
        if guard is not None and not guard.holds(nodes[guard.node]):
            write.replies.append(None)
            continue
        write.state, instructions = step(write.state, request.event)
        write.replies.append(instructions)
    return write


def _lives_seated(
    batch: Sequence[_Request], replies: Sequence[tuple[Instruction, ...] | None]
) -> set[str]:
    return {
        keys.life(request.guard.node, request.guard.incarnation)
        for request, reply in zip(batch, replies, strict=True)
        if request.guard and any(isinstance(instruction, Seated) for instruction in reply or ())
    }


def _lives(state: GroupState) -> set[str]:
    """The lives of nodes through which somebody sits in the group."""
    seats = list(state.forming.seats.values()) if state.forming else []
    for epoch in state.epochs:
        seats += [seat for rank, seat in epoch.seats.items() if rank not in epoch.departed]
    return {keys.life(seat.node.node, seat.node.incarnation) for seat in seats}


def _fail(batch: Sequence[_Request], error: BaseException) -> None:
    """Everybody in the batch hears of the failure; they are told apart by their own requests."""
    reported = error if isinstance(error, Exception) else _interrupted()
    for request in batch:
        if not request.reply.done():
            request.reply.set_exception(reported)
            request.reply.exception()  # seen, even if the caller was the one who was interrupted


def _too_busy(group: str) -> ServiceError:
    return ServiceError(
        f"group {group} is changed by many orchestrators at once, no write succeeded for "
        f"{CONFLICT_DEADLINE_SECONDS:g} s; try again",
        component="store",
        group=group,
        retry=True,
    )


def _interrupted() -> ServiceError:
    return ServiceError(
        "the orchestrator was interrupted while it wrote; try again", component="store", retry=True
    )
