"""Ranges and digests of a state, as HTTP headers have them."""

from __future__ import annotations

import base64
import re

import xxhash

from allfold_core.errors import InvalidArgument, LocalError

# Clients tidy the path segments "." and ".." away.
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:-]{1,256}")
_RANGE = re.compile(r"bytes=\s*([0-9]{0,19})-([0-9]{0,19})\s*")


def check_id(state_id: str) -> str:
    """Return the id of a state, or raise :class:`InvalidArgument`."""
    if not _ID.fullmatch(state_id):
        raise InvalidArgument(
            f"state id {state_id[:300]!r}: expected 1 to 256 of A-Z a-z 0-9 . _ : -"
        )
    return state_id


def digest_header(content: memoryview) -> str:
    """Return the ``Content-Digest`` (RFC 9530) of bytes: XXH3, which costs next to nothing.

    It finds damage, not forgery: whoever may connect has shown the join token.
    """
    return f"xxh3-64=:{base64.b64encode(xxhash.xxh3_64_digest(content)).decode()}:"


def parse_range(value: str, size: int) -> tuple[int, int] | None:
    """Return start and stop of a ``Range``; ``None`` (all) for one that HTTP lets us ignore.

    Raises:
        LocalError: none of the bytes exist; 416.
    """
    match = _RANGE.fullmatch(value)
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        raise LocalError(f"no bytes {value[6:]} in {size}", http_status=416, size=size)
    return start, stop
