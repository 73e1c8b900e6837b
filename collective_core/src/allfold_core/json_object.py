"""JSON objects from a wire: whatever comes, there is an object or one kind of error."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from types import UnionType
from typing import Annotated, Any, NotRequired, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
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
    if form is Any:
        return
    if scalars := _scalars(form):
        if type(value) not in scalars:
            raise _differs(place, form, value)
    elif get_origin(form) is list:
        _check_type(list, value, place)
        (of_each,) = get_args(form)
        _check_each(of_each, value, enumerate(value), place)
    elif get_origin(form) is dict:
        key, of_each = get_args(form)
        _check_type(dict, value, place)
        if key == NumberKey and not all(map(str.isdecimal, value)):
            raise _differs(place, "numbers as keys", list(value))
        _check_each(of_each, value.values(), value.items(), place)
    else:
        _check_type(dict, value, place)
        _check_fields(form, value, place)


def _check_each(
    form: Any, values: Iterable[object], entries: Iterable[tuple[object, object]], place: str
) -> None:
    # The long ones have the names of nodes and the numbers of ranks: one look at all of them.
    if (scalars := _scalars(form)) and scalars.issuperset(map(type, values)):
        return
    for key, value in entries:
        _check(form, value, f"{place}.{key}")


def _check_fields(form: Any, value: dict[str, Any], place: str) -> None:
    for name, (of_field, is_required) in _fields(form).items():
        if name in value:
            _check(of_field, value[name], f"{place}.{name}")
        elif is_required:
            raise OtherForm(f"{place}.{name} is missing".removeprefix("."))


def _check_type(kind: type, value: object, place: str) -> None:
    if type(value) is not kind:
        raise _differs(place, kind, value)


def _differs(place: str, form: Any, value: object) -> OtherForm:
    name = form.__name__ if isinstance(form, type) else form
    where = place.removeprefix(".") or "it"
    return OtherForm(f"{where}: expected {name}, got {value!r:.40}")


@cache
def _scalars(form: Any) -> frozenset[type]:
    """Return the types of values of a form that has no parts; none of one that has."""
    kinds = get_args(form) if isinstance(form, UnionType) else (form,)
    if not all(kind in (str, bool, int, float, type(None)) for kind in kinds):
        return frozenset()
    return frozenset(kinds) | ({int} if float in kinds else set())


@cache
def _fields(form: Any) -> dict[str, tuple[Any, bool]]:
    """Return, by name, the form of each field of a ``TypedDict``, and if it must be there."""
    hints = get_type_hints(form, include_extras=True)
    return {
        name: (get_args(hint)[0], False) if get_origin(hint) is NotRequired else (hint, True)
        for name, hint in hints.items()
    }
