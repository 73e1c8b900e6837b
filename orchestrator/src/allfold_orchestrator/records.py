"""The record of one group in Redis: how it is read, how far behind one may be, how it is written.

Every write gives the record a new version and notes what it changed in a short log. A replica that
knows one of the last versions reads those few changes; only one that does not reads everything. So
ten thousand ranks that join over several replicas are not ten thousand readings of up to ten
thousand seats.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allfold_core.errors import ServiceError
from allfold_orchestrator import codec, keys
from allfold_orchestrator.group_state import GroupState
from allfold_orchestrator.redis_client import Commands, Pipeline

# A group in which nobody sits is forgotten after a day, but for its last epoch.
IDLE_RECORD_SECONDS = 24 * 3600
# The last epoch is forgotten when no agent can remember it any more.
TOMBSTONE_SECONDS = 30 * 24 * 3600
LOG_ENTRIES = 16
# More than a batch of joins writes. What is larger costs no less to follow than to read anew.
MAX_LOGGED_FIELDS = 1024


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A group's state and the version of its record; no version means that there is none."""

    version: str | None
    state: GroupState


async def load(source: Commands, group: str, known: Snapshot | None) -> Snapshot:
    """The present snapshot; one small request if nobody has written since ``known``."""
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


def queue_write(pipe: Pipeline, old: Snapshot, new: GroupState) -> Snapshot:
    """Add to a transaction what turns the record of ``old`` into that of ``new``."""
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
    if new.idle:
        pipe.expire(key, IDLE_RECORD_SECONDS)
    elif old.state.idle:
        pipe.persist(key)
        pipe.sadd(keys.GROUPS, new.group)
    return Snapshot(version, new)


def _gravestone(state: GroupState) -> tuple[str, int | None]:
    """What outlives the record, and for how long: for ever while somebody sits in the group."""
    return f"{state.last_epoch} {state.recalled}", TOMBSTONE_SECONDS if state.idle else None


def _queue_log(
    pipe: Pipeline, group: str, before: str | None, after: str, changes: codec.Changes
) -> None:
    log = keys.log(group)
    if before is None or len(changes.write) + len(changes.delete) > MAX_LOGGED_FIELDS:
        pipe.delete(log)
        return
    pipe.lpush(log, json.dumps([before, after, changes.write, changes.delete]))
    pipe.ltrim(log, 0, LOG_ENTRIES - 1)
    pipe.expire(log, IDLE_RECORD_SECONDS)


def _catch_up(known: Snapshot, entries: Sequence[str]) -> Snapshot | None:
    """Apply the logged writes, the newest of which comes first, from the known version on."""
    missed = []
    for entry in entries:
        before, after, write, delete = json.loads(entry)
        missed.append((after, codec.Changes(write, delete)))
        if before == known.version:
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
        raise _damaged(group, error) from error


def _from_tombstone(group: str, tombstone: str | None) -> GroupState:
    if tombstone is None:
        return GroupState(group)
    last_epoch, recalled = (int(number) for number in tombstone.split())
    return GroupState(group, last_epoch=last_epoch, recalled=recalled)


def _damaged(group: str, error: Exception) -> ServiceError:
    key = keys.group(group)
    return ServiceError(
        f"the record of group {group} cannot be read ({error!r}), it was written by another "
        f"version or by hand; delete the key {key} to start the group anew",
        component="store",
        group=group,
        key=key,
        damaged=True,
        retry=False,
    )
