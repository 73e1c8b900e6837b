"""The request for the result of an op, made by a node that does not have it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from allfold_agent.http.server import whole_number


@dataclass(frozen=True, slots=True)
class ResultRequest:
    """The name of a result: the op of a group, and the packed stamp of the attempt that made it."""

    group: str
    opening: int
    seq: int
    stamp: int

    @property
    def target(self) -> str:
        """The request target that :meth:`parse` reads."""
        group = quote(self.group, safe="")
        return f"/v1/groups/{group}/openings/{self.opening}/ops/{self.seq}/results/{self.stamp}"

    @classmethod
    def parse(cls, group: str, opening: str, seq: str, stamp: str) -> ResultRequest:
        """The request of a target's parts; :class:`InvalidArgument` names the bad one."""
        return cls(
            group,
            whole_number("opening", opening, 2**32),
            whole_number("seq", seq, 2**63),
            whole_number("stamp", stamp, 2**64),
        )
