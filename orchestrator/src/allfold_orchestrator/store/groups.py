"""Groups in Redis: read through a cache, changed by compare-and-set.

Any number of replicas may change one group at once. A change is computed from the state that was
read, and written only if nobody else wrote in between (WATCH / MULTI / EXEC); otherwise it is
computed again. Events that arrive while a write is under way are written together by the next
one, so ten thousand joins at once cost far fewer than ten thousand writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from redis.exceptions import WatchError

from allfold_core.errors import ServiceError
from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.admission import TokenLimit, refusal
from allfold_orchestrator.membership.group_state import (
    AgentRegistered,
    AgentRegisters,
    Event,
    Formation,
    GroupState,
    Instruction,
    NodesLost,
    Opening,
    PlanReady,
    RanksDeparted,
    Rejected,
    Seated,
    SeatsFreed,
)
from allfold_orchestrator.membership.joining import Finders
from allfold_orchestrator.membership.membership import step
from allfold_orchestrator.membership.nodes import NodeRecord
from allfold_orchestrator.store import keys
from allfold_orchestrator.store.batching import Batches
from allfold_orchestrator.store.failures import store_errors, until_undisputed
from allfold_orchestrator.store.life import Clock
from allfold_orchestrator.store.limits import token_limits
from allfold_orchestrator.store.records import Snapshot, load, queue_write, readable
from allfold_orchestrator.store.redis_client import Client, Commands

log = logging.getLogger(__name__)

MAX_CACHED_GROUPS = 1024
PRUNED_AT_ONCE = 16


EventOf = Callable[[NodeRecord], Event]
"""An event that is made from what the node registered, read in the same transaction."""


@dataclass(frozen=True, slots=True)
class _Request:
    """An event, and the life of a node without which it is void."""

    event: Event | EventOf
    life: Life | None

    @property
    def nodes(self) -> set[str]:
        """The nodes on whose records the event depends."""
        names = {self.life[0]} if self.life else set()
        if isinstance(self.event, NodesLost):
            names |= {name for name, _ in self.event.lives}
        return names


_Reply = tuple[Instruction, ...] | None


@dataclass(slots=True)
class _Slot:
    """This replica's cache of one group, and its queue of events."""

    lock: asyncio.Lock
    batches: Batches[_Request, _Reply]
    finders: Finders = field(default_factory=Finders)
    snapshot: Snapshot | None = None
    checked_at: float = float("-inf")
    announcements: int = 0

    @property
    def busy(self) -> bool:
        """True while it is in use and must stay in the cache."""
        return self.lock.locked() or self.batches.waiting > 0


@dataclass(slots=True)
class _Write:
    """The outcome of a batch, before it is written."""

    state: GroupState
    replies: list[_Reply] = field(default_factory=list)
    seated: set[Life] = field(default_factory=set)
    freed: set[Life] = field(default_factory=set)
    others: Mapping[str, TokenLimit] = field(default_factory=dict)
    completes: bool = False
    new_term: bool = False

    @property
    def wakes(self) -> bool:
        """True if waiters must look again. A join that completes nothing wakes nobody."""
        return self.completes or bool(self.freed) or self.new_term

    def apply(self, request: _Request, nodes: Mapping[str, NodeRecord | None]) -> None:
        """Apply the next event of the batch."""
        event, life = request.event, request.life
        record = nodes[life[0]] if life else None
        if life is not None and not (record and record.is_alive_as(life[1])):
            self.replies.append(None)
            return
        if callable(event):
            assert record is not None, "an event is made from the node whose life it depends on"
            event = event(record)
        if isinstance(event, NodesLost):
            event = _without_living(event, nodes)
        before = self.state
        self.state, instructions = step(before, event)
        if (error := refusal(before, self.state, self.others)) is not None:
            self.state, instructions = before, (Rejected(error),)
        if self.state.term is not before.term:
            self.new_term = True
            self.freed |= _voters(before) - _voters(self.state)
        self.replies.append(instructions)
        for instruction in instructions:
            match instruction:
                case Seated() if life is not None:
                    self.seated.add(life)
                case SeatsFreed(ranks=ranks):
                    self.freed |= _lives_of(before.forming, ranks)
                case RanksDeparted(ranks=ranks):
                    self.freed |= _lives_of(before.current, ranks)
                case PlanReady():
                    self.completes = True
                case AgentRegistered(is_out=False) if isinstance(event, AgentRegisters):
                    self.seated.add(event.life)


class GroupStore:
    """All groups, as this replica sees them."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._slots: dict[str, _Slot] = {}
        self._unreadable: set[str] = set()  # of which it has been logged

    async def names(self) -> list[str]:
        """Return the sorted names of the groups that have a record."""
        with store_errors():
            return sorted(await self._client.smembers(keys.GROUPS))

    async def read(self, group: str, max_age: float = 0.0) -> GroupState:
        """Return the group's state, at most ``max_age`` seconds old.

        Raises:
            ServiceError: Redis does not answer, or the record cannot be read.
        """
        slot = self._slot(group)
        async with slot.lock:
            if slot.snapshot is None or monotonic() - slot.checked_at > max_age:
                with store_errors():
                    return (await self._load(self._client, group, slot)).state
            return slot.snapshot.state

    async def read_if_possible(self, group: str) -> GroupState | None:
        """Return the group's state; ``None``, which is logged once, if its record is unreadable.

        One record that is damaged, or of a newer version, must not stop the work on other groups.

        Raises:
            ServiceError: Redis does not answer.
        """
        try:
            state = await self.read(group)
        except ServiceError as error:
            if not error.details.get("unreadable"):
                raise
            if group not in self._unreadable:
                log.error("%s", error.message, extra={"group": group})
                self._unreadable.add(group)
            return None
        if group in self._unreadable:
            log.info("group can be read again", extra={"group": group})
            self._unreadable.discard(group)
        return state

    def finders(self, group: str) -> Finders:
        """Return the index of this group's seats."""
        return self._slot(group).finders

    def invalidate(self, group: str) -> None:
        """Note that another replica changed the group: the next read asks the store."""
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
        """Prune a few names, chosen at random; called regularly it keeps the list short."""
        with store_errors():
            names = await self._client.srandmember(keys.GROUPS, PRUNED_AT_ONCE)
        for name in names:
            await self.prune(name)

    async def submit(
        self, group: str, event: Event | EventOf, life: Life | None = None
    ) -> tuple[Instruction, ...] | None:
        """Apply an event; ``None`` if this life of a node is over, or was never registered.

        An event that depends on what the node registered is given as a function of that.

        Raises:
            ServiceError: Redis did not answer, or others kept changing the group for too long.
        """
        return await self._slot(group).batches.submit(_Request(event, life))

    # Inside the slot's lock

    async def _write(self, group: str, batch: Sequence[_Request]) -> list[_Reply]:
        slot = self._slot(group)
        try:
            attempt = partial(self._try_write, group, slot, batch)
            return (await until_undisputed(f"group {group}", attempt)).replies
        except BaseException:
            slot.snapshot = None
            raise

    async def _try_write(self, group: str, slot: _Slot, batch: Sequence[_Request]) -> _Write:
        names = sorted({name for request in batch for name in request.nodes})
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.group(group), *(keys.node(name) for name in names))
            old = await self._load(pipe, group, slot)
            texts = await pipe.mget([keys.node(name) for name in names]) if names else []
            nodes = {name: readable(name, text) for name, text in zip(names, texts, strict=True)}
            write = _Write(old.state)
            named = old.state.token or any(each and each.token for each in nodes.values())
            joins = named and any(callable(request.event) for request in batch)
            if joins and await pipe.hgetall(keys.TOKEN_LIMITS):
                await pipe.watch(keys.SHARES)  # no other group takes meanwhile what is left
                write.others = await token_limits(pipe, besides=group)
            for request in batch:
                write.apply(request, nodes)
            if write.state is not old.state:
                pipe.multi()
                snapshot = queue_write(pipe, old, write.state, self._clock.now())
                for life in write.seated:
                    pipe.sadd(keys.groups_of(keys.life(*life)), group)
                for life in write.freed - _still_seated(write.state, write.freed, slot.finders):
                    pipe.srem(keys.groups_of(keys.life(*life)), group)
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
            lock = asyncio.Lock()
            slot = _Slot(lock, Batches(partial(self._write, group), lock))
            self._slots[group] = slot
        return slot

    def _forget_some(self) -> None:
        if len(self._slots) >= MAX_CACHED_GROUPS:
            unused = [n for n, s in self._slots.items() if not s.busy]
            for name in unused[: MAX_CACHED_GROUPS // 4]:
                del self._slots[name]


def _without_living(lost: NodesLost, nodes: Mapping[str, NodeRecord | None]) -> NodesLost:
    """Return the event without lives that are not over: the store may have gone back."""
    over = {
        life: how
        for life, how in lost.lives.items()
        if (record := nodes[life[0]]) is None or not record.is_alive_as(life[1])
    }
    return lost if len(over) == len(lost.lives) else replace(lost, lives=over)


def _lives_of(held: Formation | Opening | None, ranks: Sequence[int]) -> set[Life]:
    """Return the nodes, with incarnations, of ranks that have given up their seats.

    Args:
        held: these seats before. The number of a formation may have risen since.
    """
    assert held is not None, "ranks have left what was not there"
    return {held.seats[rank].life for rank in ranks}


def _voters(state: GroupState) -> set[Life]:
    return state.term.lives if state.term else set()


def _still_seated(state: GroupState, lives: set[Life], finders: Finders) -> set[Life]:
    """Return those of ``lives`` that hold a seat or have a vote in the group."""
    forming = state.forming
    seated = {life for life in lives if forming and finders.forming.has(forming.seats, life)}
    seated |= {life for life in lives if state.term is not None and state.term.has(life)}
    current = state.current
    if current is not None:
        for life in lives:
            if any(rank not in current.departed for rank in current.ranks_of(life)):
                seated.add(life)
    return seated
