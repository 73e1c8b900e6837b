"""The calls of one rank in a group: prepared once and repeated for those that are alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from time import monotonic
from typing import Any, TypeVar, cast

from allfold._calls.call import AUTO, CollectiveCall, EpochView, P2PCall, check_one_dtype
from allfold._calls.options import OPTIONS, agreed, name_check
from allfold._calls.template import Likeness, Template, likeness
from allfold._channel import CallChannel
from allfold._handles.work import Work
from allfold._membership import RankMembership
from allfold._process.draining import LeaveRequest
from allfold._process.settings import GroupSettings
from allfold._staging.choice import PreparedCall
from allfold_core.errors import AllfoldError, InvalidArgument
from allfold_core.group_options import checked_seconds
from allfold_core.operations import Fingerprint
from allfold_core.protocol.rank_messages import FIRST_PAIR

_REMEMBERED = 512  # calls that are unlike each other
# Instead of the result of a call that has to be looked at as if there were none like it.
_UNCACHED = object()

Method = TypeVar("Method", bound=Callable[..., Any])


def collective(describe: Method) -> Method:
    """Make a method do the call that it describes: it returns the call, and its epoch.

    A call that is like an earlier one is not described again.
    """
    check = name_check(describe)

    @wraps(describe)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        number = self.next_op
        try:
            key = likeness(describe, given, named)
            if key is not None:
                result = self._repeat(key, given, named)
                if result is not _UNCACHED:
                    return result
            check(named)
            options = {name: value for name, value in named.items() if name in OPTIONS}
            waits = not options.pop("async_op", False)
            view, described = describe(self, *given, **named)
            number = self.next_op  # to describe a call may have taken an op of its own
            work = self._start(view, described, key, (*given, *named.values()), **options)
            return work.given(waits=waits)
        except BaseException as error:
            self._see_to_failed(describe.__name__, error, number)
            raise

    return cast(Method, call)


class Calling(ABC):
    """Hands the calls of one rank to the channel; those that are alike are described once."""

    def __init__(
        self, membership: RankMembership, settings: GroupSettings, draining: LeaveRequest
    ) -> None:
        self.name = membership.view.group
        self.timeout = membership.timeout
        self.wire = settings.wire
        self.membership = membership
        self._draining = draining
        options = settings.options
        self._is_elastic = options.is_elastic or options.on_loss == "shrink"
        self._connection = membership.session.connection
        self._channel = CallChannel(membership)
        self._prepared: dict[Likeness, PreparedCall] = {}
        self._series: dict[str, Fingerprint] = {}  # of rounds, by the name of their feedback

    @property
    def _view(self) -> EpochView:
        """The epoch whose numbers a call has: that of the time of the call."""
        return self.membership.view

    @property
    def next_op(self) -> int:
        """The number of the next collective that this rank calls."""
        return self._channel.next_op

    @abstractmethod
    def _see_to_members(self) -> None:
        """Leave before a collective if this rank is to; wait for others where too few are left."""

    def _repeat(self, key: Likeness, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Do a call that is like an earlier one, if nothing else has to be seen to before.

        Args:
            key: what it has in common with calls that are like it.
            given, named: its arguments.

        Returns:
            Its result or handle; ``_UNCACHED`` if it has to be looked at as if there were none.
        """
        if (prepared := self._prepared.get(key)) is None:
            return _UNCACHED
        now = monotonic()
        if prepared.recipe is not None:
            self._connection.glance(now)
        if not self._may_repeat(prepared):
            return _UNCACHED
        if not named:
            return self._channel.repeat(prepared, given, self.timeout, now, waits=True)
        seconds = self._seconds(named.get("timeout"))
        given, waits = (*given, *named.values()), not named.get("async_op")
        return self._channel.repeat(prepared, given, seconds, now, waits=waits)

    def _may_repeat(self, prepared: PreparedCall) -> bool:
        """Return True unless :meth:`_start` would do something else than before."""
        membership, epochs = self.membership, self.membership.epochs
        return (
            prepared.view is epochs.view
            and prepared.lane is epochs.lanes.of(prepared.view.epoch)
            and not membership.left
            and self._connection.is_usable
            and self._draining.reason is None
            and not epochs.awaits_others
        )

    def _start(
        self,
        view: EpochView,
        call: CollectiveCall,
        key: Likeness | None,
        given: Sequence[Any],
        *,
        timeout: float | None = None,
        strategy: str = AUTO,
        wire: str | None = None,
        feedback: str | None = None,
    ) -> Work:
        """Start a collective.

        Args:
            key: what it has in common with calls that are like it.
            given: its arguments.
        """
        self._see_to_members()
        self.membership.check()
        check_one_dtype(call.inputs + call.outputs)
        packed = agreed(call.fingerprint, strategy, wire, feedback, self.wire)
        work = self._channel.start_op(view, call, packed, self._seconds(timeout))
        if key is not None and not call.is_unlike:
            self._remember(key, view, call, packed, given)
        return work

    def _remember(
        self,
        key: Likeness,
        view: EpochView,
        call: CollectiveCall,
        packed: bytes,
        given: Sequence[Any],
    ) -> None:
        """Prepare for calls that are like this one."""
        template = Template.of(call, given)
        if template is None:
            return
        if len(self._prepared) >= _REMEMBERED:
            self._prepared.clear()
        lane = self.membership.epochs.lanes.of(view.epoch)
        self._prepared[key] = PreparedCall(view, packed, template, lane)

    def _exchange(
        self, view: EpochView, call: P2PCall, timeout: float | None, async_op: bool
    ) -> Any:
        """Start a send or a receive, and wait for it unless the caller wants to do so."""
        number = self._channel.next_pair
        try:
            seconds = self._seconds(timeout)
            self.membership.check()
            work = self._channel.start_pair(view, call, seconds)
            return work.given(waits=not async_op)
        except BaseException as error:
            if self._channel.next_pair > number:
                self._note_in_flight(error, f"message {number - FIRST_PAIR}")
            raise

    def _check_series(self, feedback: str | None, call: Fingerprint) -> None:
        """Refuse another tensor under the name of a series: it is owed nothing."""
        first = self._series.get(feedback, call) if isinstance(feedback, str) else call
        if (first.dtype, first.shape) != (call.dtype, call.shape):
            raise InvalidArgument(
                f"feedback={feedback!r} is the name of rounds of {first.label}{list(first.shape)}, "
                f"and this one is of {call.label}{list(call.shape)}: what rounding has cost those "
                "cannot be added to it; give it a name of its own"
            )

    def _see_to_failed(self, call: str, error: BaseException, number: int) -> None:
        """See to a collective that ends with an error.

        What was called is in flight, and the error says so. Of what could not be called for a
        reason of this rank alone, the others are told.

        Args:
            call: the name of the collective.
            number: ``next_op`` as it was before the call.
        """
        if self.next_op > number:
            self._note_in_flight(error, f"op {number}")
        elif not self.membership.epochs.awaits_others:
            # Where too few ranks are left, the others wait at a boundary, and call no op.
            self._channel.abandon(call, error)

    def _note_in_flight(self, error: BaseException, what: str) -> None:
        """See to the results of calls that nobody has a handle of, and say so."""
        self._channel.watch()
        if not isinstance(error, AllfoldError):
            error.add_note(
                f"allfold: the interrupted call is {what} of group '{self.name}'. It counts: the "
                "other ranks go on with it, and its result comes to its tensor by itself."
            )

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else checked_seconds("timeout", timeout)
