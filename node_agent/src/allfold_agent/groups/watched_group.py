"""A group as the watch of its links sees it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from allfold_agent.groups.agreeing_group import AgreeingGroup
from allfold_agent.groups.epoch import NodeResources
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival import codec, records
from allfold_core.survival.records import Term
from allfold_core.topology import Layout


class WatchedGroup:
    """The group as :class:`LinkWatch` sees it."""

    def __init__(self, group: AgreeingGroup, resources: NodeResources) -> None:
        self._group = group
        self.rates = group.edges.rates
        self.compare = resources.workers.submit

    @property
    def term(self) -> Term:
        return self._group.agreement.term

    @property
    def record(self) -> records.Epoch:
        return self._group.current.record

    def tell_rates(self, node: str, rates: Mapping[str, float]) -> None:
        self._group.send(node, LinkMessageType.RATES, codec.pack_rates(rates))

    def arrange(self, layout: Layout) -> None:
        self._group.event(partial(self._group.agreement.arrange, layout))
