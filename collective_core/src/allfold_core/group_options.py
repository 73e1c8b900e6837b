"""The options of a group: one table, from which all their forms follow.

To add one, give :class:`GroupOptions` a field and :data:`OPTIONS` a row. Messages, plans and
records carry it from then on, ranks that differ in it are refused, and the settings list it. What
users call is spelled out beside: ``allfold.init``, :class:`Given`, and ``JoinGroup`` of the REST
API.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, TypedDict, get_args

from allfold_core.dtypes import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import AUTO
from allfold_core.protocol.rank_messages import LONGEST_TIMEOUT
from allfold_core.protocol.traffic import TrafficClass
from allfold_core.schedules.registry import parse_overrides

LONGEST_KEY = 1024
KEY_DIGEST_PATTERN = r"^([0-9a-f]{64})?$"


def checked_key(source: str, key: str) -> str:
    """Return a key that a rank has been given; empty for none.

    Raises:
        InvalidArgument: it is too long. The error does not show it.
    """
    if len(key.encode(errors="surrogateescape")) > LONGEST_KEY:
        raise InvalidArgument(
            f"{source} has more than {LONGEST_KEY} bytes, the longest that a key has"
        )
    return key


def digest_of_key(group: str, key: str) -> str:
    """Return what agents and orchestrator compare in place of a key; empty without a key.

    It is of no use for another group, and does not open this one: an agent makes it of a key.
    """
    if not key:
        return ""
    return hashlib.sha256(f"{group}\n{key}".encode(errors="surrogateescape")).hexdigest()


OnLoss = Literal["raise", "shrink"]
"""The treatment of an op that a loss interrupts: it fails, or the remaining ranks repeat it."""

Joins = Literal["any", "commit"]
"""The points at which ranks join or leave a running group: between any two ops, or at commits of
all ranks."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of one group, on which its ranks have agreed.

    The defaults are those of records and messages that were written before there was the option.

    Attributes:
        timeout: seconds until an op fails, if the call gives no timeout.
        strategies: overrides by kind label, e.g. ``{"all_reduce": "ring"}``.
        on_loss: what happens to an op interrupted by the loss of a rank: ``"raise"``, it fails with
            the same error on all remaining ranks; ``"shrink"``, the remaining ranks repeat it.
        min_world: the group runs no op with fewer ranks than this.
        max_world: ranks may join the running group up to this number; ``None``: no rank may join.
        joins: when they may join.
        join_timeout: seconds for the registration of a rank, and for which ops wait for ranks to
            join, if fewer than ``min_world`` are left in an elastic group. Ranks may differ in it:
            for ops, that of the first one counts.
        traffic: what its bytes give way to on lines between machines: those of a ``"background"``
            group to all others, those of a ``"normal"`` one to those of ``"high"`` ones.
        key: on a rank, the key that ranks need to join; from its agent on, the digest of the key,
            see :func:`digest_of_key`. Empty if they need none.
    """

    timeout: float
    strategies: Mapping[str, str] = field(default_factory=dict)
    on_loss: OnLoss = "raise"
    min_world: int = 1
    max_world: int | None = None
    joins: Joins = "any"
    join_timeout: float = field(default=60.0, compare=False)
    key: str = field(default="", repr=False)
    traffic: TrafficClass = "normal"

    @property
    def is_elastic(self) -> bool:
        """True if ranks may join and leave while the group runs."""
        return self.max_world is not None

    @property
    def shrinks(self) -> bool:
        """True if the remaining ranks repeat an op that a loss interrupts."""
        return self.on_loss == "shrink"

    @property
    def at_commits(self) -> bool:
        """True if ranks join and leave only where all ranks commit their state."""
        return self.joins == "commit"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which stands among the other fields of a message or record."""
        return {name: getattr(self, name) for name in NAMES}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the options in a message or record; what is not there has its default."""
        return cls(**{name: data[name] for name in NAMES if name in data})


NAMES = tuple(each.name for each in fields(GroupOptions))
"""The names of the options, as messages and records have them."""


class Given(TypedDict, total=False):
    """The options as arguments of :func:`allfold.init`; ``None``: as the environment says."""

    timeout: float | None
    init_timeout: float | None
    strategies: str | Mapping[str, str] | None
    wire: str | None
    on_loss: str | None
    min_world: int | None
    max_world: int | None
    joins: str | None
    traffic: str | None
    group_key: str | None


Known = Mapping[str, Any]
"""The ``world_size``, and the options that stand before one in the table, as far as known."""

Check = Callable[[str, Any, Known], Any]
"""Returns the value of an argument, or of a variable's text. ``InvalidArgument`` names the source,
which comes first."""


@dataclass(frozen=True, slots=True)
class Option:
    """The way in which a rank is given one option.

    Attributes:
        name: the field of :class:`GroupOptions`; ``wire`` is none, as the calls carry it.
        argument: of ``init``.
        variable: read where the argument is not given; empty where there is none.
        default: as it would be written; empty for none.
        sentence: the meaning, for lists of settings.
        of_fixed: False for what a group without changes of its ranks has by default in any case.
    """

    name: str
    argument: str
    variable: str
    default: str
    check: Check
    sentence: str = ""
    of_fixed: bool = True
    secret: bool = False

    def read(self, given: Any, environment: Mapping[str, str], known: Known) -> Any:
        """Return the value; ``None`` where neither argument, variable nor default gives any."""
        if given is not None:
            return self.check(self.argument, given, known)
        text = environment.get(self.variable) or self.default
        return self.check(self.variable, text, known) if text else None


def checked_seconds(source: str, value: Any, _: Known | None = None) -> float:
    """Return a time limit; ``InvalidArgument`` names where a bad one came from."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise InvalidArgument(
            f"{source} is a positive number of seconds, at most {LONGEST_TIMEOUT:.0f} (30 days), "
            f"got {value!r}"
        )
    return seconds


def checked_wire(name: str) -> Wire:
    """Return the wire format of a name; ``InvalidArgument`` lists what there is."""
    try:
        return Wire.from_label(name)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def _usual_wire(name: str) -> str:
    wire = checked_wire(name)
    if wire.is_sparse:
        raise InvalidArgument(
            f"wire={wire.label!r} cannot be that of a group: calls ask for it, with feedback='name'"
        )
    return wire.label


def _naming_variables(read: Callable[[Any], Any]) -> Check:
    """Make a check whose errors begin with the variable, if the value is that of one."""

    def check(source: str, value: Any, _: Known) -> Any:
        try:
            return read(value)
        except InvalidArgument as error:
            if not source.isupper():
                raise
            raise InvalidArgument(f"{source}: {error.message}") from None

    return check


def _strategies(value: str | Mapping[str, str]) -> dict[str, str]:
    if isinstance(value, Mapping):
        value = ";".join(f"{kind}={name}" for kind, name in value.items())
    return {} if value == AUTO else parse_overrides(value)


def _one_of(choices: Any) -> Check:
    def check(source: str, value: Any, _: Known) -> Any:
        if value not in get_args(choices):
            raise InvalidArgument(
                f"{source} is one of {', '.join(get_args(choices))}, got {value!r}"
            )
        return value

    return check


def _ranks(source: str, value: Any, most: int | None, reach: str) -> int:
    text = str(value)
    if not text.isdecimal() or not 1 <= int(text) <= (most or int(text)):
        raise InvalidArgument(f"{source} is a number of ranks from 1 {reach}; got {text}")
    return int(text)


def _max_world(source: str, value: Any, known: Known) -> int:
    most, world_size = _ranks(source, value, None, "on"), known.get("world_size", 0)
    if most < world_size:
        raise InvalidArgument(
            f"max_world is {most}, and {world_size} ranks are to open the group: it must not be "
            "less than the world size"
        )
    return most


def _min_world(source: str, value: Any, known: Known) -> int:
    """Return the setting. Few ranks may join a group that runs, so there they are no bound."""
    for bound, what in (("max_world", "max_world"), ("world_size", "the world size")):
        if most := known.get(bound):
            return _ranks(source, value, most, f"to {most}, {what}")
    return _ranks(source, value, None, "on")


def _key(source: str, value: str, _: Known) -> str:
    return checked_key(source, value)


OPTIONS = (
    Option(
        "timeout", "timeout", "ALLFOLD_TIMEOUT", "300", checked_seconds,
        "seconds until an op fails",
    ),
    Option(
        "join_timeout", "init_timeout", "ALLFOLD_INIT_TIMEOUT", "60", checked_seconds,
        "seconds until init fails; allfold run --agent waits as long for the agent, or 5 s",
    ),
    Option(
        "strategies", "strategies", "ALLFOLD_STRATEGY", AUTO, _naming_variables(_strategies),
        "strategies by kind, as in all_reduce=ring;broadcast=tree(4)",
    ),
    Option(
        "wire", "wire", "ALLFOLD_WIRE", Wire.NATIVE.label,
        _naming_variables(_usual_wire),
        "compression of reductions between nodes: "
        f"{', '.join(each.label for each in Wire if not each.is_sparse)}",
    ),
    Option(
        "on_loss", "on_loss", "ALLFOLD_ON_LOSS", "raise", _one_of(OnLoss),
        "what a loss makes of the ops that it interrupts. raise: they fail with the same error on "
        "all ranks that are left; shrink: these do them again, where that is possible",
        of_fixed=False,
    ),
    Option(
        "max_world", "max_world", "ALLFOLD_MAX_WORLD", "", _max_world,
        "ranks may join the group while it runs, up to this number (default: none may)",
        of_fixed=False,
    ),
    Option(
        "min_world", "min_world", "ALLFOLD_MIN_WORLD", "1", _min_world,
        "with fewer ranks than this left, no op runs",
        of_fixed=False,
    ),
    Option("joins", "joins", "", "any", _one_of(Joins), of_fixed=False),
    Option(
        "traffic", "traffic", "ALLFOLD_TRAFFIC", "", _one_of(TrafficClass),
        "what the group's bytes give way to on lines between machines. background: to those of all "
        "other groups; normal: to those of high ones; high (default: normal)",
    ),
    Option(
        "key", "group_key", "ALLFOLD_GROUP_KEY", "", _key,
        "a secret that every rank of the group must have (default: whoever reaches an agent may "
        "join)",
        secret=True,
    ),
)  # fmt: skip
"""The table, in the order in which the options are read."""

BY_ARGUMENT = {each.argument: each for each in OPTIONS}


def checked(
    given: Mapping[str, Any], environment: Mapping[str, str], world_size: int, *, fixed: bool
) -> dict[str, Any]:
    """Return the options of a rank by name, those that nothing gives left out.

    Args:
        given: by argument, see :class:`Given`.
        fixed: the ranks of the group never change, so it has the defaults of what is about changes.

    Raises:
        InvalidArgument: an option cannot work; names the argument or the variable.
    """
    values: dict[str, Any] = {"world_size": world_size}
    for option in OPTIONS:
        sources = (given, environment) if option.of_fixed or not fixed else ({}, {})
        value = option.read(sources[0].get(option.argument), sources[1], values)
        if value is not None:
            values[option.name] = value
    return values
