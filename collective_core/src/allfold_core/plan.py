"""The plan of one epoch: who is in the group, and how its ops are to be run.

The orchestrator makes the plan; agents and ranks follow it. Everything that two nodes must decide
in the same way (order, roots, strategies) is read from the plan and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from allfold_core.schema import PLAN

OnLoss = Literal["raise", "shrink"]
"""The treatment of an op that a loss interrupts: it fails, or the remaining ranks repeat it."""

Joins = Literal["any", "commit"]
"""The points at which ranks join or leave a running group: between any two ops, or at commits of
all ranks."""


@dataclass(frozen=True)
class LinkModel:
    """The cost of a link, in the terms of the cost model.

    Attributes:
        latency: α, seconds for one step, software included.
        overhead: o, seconds for each further message inside one step.
        seconds_per_byte: β, the inverse of one direction's bandwidth.
        fold_seconds_per_byte: γ, the inverse of the fold rate.
        shared_cores: the cores of the machine that all nodes share; 0 where they are on several.
    """

    latency: float = 150e-6
    overhead: float = 40e-6
    seconds_per_byte: float = 1 / 1.1e9
    fold_seconds_per_byte: float = 1 / 5e9
    shared_cores: int = 0


class SlowLink(NamedTuple):
    """One direction between two nodes that was measured to be much slower than the others.

    Attributes:
        source: the name of the node that sends.
        destination: that of the node that receives.
        seconds_per_byte: what was measured.
    """

    source: str
    destination: str
    seconds_per_byte: float


@dataclass(frozen=True)
class Layout:
    """The order of the nodes in rings and trees, if it differs from that at the opening.

    Attributes:
        ring: the names of the nodes in the order of ``Plan.members``.
        tree: the same in that of ``Plan.tree_order``.
        usual: seconds per byte of each link that is not slow.
        slow: the slow links that this order avoids, sorted.
        reason: why the order was chosen, in a sentence for people.
    """

    ring: tuple[str, ...] = ()
    tree: tuple[str, ...] = ()
    usual: float = 0.0
    slow: tuple[SlowLink, ...] = ()
    reason: str = ""


AS_OPENED = Layout()
"""The order of the group's opening, with all links alike."""


@dataclass(frozen=True)
class Member:
    """One node of the group: where it listens, what it is, and which ranks it holds.

    Attributes:
        incarnation: the name of one life of the node's agent process; "" if it is not known.
    """

    node: str
    control_url: str
    data_address: str
    ranks: tuple[int, ...]
    device_type: str = "cpu"
    zone: str = ""
    incarnation: str = ""


@dataclass(frozen=True)
class Plan:
    """One epoch of one group.

    Attributes:
        group: the group's name.
        epoch: the membership generation; grows with every change and is never used twice.
        world_size: the number of ranks, over all nodes.
        members: the nodes in ring order; a *node index* of a schedule is an index into it.
        tree_order: node indices from the root of a tree downwards, neighbours of one device type
            and zone next to each other.
        links: the link model from which ``auto`` decides.
        strategies: overrides by kind label, e.g. ``{"all_reduce": "ring"}``.
        timeout: seconds until an op fails, if the call gives no timeout.
        on_loss: what happens to an op interrupted by the loss of a rank: ``"raise"``, it fails with
            the same error on all remaining ranks; ``"shrink"``, the remaining ranks repeat it.
        min_world: the group runs no op with fewer ranks than this.
        max_world: ranks may join the running group up to this number; ``None``: no rank may join.
        joins: when they may join.
        join_timeout: seconds for which ops wait for ranks to join, if fewer than ``min_world`` are
            left in an elastic group.
        key: digest of the key that ranks need to join, see :mod:`allfold_core.group_key`; empty if
            they need none.
        sessions: the session of each rank, by rank number; identifies the rank after a loss has
            changed the numbers.
        generation: the generation of the orchestrator's store when the plan was made, see
            ``Stamp``.
        layout: gives the order of the nodes; not part of the JSON form, because the nodes agree on
            it only after the group was opened.
        schema: the number of the plan's JSON form, see :mod:`allfold_core.schema`.
    """

    group: str
    epoch: int
    world_size: int
    members: tuple[Member, ...]
    tree_order: tuple[int, ...]
    links: LinkModel
    strategies: Mapping[str, str]
    timeout: float
    on_loss: OnLoss = "raise"
    min_world: int = 1
    max_world: int | None = None
    joins: Joins = "any"
    join_timeout: float = 60.0
    sessions: tuple[str, ...] = ()
    generation: int = 0
    layout: Layout = AS_OPENED
    key: str = ""
    schema: int = PLAN.number

    @cached_property
    def _index_of_rank(self) -> dict[int, int]:
        return {rank: index for index, member in enumerate(self.members) for rank in member.ranks}

    def index_of_rank(self, rank: int) -> int:
        """The node index of the node that holds ``rank``."""
        return self._index_of_rank[rank]

    @cached_property
    def _index_of_node(self) -> dict[str, int]:
        return {member.node: index for index, member in enumerate(self.members)}

    def index_of_node(self, node: str) -> int:
        """The node index of a node by its name; ``KeyError`` where it is not a member."""
        return self._index_of_node[node]

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """The ranks of a node by its name; none where it is not a member."""
        index = self._index_of_node.get(node)
        return () if index is None else self.members[index].ranks

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which :meth:`from_dict` reads."""
        return {
            "schema": self.schema,
            "group": self.group,
            "epoch": self.epoch,
            "world_size": self.world_size,
            # Not asdict, which copies every value of thousands of members on its own.
            "members": [{**vars(member), "ranks": list(member.ranks)} for member in self.members],
            "tree_order": list(self.tree_order),
            "links": asdict(self.links),
            "strategies": dict(self.strategies),
            "timeout": self.timeout,
            "on_loss": self.on_loss,
            "min_world": self.min_world,
            "max_world": self.max_world,
            "joins": self.joins,
            "join_timeout": self.join_timeout,
            "key": self.key,
            "sessions": list(self.sessions),
            "generation": self.generation,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that :meth:`to_dict` wrote.

        Raises:
            UnknownSchema: it was written by a newer version.
        """
        data = PLAN.read(data)
        members = tuple(
            Member(**{**member, "ranks": tuple(member["ranks"])}) for member in data["members"]
        )
        return cls(
            group=data["group"],
            epoch=data["epoch"],
            world_size=data["world_size"],
            members=members,
            tree_order=tuple(data["tree_order"]),
            links=LinkModel(**data["links"]),
            strategies=dict(data["strategies"]),
            timeout=data["timeout"],
            on_loss=data["on_loss"],
            min_world=data["min_world"],
            max_world=data["max_world"],
            joins=data["joins"],
            join_timeout=data["join_timeout"],
            key=data["key"],
            sessions=tuple(data["sessions"]),
            generation=data["generation"],
        )
