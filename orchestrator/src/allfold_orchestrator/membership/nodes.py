"""The record of a node, and the rule by which an agent gets a node's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from allfold_core.errors import AllfoldError, Evicted, MultipleRegister
from allfold_orchestrator.membership.group_state import GroupState, NodeInfo
from allfold_service.addresses import parse_address

ASKS_AGAIN_SECONDS = 5.0
"""A rank that was refused, and still waits, asks again within so long."""


class WantedNames:
    """The groups that ranks have asked for and are not in yet."""

    def __init__(self) -> None:
        self._refused_at: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._refused_at])

    def waits(self, group: str) -> None:
        """A rank has a seat in the formation of a group."""
        self._refused_at.setdefault(group, float("-inf"))

    def refused(self, group: str, now: float) -> None:
        """A rank was refused for now, and is to ask again."""
        self._refused_at[group] = now

    def has(self, state: GroupState, now: float) -> bool:
        """Return True if a group could open or take in a rank at once, if its name were free."""
        is_complete = state.forming is not None and state.forming.full
        return is_complete or self._is_asked_for(state.group, now)

    def forget_if_unwanted(self, state: GroupState, now: float) -> None:
        """Drop a name for which nobody waits any more."""
        if state.forming is None and not self._is_asked_for(state.group, now):
            self._refused_at.pop(state.group, None)

    def _is_asked_for(self, group: str, now: float) -> bool:
        return now <= self._refused_at.get(group, float("-inf")) + ASKS_AGAIN_SECONDS


_SHOWN = 2
_REMEMBERED = 16


class RecentNodes:
    """The data addresses of the nodes that registered last."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}  # by node, the newest last

    def add(self, node: str, address: str) -> list[str]:
        """Note a node; return the addresses of some of other machines that came just before it."""
        self._addresses.pop(node, None)
        host, _ = parse_address(address)
        known = dict.fromkeys(self._addresses.values())
        others = [each for each in known if parse_address(each)[0] != host]
        self._addresses[node] = address
        if len(self._addresses) > _REMEMBERED:
            del self._addresses[next(iter(self._addresses))]
        return others[-_SHOWN:]

    def remove(self, node: str) -> None:
        """Forget a node, whose life is over."""
        self._addresses.pop(node, None)


LEASE_ENDED = "was silent for longer than its lease"
ABANDONED = "was not heard for long, as all nodes of its groups"
SIGNED_OFF = "signed off"
REMOVED = "was removed by an administrator"

RESTARTED, EVICTED = "restarted", "evicted"
_REASONS = {
    LEASE_ENDED: "lease_ended",
    ABANDONED: "abandoned",
    SIGNED_OFF: "signed_off",
    REMOVED: "removed",
}
REASONS = (*_REASONS.values(), RESTARTED, EVICTED)
"""The kinds of ends that lives of nodes have."""


def reason_of(how: str) -> str:
    """Return the kind of a life's end; whatever else is said, the others have found it dead."""
    return _REASONS.get(how, EVICTED)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as it registered, with a token of that name; how its life ended, once it is over."""

    info: NodeInfo
    registered_at: float
    lost_at: float | None = None
    lost_how: str = ""
    token: str = ""

    def is_alive_as(self, incarnation: str) -> bool:
        return self.lost_at is None and self.info.incarnation == incarnation

    def may_be_ended_by(self, incarnation: str) -> bool:
        """Return True for the node itself; anybody may end again what is over already."""
        return self.lost_at is not None or self.info.incarnation == incarnation

    def end_of(self, incarnation: str) -> str:
        """Return how the end of a life of this node is known."""
        if self.info.incarnation != incarnation:
            return "was started anew"
        return self.lost_how or LEASE_ENDED

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which :meth:`from_dict` reads."""
        data = {**asdict(self), "version": self.info.version}  # twice, as older replicas read it
        return {name: data[name] for name in data if name != "token" or self.token}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NodeRecord:
        """Return the record that :meth:`to_dict` wrote.

        Raises:
            KeyError, TypeError: it is damaged.
        """
        content = dict(data)
        info = {"version": content.pop("version"), **content.pop("info")}
        return cls(NodeInfo(**info), **content)


@dataclass(frozen=True, slots=True)
class Admission:
    """The grant of a registration; ``replaced`` is an earlier incarnation that it ends."""

    record: NodeRecord
    replaced: NodeInfo | None = None


def admit(
    existing: NodeRecord | None, *, lease_alive: bool, applicant: NodeRecord
) -> Admission | AllfoldError:
    """Decide on a registration.

    A restarted agent comes back at once: it has the addresses of its earlier incarnation, which
    cannot be alive any more. Two agents that were given one name by mistake are told apart by
    their addresses, and the second one is refused. Addresses are believed: whoever has the join
    token may name those of another node (docs/security.md).

    A life that is over does not begin again: its groups go on without it.
    """
    if existing is None:
        return Admission(applicant)
    is_same_life = existing.info.incarnation == applicant.info.incarnation
    if existing.lost_at is not None:
        return _life_is_over(existing) if is_same_life else Admission(applicant)
    if is_same_life:
        return Admission(replace(applicant, registered_at=existing.registered_at))
    if lease_alive and not _same_place(existing.info, applicant.info):
        return _name_is_taken(existing.info, applicant.info)
    return Admission(applicant, replaced=existing.info)


def _same_place(one: NodeInfo, other: NodeInfo) -> bool:
    return (one.control_url, one.data_address) == (other.control_url, other.data_address)


def _life_is_over(existing: NodeRecord) -> AllfoldError:
    node, how = existing.info.node, existing.end_of(existing.info.incarnation)
    return Evicted(
        f"this life of node {node} is over, as it {how}; its agent registers as a new incarnation",
        node=node,
        how=how,
    )


def _name_is_taken(holder: NodeInfo, applicant: NodeInfo) -> AllfoldError:
    return MultipleRegister(
        f"node name {holder.node} is in use by the agent at {holder.control_url} (data "
        f"{holder.data_address}); the agent at {applicant.control_url} (data "
        f"{applicant.data_address}) needs another name",
        node=holder.node,
        holder={"control_url": holder.control_url, "data_address": holder.data_address},
        applicant={"control_url": applicant.control_url, "data_address": applicant.data_address},
    )
