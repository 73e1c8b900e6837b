"""Calls whose memory is still in use by the GPU of their rank, and those behind them.

They begin in the order in which their process made them. A deferred call counts as not made,
because its data are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from allfold_agent.gpu.completions import FencePoller
from allfold_agent.groups.deadlines import INCIDENTS_AT_ONCE
from allfold_agent.local.rank_connection import (
    CallMessage,
    DeferredCall,
    LocalMembership,
    RankConnection,
)
from allfold_agent.runtime.reactor import Reactor
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    PeerMissing,
    RegisterNotFirstOperation,
)
from allfold_core.protocol.rank_messages import (
    MAX_OPEN_MESSAGES,
    MAX_OPEN_OPS,
    Message,
    OpMessage,
    Outcome,
    P2PMessage,
    pack_hold,
)
from allfold_core.survival.reports import Doubt, Reason
from allfold_core.verdict import name_ranks

_JUDGE_AGAIN_SECONDS = 1.0
_LOOK_AT_ALL_SECONDS = 0.01
_LONGEST_LOOK_SECONDS = 3600.0
# Of one process in one group.
MAX_OPEN_CALLS = MAX_OPEN_OPS + MAX_OPEN_MESSAGES
_TOO_MANY = (
    "{} calls of this process wait for its GPU, the most there may be; wait for some of them first"
)

Submit = Callable[[RankConnection, CallMessage, float], None]


class DeferredCalls:
    """Holds calls back until their data are there. For the reactor's thread only.

    Args:
        reactor: whose thread it is.
        poller: notices when the GPU of a rank has come to a call.
        submit: begins a call that was made at a time (monotonic).
    """

    def __init__(self, reactor: Reactor, poller: FencePoller, submit: Submit) -> None:
        self._reactor = reactor
        self._poller = poller
        self._submit = submit

    def add(self, process: RankConnection, message: CallMessage) -> None:
        """Begin a call as soon as those before it have begun and its data are there.

        A process that defers more calls than it may have in flight is refused the next one.
        """
        most = MAX_OPEN_CALLS * max(1, len(process.memberships))
        if len(process.deferred) >= most:
            reject(process, message, InvalidArgument(_TOO_MANY.format(most)))
            return
        process.deferred.append(DeferredCall(message, monotonic()))
        if (membership := process.memberships.get(message.group)) is not None:
            membership.group.deferred.add((membership.session, message.seq))
        if len(process.deferred) == 1:
            self._await_gpu(process)

    def _await_gpu(self, process: RankConnection) -> None:
        """Continue when the first deferred call may begin, or one of them is late or has failed."""
        first = process.deferred[0].message
        look_at_all = 0.0

        def can_go_on() -> bool:
            nonlocal look_at_all
            if process.is_closed or process.has_passed(first.fence):
                return True
            now = monotonic()
            if now < look_at_all:
                return False
            look_at_all = now + _LOOK_AT_ALL_SECONDS
            return any(
                _needs_attention(process, deferred, now) for deferred in list(process.deferred)
            )

        self._poller.when(
            can_go_on,
            lambda _: self._reactor.call(lambda: self._release(process)),
            _LONGEST_LOOK_SECONDS,
        )

    def _release(self, process: RankConnection) -> None:
        """Begin the calls whose data are there; settle those that are late or have failed."""
        try:
            while process.deferred and process.has_passed(process.deferred[0].message.fence):
                # Removed first: what counts as read ends before the first call that is deferred.
                deferred = self._remove(process, process.deferred[0])
                self._submit(process, deferred.message, deferred.called)
            self._settle_overdue(process)
        finally:
            if process.deferred:
                self._await_gpu(process)

    def _settle_overdue(self, process: RankConnection) -> None:
        """Refuse calls whose op has failed; have those that are late judged, some at a time."""
        now, incidents = monotonic(), 0
        for deferred in list(process.deferred):
            message, membership = deferred.message, process.memberships.get(deferred.message.group)
            failed = _failure_of(membership, message)
            if failed is None and membership is not None and now >= deferred.due:
                deferred.due = now + _JUDGE_AGAIN_SECONDS
                if waits_for := membership.group.deadlines.waits_for():
                    held_for = membership.group.deadlines.held_for(now)
                    process.send(pack_hold(message.group, waits_for, held_for))
                elif isinstance(message, P2PMessage):
                    failed = _late(membership, message), message.view
                elif incidents < INCIDENTS_AT_ONCE:
                    incidents += 1
                    late = Doubt(message.seq, Reason.DEADLINE, message.timeout)
                    membership.group.runs.doubt([late])
            if failed is not None:
                self._remove(process, deferred)
                refuse(process, message, *failed)
                if membership is not None and isinstance(message, OpMessage):
                    membership.group.calls.note_refusal(membership.session, message.seq)

    @staticmethod
    def _remove(process: RankConnection, deferred: DeferredCall) -> DeferredCall:
        process.deferred.remove(deferred)
        membership = process.memberships.get(deferred.message.group)
        if membership is not None:
            membership.group.deferred.discard((membership.session, deferred.message.seq))
        return deferred


def refuse(
    process: RankConnection, message: CallMessage, error: AllfoldError, epoch: int | None = None
) -> None:
    """Send a process the error of its call.

    Args:
        epoch: in which this leaves the rank; by default the one that it knows.
    """
    ordinal, body = message.view if epoch is None else epoch, error.to_dict()
    process.send_outcome(Outcome(Message.FAILED, message.group, message.seq, ordinal, body=body))


def reject(process: RankConnection, message: CallMessage, error: AllfoldError) -> None:
    """Refuse a call that its group has not seen, and have the group fail the op."""
    refuse(process, message, error)
    membership = process.memberships.get(message.group)
    if membership is not None and isinstance(message, OpMessage):
        membership.group.calls.abandon(membership.session, message.seq, error)


def _needs_attention(process: RankConnection, deferred: DeferredCall, now: float) -> bool:
    """Return True if a deferred call is late or can only fail."""
    membership = process.memberships.get(deferred.message.group)
    return now >= deferred.due or _failure_of(membership, deferred.message) is not None


def _failure_of(
    membership: LocalMembership | None, message: CallMessage
) -> tuple[AllfoldError, int] | None:
    """Return the error of a deferred call that can only fail, and the epoch that goes with it.

    ``None`` if it may still begin.
    """
    if membership is None:
        left = RegisterNotFirstOperation("this process has left the group of its call")
        return left, message.view
    group = membership.group
    if isinstance(message, P2PMessage):
        return None if group.evicted is None else (group.evicted, message.view)
    # The poller's thread, which all completions of GPUs need, must not wait here.
    return group.failed_call(message.seq, message.view)


def _late(membership: LocalMembership, message: P2PMessage) -> PeerMissing:
    """Return the error of a send or receive whose tensor the GPU still uses."""
    epoch = membership.epoch
    ranks = [epoch.rank_of(membership.session)] if epoch else []
    return PeerMissing(
        f"the GPU of {name_ranks(ranks)} has not come to the call within {message.timeout:g} s: "
        "it is still busy with the work that was queued before",
        missing_ranks=ranks,
        timeout=message.timeout,
    )
