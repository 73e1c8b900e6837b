"""JSON objects from a wire: whatever comes, there is an object or one kind of error."""

from __future__ import annotations

import json
from typing import Any


def read_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        ValueError: there is none, or it nests so deeply that reading it would end the thread.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that nests too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")  # noqa: TRY004 - a value on a wire
    return value
