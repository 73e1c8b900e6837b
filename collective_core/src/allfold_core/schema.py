"""Schema numbers of messages and records, the rule by which they are read, bounds of fields.

Every JSON message of the control plane, every plan and every stored record carries ``schema``, a
whole number. It grows by one whenever a reader of the number before would misread the data; a
further optional field is no such change. A reader

1. takes its own number as it is,
2. upgrades an older one step by step, where it has an upgrade for each step,
3. refuses everything else, newer numbers included.

Data without a number has schema 0, from before there were numbers. Requests without a body are
versioned by their path (``/v1``). The local socket, and edges and links between agents, agree on a
protocol when they are opened instead: ``rank_messages.PROTOCOL_VERSION``,
``frames.EDGE_PROTOCOL`` and ``peer_link.LINK_PROTOCOL``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
from urllib.parse import urlsplit

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


_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def series(version: str) -> str:
    """Return the series of a release, ``"0.2"`` or ``"1"``; empty where it has no such number."""
    found = _NUMBERS.match(version)
    if found is None:
        return ""
    major, minor = found.groups()
    return f"{major}.{minor}" if major == "0" else major


def work_together(one: str, other: str) -> bool:
    """Return True unless two releases are known to be of different series."""
    return not (series(one) and series(other)) or series(one) == series(other)


FIELD = "schema"

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
"""Turns data of one schema into data of the next."""


class UnknownSchema(ValueError):
    """Data of a schema that its reader neither has nor can upgrade."""


@dataclass(frozen=True)
class Schema:
    """One kind of message or record.

    Attributes:
        name: what it is, for errors.
        number: the schema that is written, and read as it is.
        upgrades: by the number from which each leads to the next.
    """

    name: str
    number: int
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict)

    def stamp(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``data`` with the number of its schema."""
        return {FIELD: self.number, **data}

    def read(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``data`` without its number, upgraded to the present schema.

        Raises:
            UnknownSchema: the number is newer, is none, or has no upgrade.
        """
        found = data.get(FIELD, 0)
        content = {name: value for name, value in data.items() if name != FIELD}
        if type(found) is not int or not 0 <= found <= self.number:
            raise self._unknown(found)
        for number in range(found, self.number):
            if number not in self.upgrades:
                raise self._unknown(found)
            content = self.upgrades[number](content)
        return content

    def _unknown(self, found: object) -> UnknownSchema:
        return UnknownSchema(
            f"this {self.name} has schema {found!r} and is read here up to schema {self.number}; "
            "services that work together should have the same version"
        )


def unchanged(data: dict[str, Any]) -> dict[str, Any]:
    """Upgrade to a schema that only brought the number."""
    return data


def _shared_by_cores(plan: dict[str, Any]) -> dict[str, Any]:
    """Upgrade to links that say how many cores their nodes share, and not only that they do."""
    links = dict(plan["links"])
    if links.pop("shared", False):
        links["shared_cores"] = 2  # which those plans were reckoned with
    return {**plan, "links": links}


def _before_losses(plan: dict[str, Any]) -> dict[str, Any]:
    """Upgrade to plans that say which ranks a group has, so that it can go on without some."""
    return {"sessions": [], "generation": 0, **plan}


MESSAGE = Schema("message of the control plane", 1, {0: unchanged})
# From 2 on only options were added: one that a plan lacks has its default, see group_options.
PLAN = Schema("plan", 4, {0: _shared_by_cores, 1: _before_losses, 2: unchanged, 3: unchanged})

# What a field of a message may be, said where the field is. ``allfold_control`` makes readers and
# writers of messages from annotated dataclasses, with pydantic, which asks each annotation for its
# schema, a plain dict, by a method of a fixed name: so these need nothing of it.

_Handler = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Within:
    """The bounds of a number: from ``least`` on, below ``end``; no NaN.

    Attributes:
        may_be_text: as keys of JSON objects and parts of URLs are.
    """

    least: float
    end: float
    may_be_text: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> dict[str, Any]:
        bounds = {"ge": self.least, "lt": self.end, "strict": not self.may_be_text}
        return {**handler(source), **bounds}


class _OnlyItself:
    """Makes a field take values of its type alone, where others could be converted."""

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> dict[str, Any]:
        return {**handler(source), "strict": True}


@dataclass(frozen=True)
class Form:
    """The form of a field that is not that of its parts.

    Attributes:
        read: returns the value; ``KeyError``, ``TypeError`` or ``ValueError`` where it is none.
        write: the inverse.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> dict[str, Any]:
        return {
            "type": "function-plain",
            "function": {"type": "no-info", "function": self.read},
            "serialization": {"type": "function-plain", "function": self.write},
        }


@dataclass(frozen=True)
class Matching:
    """The bounds of a text: the pattern that all of it matches, and what else is asked of it.

    Attributes:
        check: returns the text; ``ValueError`` where it is none.
    """

    pattern: str
    check: Callable[[str], str] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> dict[str, Any]:
        text = {**handler(source), "pattern": self.pattern}
        if self.check is None:
            return text
        function = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": function, "schema": text}


OPENING_AS_EPOCH = {
    "alias_generator": lambda name: "epoch" if name == "opening" else name,
    "serialize_by_alias": True,
}
"""Of a dataclass whose ``opening`` is ``epoch`` in JSON, as older versions read and write it."""

NAME_PATTERN = r"^[A-Za-z0-9._-]{1,128}$"
_HOST = r"(\[[^\s/\[\]]{2,64}\]|[^\s/:@?#\[\]]{1,253})"
ADDRESS_PATTERN = rf"^{_HOST}:[0-9]{{1,5}}$"
URL_PATTERN = rf"^https?://{_HOST}(:[0-9]{{1,5}})?$"
MAX_PORT = 65_535
MAX_WORLD_SIZE = 100_000
# Agents count openings in 32 bits. A report may name the lower half, so that no report uses up all.
MAX_OPENING = 2**31 - 1
# Ops are numbered in 64 bits with a sign.
MAX_SEQ = 2**63 - 1
MAX_GENERATION = 2**12 - 1


def _has_a_port(address: str) -> str:
    if int(address.rpartition(":")[2]) > MAX_PORT:
        raise ValueError(f"the port is above {MAX_PORT}")
    return address


def _can_be_read(url: str) -> str:
    _ = urlsplit(url).port  # complains of one that is too large, and of brackets around no address
    return url


Name = Annotated[str, Matching(NAME_PATTERN)]
Flag = Annotated[bool, _OnlyItself()]
Address = Annotated[str, Matching(ADDRESS_PATTERN, _has_a_port)]
ControlUrl = Annotated[str, Matching(URL_PATTERN, _can_be_read)]
Rank = Annotated[int, Within(0, MAX_WORLD_SIZE)]
OpeningNumber = Annotated[int, Within(0, MAX_OPENING + 1)]
Generation = Annotated[int, Within(0, MAX_GENERATION + 1)]
Number = Annotated[int, Within(0, 2**64)]
Seq = Annotated[int, Within(0, MAX_SEQ + 1)]
"""The number of an op."""
SeqKey = Annotated[int, Within(0, MAX_SEQ + 1, may_be_text=True)]
LastSeq = Annotated[int, Within(-1, MAX_SEQ + 1)]
"""The number of an op; -1 for none yet."""
Seconds = Annotated[float, Within(0, float("inf"))]
Rate = Annotated[float, Within(5e-324, float("inf"))]
"""Bytes per second or seconds per byte: above 0."""
