"""The plan of one opening of a group: who is in the group, and how its ops are to be run.

The orchestrator makes the plan; agents and ranks follow it. Everything that two nodes must decide
in the same way (order, roots, strategies) is read from the plan and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from allfold_core.group_options import GroupOptions
from allfold_core.schema import OPENING_AS_EPOCH, PLAN
from allfold_core.topology import AS_OPENED, Layout, LinkModel, Member


@dataclass(frozen=True)
class Plan:
    """One opening of a group's name.

    Attributes:
        group: the group's name.
        opening: which opening of the name it is; grows with each and is never used twice.
        world_size: the number of ranks, over all nodes.
        members: the nodes in ring order; a *node index* of a schedule is an index into it.
        tree_order: node indices from the root of a tree downwards, neighbours of one device type
            and zone next to each other.
        links: the link model from which ``auto`` decides.
        options: those of the group, on which its ranks have agreed.
        sessions: the session of each rank, by rank number; identifies the rank after a loss has
            changed the numbers.
        generation: the generation of the orchestrator's store when the plan was made, see
            ``Stamp``.
        layout: gives the order of the nodes; not part of the JSON form, because the nodes agree on
            it only after the group was opened.
        schema: the number of the plan's JSON form, see :mod:`allfold_core.schema`.
    """

    group: str
    opening: int
    world_size: int
    members: tuple[Member, ...]
    tree_order: tuple[int, ...]
    links: LinkModel
    options: GroupOptions
    sessions: tuple[str, ...] = ()
    generation: int = 0
    layout: Layout = AS_OPENED
    schema: int = PLAN.number

    __pydantic_config__ = OPENING_AS_EPOCH

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
            "epoch": self.opening,
            "world_size": self.world_size,
            # Not asdict, which copies every value of thousands of members on its own.
            "members": [{**vars(member), "ranks": list(member.ranks)} for member in self.members],
            "tree_order": list(self.tree_order),
            "links": asdict(self.links),
            **self.options.to_dict(),
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
            opening=data["epoch"],
            world_size=data["world_size"],
            members=members,
            tree_order=tuple(data["tree_order"]),
            links=LinkModel(**data["links"]),
            options=GroupOptions.from_dict(data),
            sessions=tuple(data["sessions"]),
            generation=data["generation"],
        )
