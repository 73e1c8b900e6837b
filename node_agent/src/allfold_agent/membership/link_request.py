"""The request with which an agent opens a link to another one."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from allfold_core.errors import InvalidArgument, LocalError

CONFLICT = 409


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """The agent that is asked for.

    Attributes:
        node: its name.
        incarnation: the life of it that is meant; empty for any.
    """

    node: str
    incarnation: str = ""

    @property
    def target(self) -> str:
        """The request target whose query :meth:`parse` reads."""
        return f"/v1/link?{urlencode({'node': self.node, 'incarnation': self.incarnation})}"

    @classmethod
    def parse(cls, query: dict[str, str]) -> LinkRequest:
        """The request of a target's query; :class:`InvalidArgument` names what is wrong with it."""
        if unknown := sorted(query.keys() - {"node", "incarnation"}):
            raise InvalidArgument(f"unknown parameters of a link: {', '.join(unknown)}")
        if not query.get("node"):
            raise InvalidArgument("a link needs the name of the node that is asked for")
        return cls(query["node"], query.get("incarnation", ""))

    def check(self, node: str, incarnation: str) -> None:
        """Return if this is the agent that is asked for.

        Raises:
            LocalError: another node has its address now, or another incarnation its name.
        """
        if self.node != node or self.incarnation not in ("", incarnation):
            raise LocalError(
                f"this is node {node}, incarnation {incarnation}, and not node {self.node}, "
                f"incarnation {self.incarnation or 'any'}",
                http_status=CONFLICT,
                node=node,
                incarnation=incarnation,
            )
