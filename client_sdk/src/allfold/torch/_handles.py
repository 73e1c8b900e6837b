"""Handles of ranks, from which others can make a group without asking anybody.

A handle names the rank, its number in its last group, and the uuids that it has used. So all ranks
that get the same handles come to the same group, with the same numbers.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Self

from allfold_core.errors import InvalidArgument

_SCHEME = "allfold"
_SESSION_BYTES = 8
_UUIDS_KEPT = 64


@dataclass(frozen=True)
class Handle:
    """The identity and history of a rank.

    Attributes:
        prefix: what the names of its groups begin with.
        rank: its number in its group; before the first one, that which its launcher gave it.
        group: the group that it is in, or was in last; empty before the first one.
        used: the uuids that it has used, the newest last.
        session: the process group, among all that there are.
    """

    prefix: str
    rank: int
    group: str = ""
    used: tuple[int, ...] = ()
    session: str = field(default_factory=lambda: secrets.token_hex(_SESSION_BYTES))

    def __str__(self) -> str:
        used = ",".join(map(str, self.used))
        return f"{_SCHEME}:{self.session}:{self.prefix}:{self.group}:{self.rank}:{used}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` has written; ``InvalidArgument`` for anything else."""
        try:
            scheme, session, prefix, group, rank, used = text.split(":")
            uuids = tuple(int(each) for each in used.split(",") if each)
            handle = cls(prefix, int(rank), group, uuids, session)
        except ValueError:
            scheme = ""
        if scheme != _SCHEME:
            raise InvalidArgument(f"{text!r} is no handle of a rank on Allfold")
        return handle

    def using(self, uuid: int) -> Self:
        """Return the handle of the same rank once it has used a uuid."""
        return replace(self, used=(*self.used, uuid)[-_UUIDS_KEPT:])

    def joined(self, group: str, rank: int) -> Self:
        """Return the handle of the same rank in its next group."""
        return replace(self, group=group, rank=rank)


def ordered(handles: Collection[str]) -> list[Handle]:
    """Return the ranks of the next group in the order of their numbers.

    A list gives the order. Of a set, the ranks of the last group stay in their order (of several
    groups, those of the largest come first), and those that were in none yet come behind them.

    Raises:
        InvalidArgument: there is none, one is not of Allfold, or two are of one rank.
    """
    ranks = [Handle.parse(each) for each in handles]
    if not ranks:
        raise InvalidArgument("a group has at least one rank, got no handle")
    repeated = [session for session, times in Counter(_sessions(ranks)).items() if times > 1]
    if repeated:
        raise InvalidArgument(f"a rank is in a group once; got several handles of {repeated[0]}")
    return _by_last_group(ranks) if isinstance(handles, AbstractSet) else ranks


def _by_last_group(ranks: list[Handle]) -> list[Handle]:
    sizes = Counter(each.group for each in ranks)

    def place(handle: Handle) -> tuple[bool, int, str, int, str]:
        is_new = not handle.group
        return is_new, -sizes[handle.group], handle.group, handle.rank, handle.session

    return sorted(ranks, key=place)


def next_group(ranks: list[Handle], uuid: int) -> str:
    """Return the name of the group that these ranks make.

    Raises:
        InvalidArgument: one of them has used the uuid already.
    """
    if any(uuid in each.used for each in ranks):
        raise InvalidArgument(
            f"uuid {uuid} was already used by one of these ranks: each reconfiguration needs one "
            "of its own. The group stays as it was"
        )
    first = ranks[0]
    return f"{first.prefix}-{uuid}-{first.session}"


def _sessions(ranks: Iterable[Handle]) -> list[str]:
    return [each.session for each in ranks]
