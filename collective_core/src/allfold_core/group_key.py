"""The key of a group: only ranks that have it may join."""

from __future__ import annotations

import hashlib

from allfold_core.errors import InvalidArgument

LONGEST = 1024
DIGEST_PATTERN = r"^([0-9a-f]{64})?$"


def checked_key(source: str, key: str) -> str:
    """Return a key that a rank has been given; empty for none.

    Raises:
        InvalidArgument: it is too long. The error does not show it.
    """
    if len(key.encode(errors="surrogateescape")) > LONGEST:
        raise InvalidArgument(f"{source} has more than {LONGEST} bytes, the longest that a key has")
    return key


def digest(group: str, key: str) -> str:
    """Return what agents and orchestrator compare in place of a key; empty without a key.

    It is of no use for another group, and does not open this one: an agent makes it of a key.
    """
    if not key:
        return ""
    return hashlib.sha256(f"{group}\n{key}".encode(errors="surrogateescape")).hexdigest()
