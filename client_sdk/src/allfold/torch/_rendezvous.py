"""The rendezvous of the ranks of a torch group in torch's store.

A store may outlive the ranks that wrote to it: torchrun keeps one over restarts, so what a dead
rank has written is still there. Nothing in the environment tells the attempts apart with one value
on all nodes (each launcher counts its own restarts). So every visit has a token of its own, rank 0
answers tokens, and a rank is there once it has confirmed the answer to its token.

    allfold/visit/<rank>      the token of its last visit and its world size, until all are there
    allfold/answer/<token>    by rank 0: the name of the group and, where the job starts services of
                              its own, how to come to those; or what is wrong
    allfold/<name>/<token>    the rank has read the answer; or why it cannot come
    allfold/<name>/all        all ranks have; or why one cannot
"""

from __future__ import annotations

import json
import os
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Self

from allfold._process.settings import group_name
from allfold_core.errors import (
    AgentUnreachable,
    AllfoldError,
    InvalidArgument,
    PeerMissing,
    RegisterParamsMismatch,
    from_dict,
)
from allfold_core.verdict import name_ranks

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


_DEFAULT_PREFIX = "torch"
_PREFIX_KEPT = 90
_OVER = "over"
_YES = "yes"
_SHORTEST_PAUSE = 0.001
# Where there can be no group, rank 0 tells those who come within so long.
_FAILED_SECONDS = 10.0
_LONGEST_PAUSE = 0.02


Take = Callable[[dict[str, str] | None], None]
"""Told on other ranks what rank 0 offers, as soon as that is known; raises if it is of no use."""


def lead(
    store: Any,
    world_size: int,
    timeout: timedelta,
    offer: dict[str, str] | None = None,
    failure: AllfoldError | None = None,
) -> str:
    """Name the group, once all are there: the part of rank 0.

    Args:
        offer: what the others need to know of services that the job has started.
        failure: why there can be no group; the others get it as well.

    Returns:
        A name that no other group has or had, the same on all ranks.

    Raises:
        PeerMissing: some ranks did not come in time; names them.
        RegisterParamsMismatch: the ranks have been given different world sizes.
        AgentUnreachable: a rank has no agent; says why.
    """
    return _Meeting(store, 0, world_size, timeout).lead(offer, failure)


def follow(store: Any, rank: int, world_size: int, timeout: timedelta, take: Take) -> str:
    """Take the name from rank 0, once all are there: the part of the others; as :func:`lead`."""
    return _Meeting(store, rank, world_size, timeout).follow(take)


@dataclass(frozen=True)
class _Visit:
    token: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.token} {self.world_size}"


class _Meeting:
    """One visit of one rank."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._deadline = monotonic() + timeout.total_seconds()
        self._visit = _Visit(uuid.uuid4().hex, world_size)
        self._failure: AllfoldError | None = None
        store.set(_visit_key(rank), str(self._visit))

    def lead(self, offer: dict[str, str] | None, failure: AllfoldError | None) -> str:
        """Name the group and wait for the confirmations of all others: the part of rank 0."""
        name = _new_name()
        if failure is not None:
            self._fail(name, failure)
        try:
            self._await_all(name, offer)
        except PeerMissing:
            if self._failure is None:
                raise
        if self._failure is not None:
            raise self._failure
        # The next group in this store must not meet these visits.
        for rank in range(self._world_size):
            self._store.set(_visit_key(rank), _OVER)
        self._store.set(_all_key(name), _YES)
        return name

    def _fail(self, name: str, failure: AllfoldError) -> None:
        """There can be no group: who has been answered is told so, and for a while who comes."""
        self._failure = failure
        self._deadline = min(self._deadline, monotonic() + _FAILED_SECONDS)
        self._store.set(_all_key(name), json.dumps(failure.to_dict()))

    def _await_all(self, name: str, offer: dict[str, str] | None) -> None:
        """Answer each visit, also one that takes the place of another, until all have confirmed.

        A store cannot wait for a key to change, so this looks at those that are not there.
        """
        absent = dict.fromkeys(range(1, self._world_size), "")
        pause = _SHORTEST_PAUSE
        while absent:
            before = dict(absent)
            for rank, answered in before.items():
                failure = None if self._failure is None else self._failure.to_dict()
                answer = {"name": name, "offer": offer, "failure": failure}
                self._attend(rank, answered, absent, answer)
            if monotonic() > self._deadline:
                raise self._missing(list(absent))
            pause = _SHORTEST_PAUSE if absent != before else min(2 * pause, _LONGEST_PAUSE)
            sleep(pause)

    def _attend(
        self, rank: int, answered: str, absent: dict[int, str], answer: dict[str, Any]
    ) -> None:
        """Answer the visit of a rank, or see whether it has confirmed the answer."""
        visit = self._visit_of(rank)
        if visit is None:
            return
        differ = visit.world_size != self._world_size
        if visit.token != answered:
            sizes = {0: self._world_size, rank: visit.world_size}
            whole = answer | {"sizes": sizes if differ else None}
            self._store.set(_answer_key(visit.token), json.dumps(whole))
            absent[rank] = visit.token
            return
        key = _confirmed_key(answer["name"], visit.token)
        if self._store.check([key]):
            if differ:
                raise _disagreement({0: self._world_size, rank: visit.world_size})
            del absent[rank]
            confirmed = self._store.get(key).decode()
            if confirmed != _YES and self._failure is None:
                self._fail(answer["name"], _reason(confirmed))

    def follow(self, take: Take) -> str:
        """Take the name from rank 0 and wait for all others: the part of all but rank 0."""
        answer = json.loads(self._await(_answer_key(self._visit.token)))
        name = str(answer["name"])
        confirmed = _YES
        failure = answer["failure"] and from_dict(answer["failure"])
        if failure is None and answer["sizes"] is None:
            try:
                take(answer["offer"])
            except AllfoldError as error:
                failure = error
                confirmed = json.dumps(error.to_dict())
        # Before the error: rank 0 raises its own when it sees that this rank has heard of it.
        self._store.set(_confirmed_key(name, self._visit.token), confirmed)
        if answer["sizes"] is not None:
            raise _disagreement({int(rank): size for rank, size in answer["sizes"].items()})
        if failure is not None:
            raise failure
        outcome = self._await(_all_key(name), name)
        if outcome != _YES:
            raise _reason(outcome)
        return name

    def _await(self, key: str, name: str | None = None) -> str:
        """Return the value of a key that another rank sets; ``name`` if rank 0 has answered."""
        left = timedelta(seconds=max(0.001, self._deadline - monotonic()))
        try:
            self._store.wait([key], left)
        except RuntimeError as error:  # a FileStore has no class of its own for it
            if "timeout" not in str(error).lower():
                raise
            raise self._missing(self._absent(name)) from error
        value: bytes = self._store.get(key)
        return value.decode()

    def _visit_of(self, rank: int) -> _Visit | None:
        """The last visit of a rank; one that is left of a dead process looks the same."""
        key = _visit_key(rank)
        if not self._store.check([key]):
            return None
        token, _, size = self._store.get(key).decode().partition(" ")
        return None if token == _OVER else _Visit(token, int(size))

    def _absent(self, name: str | None) -> list[int]:
        """The ranks that keep this one waiting, from what the store shows."""
        visits = {rank: self._visit_of(rank) for rank in range(self._world_size)}
        absent = [rank for rank, visit in visits.items() if visit is None]
        if absent or name is None:
            return absent or [0]
        return [
            rank
            for rank, visit in visits.items()
            if rank and visit and not self._store.check([_confirmed_key(name, visit.token)])
        ]

    def _missing(self, absent: list[int]) -> PeerMissing | RegisterParamsMismatch:
        """Return the error of an overdue rendezvous: a missing rank may have another world size."""
        visits = {rank: self._visit_of(rank) for rank in range(self._world_size)}
        sizes = {rank: visit.world_size for rank, visit in visits.items() if visit}
        if len(set(sizes.values())) > 1:
            return _disagreement(sizes)
        seconds = self._timeout.total_seconds()
        return PeerMissing(
            f"{name_ranks(absent)} of {self._world_size} did not come to the new group within "
            f"{seconds:g} s",
            missing_ranks=absent,
            timeout=seconds,
        )


def _reason(outcome: str) -> AgentUnreachable:
    """Return what others have to know of a rank that cannot come."""
    return AgentUnreachable(from_dict(json.loads(outcome)).message)


def _disagreement(sizes: dict[int, int]) -> RegisterParamsMismatch:
    """The error where ranks were started with different world sizes."""
    ranks_of: dict[int, list[int]] = {}
    for rank, size in sorted(sizes.items()):
        ranks_of.setdefault(size, []).append(rank)
    listed = "; ".join(f"{size} on {name_ranks(ranks)}" for size, ranks in ranks_of.items())
    return RegisterParamsMismatch(
        f"the ranks of a new group disagree on its world size: {listed}; start all of them with "
        "the same WORLD_SIZE, or world_size= of init_process_group"
    )


def name_prefix() -> str:
    """Return what the names of groups begin with."""
    return group_name(os.environ.get("ALLFOLD_GROUP") or _DEFAULT_PREFIX)[:_PREFIX_KEPT]


def _new_name() -> str:
    return f"{name_prefix()}-{secrets.token_hex(6)}"


def _visit_key(rank: int) -> str:
    return f"allfold/visit/{rank}"


def _answer_key(token: str) -> str:
    return f"allfold/answer/{token}"


def _confirmed_key(name: str, token: str) -> str:
    return f"allfold/{name}/{token}"


def _all_key(name: str) -> str:
    return f"allfold/{name}/all"
