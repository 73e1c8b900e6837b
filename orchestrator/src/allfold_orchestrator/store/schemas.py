"""The schemas of everything that is stored in Redis, each read by :mod:`allfold_core.schema`.

A group's number is in the field ``meta`` of its hash and covers all other fields, except that plans
have their own. Sets and sorted sets hold nothing but names and times, and have no number.

What cannot be read is met in one of two ways. A record of another schema is refused: it belongs to
a replica of another version, and nobody else changes or removes it. A damaged node record counts
as none, because the node's agent then registers again and writes it anew; a damaged group record
is refused like one of another schema, because the openings in it must not be used again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from allfold_core.errors import ServiceError
from allfold_core.schema import Schema


def _one_opening(group: dict[str, Any]) -> dict[str, Any]:
    """Upgrade to groups of which one opening at a time has ranks."""
    return {name: value for name, value in group.items() if name != "older"}


GROUP = Schema("record of a group", 2, {1: _one_opening})
LOG = Schema("entry of a group's log", 1)
STORE = Schema("record of the store's life", 1)
TOMBSTONE = Schema("tombstone of a group", 1)
NODE = Schema("record of a node", 1)
PROGRESS = Schema("record of a node's progress", 1)
LIMIT = Schema("record of a limit", 1)
TOKEN_LIMIT = Schema("record of a token's limit", 1)
SHARE = Schema("record of a group's share", 1)


def dump(schema: Schema, data: Mapping[str, Any]) -> str:
    """Return the stored form of a record."""
    return json.dumps(schema.stamp(data), separators=(",", ":"))


def load(schema: Schema, text: str) -> dict[str, Any]:
    """Return the record in a stored form.

    Raises:
        UnknownSchema: it is of another schema.
        TypeError, ValueError: it is damaged.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError(f"expected a JSON object, got {text[:80]!r}")
    return schema.read(data)


def unreadable(what: str, key: str, error: Exception, remedy: str) -> ServiceError:
    """Return the error of a record that cannot be read; ``details`` has ``unreadable=True``."""
    return ServiceError(
        f"the record of {what} cannot be read ({error}); {remedy} (key {key})",
        component="store",
        key=key,
        unreadable=True,
        retry=False,
    )
