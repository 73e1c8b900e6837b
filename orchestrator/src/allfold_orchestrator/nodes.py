"""What is known of a node, and whether an agent may use a node's name."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from allfold_core.errors import AllfoldError, MultipleRegister
from allfold_orchestrator.group_state import NodeInfo


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as it registered; ``lost_at`` is set once its lease ended or it left."""

    info: NodeInfo
    version: str
    registered_at: float
    lost_at: float | None = None

    def is_alive_as(self, incarnation: str) -> bool:
        return self.lost_at is None and self.info.incarnation == incarnation

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> NodeRecord:
        data: dict[str, Any] = json.loads(text)
        return cls(**{**data, "info": NodeInfo(**data["info"])})


@dataclass(frozen=True, slots=True)
class Admission:
    """The node may register; ``replaced`` is its earlier life, if that was not over yet."""

    record: NodeRecord
    replaced: NodeInfo | None = None


def admit(
    existing: NodeRecord | None, *, lease_alive: bool, applicant: NodeRecord
) -> Admission | AllfoldError:
    """Decide on a registration.

    A restarted agent comes back at once: it has the addresses of its earlier life, so that one
    cannot be alive any more. Two agents that were given one name by mistake are told apart by
    their addresses, and the second one is refused.
    """
    if existing is None or existing.lost_at is not None:
        return Admission(applicant)
    if existing.info.incarnation == applicant.info.incarnation:
        return Admission(replace(applicant, registered_at=existing.registered_at))
    if lease_alive and not _same_place(existing.info, applicant.info):
        return _name_is_taken(existing.info, applicant.info)
    return Admission(applicant, replaced=existing.info)


def _same_place(one: NodeInfo, other: NodeInfo) -> bool:
    return (one.control_url, one.data_address) == (other.control_url, other.data_address)


def _name_is_taken(holder: NodeInfo, applicant: NodeInfo) -> AllfoldError:
    return MultipleRegister(
        f"node name {holder.node} is in use by the agent at {holder.control_url} (data "
        f"{holder.data_address}); the agent at {applicant.control_url} (data "
        f"{applicant.data_address}) needs another name",
        node=holder.node,
        holder={"control_url": holder.control_url, "data_address": holder.data_address},
        applicant={"control_url": applicant.control_url, "data_address": applicant.data_address},
    )
