"""Results that this node gets from others that have them already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from allfold_agent.execution.op import Op
from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.outcomes import breakdown
from allfold_agent.groups.result_transfer import ResultRequest
from allfold_agent.runtime.buffers import Buffer
from allfold_agent.runtime.threads import start_thread
from allfold_core.errors import AllfoldError, MismatchError, ServiceError
from allfold_core.survival.instructions import Fetch

if TYPE_CHECKING:
    from allfold_agent.groups.group import Group

_LEAST_PATIENCE = 5.0


def is_wanted(op: Op, order: Fetch) -> bool:
    """Return True unless something else was agreed upon for the op since, or it is here."""
    return op.running and op.stamp == order.stamp and not op.ended and op.result is None


class Fetches:
    """Fetches results of the ops of one group, each in a thread of its own: that is rare.

    Args:
        group: takes what has come.
    """

    def __init__(self, group: Group, resources: NodeResources) -> None:
        self._group = group
        self._plan = group.plan
        self._members = group.members
        self._resources = resources

    def prepare(self, op: Op, order: Fetch, nbytes: int) -> Callable[[], None]:
        """Return what gets a result of so many bytes from the first node that gives it."""
        buffer = self._resources.buffers.take(nbytes)

        def start() -> None:
            try:
                name = f"allfold-fetch-{self._plan.group}-{op.seq}"
                start_thread(partial(self._run, op, order, buffer, nbytes), name)
            except ServiceError as error:
                buffer.release()
                self.fail(op, order, error)

        return start

    def _run(self, op: Op, order: Fetch, buffer: Buffer, nbytes: int) -> None:
        group, opening = self._plan.group, self._plan.epoch
        request = ResultRequest(group, opening, order.seq, order.stamp.pack())
        addresses = [self._members[node].data_address for node in self._in_turn(order.holders)]
        wanted = partial(is_wanted, op, order)
        least = monotonic() + _LEAST_PATIENCE
        view = buffer.view[:nbytes]
        try:
            is_here = self._resources.fetch(
                addresses, request, view, wanted, lambda: max(op.deadline, least)
            )
        except AllfoldError as error:
            buffer.release()
            self.fail(op, order, error)
            return
        if is_here:
            self._group.event(partial(self._take, op, order, buffer))
        else:
            buffer.release()

    def _in_turn(self, holders: Sequence[str]) -> Sequence[str]:
        """The holders, from another one on for each node that asks: they share the work."""
        first = sorted(self._members).index(self._resources.node) % len(holders)
        return [*holders[first:], *holders[:first]]

    def _take(self, op: Op, order: Fetch, buffer: Buffer) -> None:
        if is_wanted(op, order):
            op.result = buffer
            self._group.agreement.fetched(order.seq, order.stamp)
        else:
            buffer.release()

    def fail(self, op: Op, order: Fetch, error: Exception) -> None:
        """Other nodes have the result of an op, and this one cannot get it: its ranks fail alone.

        The result that other ranks were given cannot be taken back. If a rank's own call is the
        cause, the rank is told so and stays in the group; the group goes on without the other ranks
        of this node.
        """
        node = self._resources.node
        told: AllfoldError = breakdown(self._plan.group, node, op.seq, error)
        if isinstance(error, MismatchError):
            told = error

        def take() -> None:
            if is_wanted(op, order):
                op.error = told
                self._group.agreement.fetched(order.seq, order.stamp)

        self._group.event(take)
        for session in () if told is error else list(op.calls):
            self._group.rank_ended(session, f"could not be given the result of op {op.seq}")
