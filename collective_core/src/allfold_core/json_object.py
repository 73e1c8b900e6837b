"""JSON objects from a wire: whatever comes, there is an object or one kind of error."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")
_SCALARS = frozenset({str, bool, int, float, type(None)})
NumberKey = Annotated[str, "a whole number"]
"""The key of a mapping by rank, which JSON has as text."""


class OtherForm(ValueError):
    """A value has another form than is expected; the message says where, and how it differs."""


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


def checked(form: type[T], value: object) -> T:
    """Return a value of JSON itself, once it has the form of a ``TypedDict``.

    Fields that the form does not name stay, unchecked: a later version sends more.

    Raises:
        OtherForm: it has another form.
    """
    _check(form, value, "")
    return cast(T, value)


def _check(form: Any, value: Any, place: str) -> None:
    kinds, parts = _kinds(form), get_args(form)
    if kinds and type(value) not in kinds:
        names = sorted(kind.__name__ for kind in kinds)
        raise _differs(place, " or ".join(names), value)
    if get_origin(form) is list:
        _check_each(parts[0], value, enumerate(value), place)
    elif get_origin(form) is dict:
        if parts[0] == NumberKey and not all(map(str.isdecimal, value)):
            raise _differs(place, "numbers as keys", list(value))
        _check_each(parts[1], value.values(), value.items(), place)
    elif is_typeddict(form):
        for name, (of_field, is_required) in _fields(form).items():
            if name in value:
                _check(of_field, value[name], f"{place}.{name}")
            elif is_required:
                raise OtherForm(f"{place}.{name} is missing".removeprefix("."))


def _check_each(
    form: Any, values: Iterable[object], entries: Iterable[tuple[object, object]], place: str
) -> None:
    # The long ones have the names of nodes and the numbers of ranks: one look at all of them.
    if form in _SCALARS and _kinds(form).issuperset(map(type, values)):
        return
    for key, value in entries:
        _check(form, value, f"{place}.{key}")


def _differs(place: str, expected: str, value: object) -> OtherForm:
    where = place.removeprefix(".") or "it"
    return OtherForm(f"{where}: expected {expected}, got {value!r:.40}")


@cache
def _kinds(form: Any) -> frozenset[type]:
    """Return the types that a value of a form may have; none where it may have any."""
    if form is Any:
        return frozenset()
    if isinstance(form, UnionType):
        return frozenset().union(*map(_kinds, get_args(form)))
    if form in _SCALARS:
        return frozenset({float, int} if form is float else {form})
    return frozenset({get_origin(form) or dict})


@cache
def _fields(form: Any) -> dict[str, tuple[Any, bool]]:
    """Return, by name, the form of each field of a ``TypedDict``, and if it must be there."""
    hints = get_type_hints(form, include_extras=True)
    return {
        name: (get_args(hint)[0], False) if get_origin(hint) is NotRequired else (hint, True)
        for name, hint in hints.items()
    }
