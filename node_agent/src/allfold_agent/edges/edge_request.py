"""The request with which a peer opens an edge."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote, urlencode

from allfold_agent.http.server import whole_number
from allfold_core.errors import InvalidArgument

_PARAMETERS = frozenset({"from_frame", "lane", "lives"})
_LONGEST_NAME = 256


class Lane(Enum):
    """The kind of traffic of an edge. Messages must not wait behind ops, nor ops behind them."""

    OPS = "ops"
    PAIRS = "pairs"
    SHORT = "short"


@dataclass(frozen=True, slots=True)
class EdgeRequest:
    """The directed link that a peer asks for, and the first of its frames that it has not got.

    Attributes:
        group: its name.
        opening: tells this opening of that name from others.
        src: the name of the node that sends.
        dst: the name of the node that receives, which asks for the edge.
        lives: of these two nodes in the group, as far as it knows them. One that was restarted, or
            has come back, numbers its frames anew.
    """

    group: str
    opening: int
    src: str
    dst: str
    from_frame: int = 0
    lane: Lane = Lane.OPS
    lives: tuple[str, str] = ("", "")

    @property
    def target(self) -> str:
        """The request target that :meth:`parse` reads."""
        group, src, dst = (quote(name, safe="") for name in (self.group, self.src, self.dst))
        parameters = {
            "from_frame": self.from_frame,
            "lane": self.lane.value,
            "lives": ",".join(self.lives),
        }
        edge = f"/v1/groups/{group}/openings/{self.opening}/edges/{src}/{dst}"
        return f"{edge}?{urlencode(parameters, safe=',')}"

    @classmethod
    def parse(
        cls, group: str, opening: str, src: str, dst: str, query: dict[str, str]
    ) -> EdgeRequest:
        """The request of a target's parts; :class:`InvalidArgument` names the bad one."""
        for what, name in (("group", group), ("src", src), ("dst", dst)):
            if not 0 < len(name) <= _LONGEST_NAME:
                raise InvalidArgument(
                    f"the {what} of an edge is a name of 1 to {_LONGEST_NAME} characters",
                    group=group[:_LONGEST_NAME],
                )
        if unknown := sorted(query.keys() - _PARAMETERS):
            raise InvalidArgument(f"unknown parameters of an edge: {', '.join(unknown)}")
        if src == dst:
            raise InvalidArgument(f"an edge from node {src} to itself", group=group)
        return cls(
            group,
            whole_number("opening", opening, 2**32),
            src,
            dst,
            whole_number("from_frame", query.get("from_frame", "0"), 2**64),
            _lane(query.get("lane", Lane.OPS.value)),
            _lives(query.get("lives", ",")),
        )


def _lane(name: str) -> Lane:
    try:
        return Lane(name)
    except ValueError:
        known = ", ".join(lane.value for lane in Lane)
        raise InvalidArgument(f"an edge has the lane {known}, not {name[:50]!r}") from None


def _lives(text: str) -> tuple[str, str]:
    src, comma, dst = text.partition(",")
    if not comma or "," in dst:
        raise InvalidArgument(f"lives are those of src and dst, not {text[:100]!r}")
    return src, dst
