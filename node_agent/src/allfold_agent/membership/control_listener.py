"""This node at its end of the control link: what comes is passed on, what goes is collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allfold_agent.groups.group import NodeGroup
from allfold_agent.membership.draining import Draining
from allfold_agent.membership.group_terms import GroupTerms
from allfold_agent.membership.witness import Witness
from allfold_control.messages import Progress


class NodeOnControlLink:
    """The control link's listener: terms go to the groups, acquittals to the witness.

    Args:
        terms: of the groups.
        witness: of the other nodes.
        groups: returns the groups that are open on this node.
        end_life: called when the orchestrator has evicted this node, with how that is known.
        draining: of this node.
    """

    def __init__(
        self,
        terms: GroupTerms,
        witness: Witness,
        groups: Callable[[], list[NodeGroup]],
        end_life: Callable[[str], None],
        draining: Draining,
    ) -> None:
        self.held = terms.held
        self.has_unsaid = terms.has_unsaid
        self.term = terms.term
        self.evicted = end_life
        self.cleared = witness.cleared
        self.lag = witness.lag
        self.heard = witness.heard
        self.drain = draining.begin
        self._terms = terms
        self._witness = witness
        self._groups = groups
        self._draining = draining

    def is_draining(self) -> bool:
        return self._draining.reason is not None

    def registered(self, generation: int, out: Sequence[str]) -> None:
        self._terms.registered(generation, out)
        self._witness.again()

    def progress(self) -> list[Progress]:
        return [_progress(group) for group in self._groups()]


def _progress(group: NodeGroup) -> Progress:
    records = group.lanes.records
    records.harvest()  # now and then, as nobody else may look
    return Progress(
        group=group.name,
        epoch=group.opening,
        last_seq=max(records.last_called().values(), default=-1),
        in_flight=len(group.table.in_flight) + len(records.in_flight()),
    )
