"""The request with which a peer opens an edge."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote

from allfold_agent.http.server import whole_number
from allfold_core.errors import InvalidArgument


class Lane(Enum):
    """The kind of traffic of an edge. Messages must not wait behind ops, nor ops behind them."""

    OPS = "ops"
    PAIRS = "pairs"


@dataclass(frozen=True, slots=True)
class EdgeRequest:
    """The directed link that a peer asks for, and the first of its frames that it has not got."""

    group: str
    epoch: int
    src: int
    dst: int
    from_frame: int = 0
    lane: Lane = Lane.OPS

    @property
    def target(self) -> str:
        """The request target that :meth:`parse` reads."""
        group = quote(self.group, safe="")
        edge = f"/v1/groups/{group}/epochs/{self.epoch}/edges/{self.src}/{self.dst}"
        return f"{edge}?from_frame={self.from_frame}&lane={self.lane.value}"

    @classmethod
    def parse(
        cls, group: str, epoch: str, src: str, dst: str, query: dict[str, str]
    ) -> EdgeRequest:
        """The request of a target's parts; :class:`InvalidArgument` names the bad one."""
        if not 0 < len(group) <= 256:
            raise InvalidArgument("a group's name has 1 to 256 characters", group=group[:256])
        if unknown := sorted(query.keys() - {"from_frame", "lane"}):
            raise InvalidArgument(f"unknown parameters of an edge: {', '.join(unknown)}")
        request = cls(
            group,
            # The widths of the frame header's fields.
            whole_number("epoch", epoch, 2**32),
            whole_number("src", src, 2**31),
            whole_number("dst", dst, 2**31),
            whole_number("from_frame", query.get("from_frame", "0"), 2**64),
            _lane(query.get("lane", Lane.OPS.value)),
        )
        if request.src == request.dst:
            raise InvalidArgument(f"an edge from node {src} to itself", group=group)
        return request


def _lane(name: str) -> Lane:
    try:
        return Lane(name)
    except ValueError:
        known = ", ".join(lane.value for lane in Lane)
        raise InvalidArgument(f"an edge has the lane {known}, not {name[:50]!r}") from None
