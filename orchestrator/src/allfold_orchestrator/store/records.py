"""The record of one group in Redis: reading, catching up from its log, writing.

Every write gives the record a new version and appends its changes to a short log. A replica that
knows one of the last versions reads the changes since; any other reads the whole record. So ten
thousand joins over several replicas do not read ten thousand times up to ten thousand seats.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from allfold_core.errors import ServiceError
from allfold_core.schema import UnknownSchema
from allfold_orchestrator.membership.admission import share_of
from allfold_orchestrator.membership.group_state import GroupState
from allfold_orchestrator.membership.nodes import NodeRecord
from allfold_orchestrator.store import codec, keys, schemas
from allfold_orchestrator.store.life import IDLE_RECORD_SECONDS, TOMBSTONE_SECONDS
from allfold_orchestrator.store.redis_client import Commands, Pipeline

log = logging.getLogger(__name__)


def dump(record: NodeRecord) -> str:
    """Return the stored form of a record."""
    return schemas.dump(schemas.NODE, record.to_dict())


def parse(node: str, text: str | None) -> NodeRecord | None:
    """Return the record in a stored form; ``None`` if there is none, or a damaged one.

    Raises:
        ServiceError: it is of another schema; ``details`` has ``unreadable=True``.
    """
    if not text:
        return None
    try:
        return NodeRecord.from_dict(schemas.load(schemas.NODE, text))
    except UnknownSchema as error:
        remedy = "run the version that wrote it, or delete it; the node then registers anew"
        raise schemas.unreadable(f"node {node}", keys.node(node), error, remedy) from error
    except (KeyError, TypeError, ValueError) as error:
        log.error(
            "the record of a node is damaged and counts as none (%r); its agent registers again",
            error,
            extra={"node": node, "key": keys.node(node)},
        )
        return None


def readable(node: str, text: str | None) -> NodeRecord | None:
    """Return the record like :func:`parse`; ``None`` also for one of another schema."""
    try:
        return parse(node, text)
    except ServiceError as error:
        log.error("%s", error.message, extra={"node": node})
        return None


LOG_ENTRIES = 16
# More than a batch of joins writes. What is larger costs no less to follow than to read anew.
MAX_LOGGED_FIELDS = 1024


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A group's state and the version of its record; no version means that there is none."""

    version: str | None
    state: GroupState


async def load(source: Commands, group: str, known: Snapshot | None) -> Snapshot:
    """Return the present snapshot; one small request if nobody has written since ``known``.

    Raises:
        ServiceError: the record cannot be read; ``details`` has ``unreadable=True``.
    """
    version = await source.hget(keys.group(group), "version")
    if version is not None and known is not None and known.version is not None:
        if version == known.version:
            return known
        caught_up = _catch_up(known, await source.lrange(keys.log(group), 0, LOG_ENTRIES - 1))
        if caught_up is not None:
            return caught_up
    record = await source.hgetall(keys.group(group)) if version else {}
    if record:
        return Snapshot(record["version"], _decode(group, record))
    tombstone = await source.get(keys.tombstone(group))
    return Snapshot(None, _from_tombstone(group, tombstone))


def queue_write(pipe: Pipeline, old: Snapshot, new: GroupState, now: float) -> Snapshot:
    """Add to a transaction the writes that turn the record of ``old`` into that of ``new``."""
    key = keys.group(new.group)
    # Random, not counted: a record that was forgotten and made anew must not look unchanged.
    version = secrets.token_hex(8)
    changes = codec.changes(old.state, new)
    pipe.hset(key, mapping={"version": version, **changes.write})
    if changes.delete:
        pipe.hdel(key, *changes.delete)
    _queue_log(pipe, new.group, old.version, version, changes)
    if _gravestone(new) != _gravestone(old.state):
        text, seconds = _gravestone(new)
        pipe.set(keys.tombstone(new.group), text, ex=seconds)
    if (share := share_of(new)) != share_of(old.state):
        pipe.hdel(keys.SHARES, new.group)
        if share is not None:
            pipe.hset(keys.SHARES, new.group, schemas.dump(schemas.SHARE, {"share": share}))
    if new.idle:
        pipe.expire(key, IDLE_RECORD_SECONDS)
        pipe.zadd(keys.IDLE, {new.group: now})
        pipe.zadd(keys.TOMBSTONES, {new.group: now})
    elif old.state.idle:
        pipe.persist(key)
        pipe.sadd(keys.GROUPS, new.group)
        pipe.zrem(keys.IDLE, new.group)
        pipe.zrem(keys.TOMBSTONES, new.group)
    return Snapshot(version, new)


def _gravestone(state: GroupState) -> tuple[str, int | None]:
    """Return the tombstone and its seconds to live: none while a rank has a seat."""
    openings = {"last_epoch": state.last_opening, "recalled": state.recalled}
    return schemas.dump(schemas.TOMBSTONE, openings), TOMBSTONE_SECONDS if state.idle else None


def _queue_log(
    pipe: Pipeline, group: str, before: str | None, after: str, changes: codec.Changes
) -> None:
    log = keys.log(group)
    if before is None or len(changes.write) + len(changes.delete) > MAX_LOGGED_FIELDS:
        pipe.delete(log)
        return
    entry = {"before": before, "after": after, **asdict(changes)}
    pipe.lpush(log, schemas.dump(schemas.LOG, entry))
    pipe.ltrim(log, 0, LOG_ENTRIES - 1)
    pipe.expire(log, IDLE_RECORD_SECONDS)


def _catch_up(known: Snapshot, entries: Sequence[str]) -> Snapshot | None:
    """Apply the logged writes, the newest of which comes first, from the known version on.

    Returns ``None`` where the log does not reach back so far, or cannot be read: the record can.
    """
    try:
        return _replay(known, entries)
    except (KeyError, TypeError, ValueError):
        return None


def _replay(known: Snapshot, entries: Sequence[str]) -> Snapshot | None:
    missed = []
    for text in entries:
        entry = schemas.load(schemas.LOG, text)
        missed.append((entry["after"], codec.Changes(entry["write"], entry["delete"])))
        if entry["before"] == known.version:
            break
    else:
        return None
    state = known.state
    for _, changes in reversed(missed):
        state = codec.patch(state, changes)
    return Snapshot(missed[0][0], state)


def _decode(group: str, record: Mapping[str, str]) -> GroupState:
    try:
        return codec.decode(group, record)
    except (KeyError, ValueError, TypeError) as error:
        raise _unreadable(group, keys.group(group), error) from error


def _from_tombstone(group: str, tombstone: str | None) -> GroupState:
    if tombstone is None:
        return GroupState(group)
    try:
        openings = schemas.load(schemas.TOMBSTONE, tombstone)
        return GroupState(group, last_opening=openings["last_epoch"], recalled=openings["recalled"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(group, keys.tombstone(group), error) from error


def _unreadable(group: str, key: str, error: Exception) -> ServiceError:
    if isinstance(error, UnknownSchema):
        remedy = "run the version that wrote it, or delete it to start the group anew"
    else:
        remedy = "it is damaged; delete it to start the group anew"
    return schemas.unreadable(f"group {group}", key, error, remedy)
