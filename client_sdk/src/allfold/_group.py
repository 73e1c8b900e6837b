"""A group: the ranks that call collectives together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np

from allfold import _tensors
from allfold._calls.call import AUTO, CollectiveCall, EpochView, P2PCall, check_one_dtype
from allfold._calls.template import Likeness, Template
from allfold._channel import Channel
from allfold._collectives import UNLIKE, Collectives
from allfold._draining import Draining, Parting, by_call
from allfold._elements import itemsize_of
from allfold._membership import Membership
from allfold._options import agreed
from allfold._settings import GroupSettings
from allfold._staging.choice import Prepared
from allfold._work import Work
from allfold_core.errors import (
    AllfoldError,
    BelowMinWorld,
    InvalidArgument,
    MultipleUnregister,
    PeerMissing,
    RegisterNotFirstOperation,
    WorldChanged,
)
from allfold_core.group_options import checked_seconds
from allfold_core.protocol.rank_messages import FIRST_PAIR
from allfold_core.verdict import counted

log = logging.getLogger("allfold")

_REMEMBERED = 512  # calls that are unlike each other


class Group(Collectives):
    """The ranks of one group. Made by :func:`allfold.init`.

    Every collective is called by every rank of the group, in the same order. It writes its result
    into a tensor that it is given, and returns that tensor; with ``async_op=True`` it returns a
    :class:`allfold.Work` at once. Tensors are NumPy arrays, torch tensors on the CPU or a GPU, of
    any strides, and contiguous arrays of CuPy and its like. Those of one call are in one place, but
    ranks need not agree on it. On a GPU, a call begins after what the current stream has been given
    before, and what it is given after the call, or after ``wait``, sees the result.

    Arguments that all collectives share:
        timeout: seconds until the op fails on every rank, naming who did not come. Default: the
            group's.
        strategy: ``"ring"``, ``"tree(4)"`` ... for this op; default ``"auto"``.
        wire: how the data travels between nodes: ``"native"``, or rounded to ``"bfloat16"``,
            ``"float16"`` or ``"int8"``, with the same bits on every rank; see docs/precision.md.
            Default: the group's for reductions, ``"native"`` for whatever is only moved.
        feedback: the name of a series of calls on tensors of one shape; the rounding error of a
            lossy ``wire`` in one call is added to the next.
        async_op: return a handle instead of waiting. A rank has at most 1024 collectives of a group
            in flight: one more first waits until the oldest is done.

    A signal's handler may raise an exception in the middle of a call (Ctrl-C, a time limit). The
    group stays usable. If the other ranks can have seen the call by then, it counts: a note at the
    exception says so, :attr:`next_op` has gone on, and the result comes to the tensor by itself. If
    not, this rank has not called.

    Errors that all of them raise:
        InvalidArgument: the tensor or an argument of this rank cannot work; no data was sent. The
            others get ``PeerRefused``, unless theirs cannot work either.
        UnknownArgument: there is no argument of this name; nothing was sent.
        RegisterNotFirstOperation: the group has been left.
        MismatchError: the ranks asked for different things; the group stays usable.
        PeerRefused: a rank could not call the op; names it, and why. The group stays usable.
        PeerMissing: the deadline has passed; names the missing ranks.
        PeerLost: the op cannot be done without a rank or a node that is gone.
        AgentLost: the node agent of this machine is gone.

    In an elastic group, a collective of a rank that was told to leave (by SIGTERM, by a node that
    drains, or by :meth:`drain`) is not done: the rank leaves all its groups, and ``Drained`` ends
    the program with status 0. With ``joins="commit"`` it is done, and :meth:`edge` leaves.
    """

    def __init__(
        self,
        membership: Membership,
        settings: GroupSettings,
        draining: Draining,
        on_left: Callable[[Group], None],
    ) -> None:
        self.name = membership.view.group
        self.timeout = membership.timeout
        self.wire = settings.wire
        self._options = options = settings.options
        self.on_loss, self.elastic, self.joins = options.on_loss, options.is_elastic, options.joins
        # Called when others have come in for whom too few ranks had waited.
        self.on_joined: Callable[[Group], None] = lambda _: None
        self._wants_to_leave = False
        self.membership = membership
        self._draining = draining
        self._connection = membership.session.connection
        self._channel = Channel(membership)
        self._prepared: dict[Likeness, Prepared] = {}
        self._on_left = on_left

    def __repr__(self) -> str:
        return f"<allfold.Group {self.name!r}: rank {self.rank} of {self.world_size}>"

    @property
    def _view(self) -> EpochView:
        return self.membership.view

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0 to ``world_size - 1``."""
        return self.membership.view.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self.membership.view.world_size

    @property
    def epoch(self) -> int:
        """The number of times that the ranks of the group have changed, 0 at first."""
        return self.membership.view.epoch

    @property
    def nodes(self) -> int:
        """The number of machines that the ranks are on."""
        return self.membership.view.nodes

    @property
    def next_op(self) -> int:
        """The number of the next collective that this rank calls."""
        return self._channel.next_op

    # Ranks that join and leave

    def edge(self, timeout: float | None = None) -> bool:
        """Let ranks join and leave here, in a group that was opened with ``joins="commit"``.

        All ranks call it at the same points of the program, where their states are the same:
        :meth:`allfold.State.commit` does. It costs nothing unless a rank waits to join or to leave.
        In that case it returns when all ranks have come here and the waiting ranks have joined or
        left.

        Args:
            timeout: seconds to wait for the other ranks. Default: the group's.

        Returns:
            True if the group has other ranks now.

        Raises:
            PeerMissing: not all ranks have come in time.
        """
        before, seconds = self.epoch, self._seconds(timeout)
        self._see_to_leaving()
        next_op = self._channel.next_op
        if not self.membership.come_to_edge(next_op, seconds, self._see_to_leaving):
            self._draining.leave()
        return self.epoch != before

    def _await_others(self) -> None:
        """Wait at an edge for others to join, as too few ranks are left, and give them the state.

        Raises:
            WorldChanged: they have come; the caller's step was begun without them.
            BelowMinWorld: nobody has come in time.
        """
        size, least = self.world_size, self._options.min_world
        seconds = self._options.join_timeout
        try:
            has_changed = self.edge(seconds)
        except PeerMissing as error:
            raise BelowMinWorld(
                f"group '{self.name}' has {counted(size, 'rank')} left, min_world is "
                f"{least}, and no others have joined within {seconds:g} s; start some "
                "and call it again, or give them more time with ALLFOLD_INIT_TIMEOUT or "
                "init_timeout=",
                group=self.name,
                left=size,
                min_world=least,
            ) from error
        if has_changed:
            self.on_joined(self)
            raise WorldChanged(
                f"group '{self.name}' has {self.world_size} ranks now: others have joined the "
                f"{size} that were too few. Nothing was sent; begin the step again, with them",
                group=self.name,
            )

    def _see_to_leaving(self) -> None:
        if self._is_to_leave:
            self._leave_or_ask_to()

    @property
    def _is_to_leave(self) -> bool:
        """True if this process was told to leave, and may leave this group while it runs."""
        return self._draining.reason is not None and self.elastic

    def _leave_or_ask_to(self) -> None:
        """Leave, or ask once to be let go at the next edge, where all ranks commit.

        Raises:
            Drained: it has left.
        """
        if self.joins == "any" or self._draining.has_left:
            self._draining.leave()
        if not self._wants_to_leave:
            self._wants_to_leave = True
            self.membership.wish_to_leave()

    # Leaving

    def shutdown(self) -> None:
        """Wait for the ops in flight, then leave the group.

        Where the node agent is gone there is nothing left to leave, which is no error here.

        Raises:
            MultipleUnregister: it was left before.
        """
        self.leave(by_call())

    def leave(self, parting: Parting) -> None:
        """Leave as :meth:`shutdown` does, in a way that the caller knows."""
        if self.membership.left and self._draining.has_left:
            return
        self.membership.check(MultipleUnregister)
        for work in self._channel.in_flight():
            try:
                work.wait()
            except AllfoldError as error:
                log.warning("left group '%s' with a failed op: %s", self.name, error)
        try:
            self.membership.leave(parting)
        finally:
            self._on_left(self)

    def depart(self, parting: Parting) -> None:
        """Leave for another group: whatever is in flight, and without waiting for an answer."""
        try:
            self.membership.depart(parting, lost=not self.quiesce(0.0))
        except MultipleUnregister:
            return
        finally:
            self._disclaim()
            self._on_left(self)

    def abandon(self, parting: Parting | None = None) -> None:
        """Leave without waiting for what is in flight: the others lose this rank, at once."""
        try:
            self.membership.abandon(parting or by_call())
        except MultipleUnregister:
            return
        finally:
            self._disclaim()
            self._on_left(self)

    def _disclaim(self) -> None:
        """Leave the tensors of ops in flight alone: they are the program's again."""
        self._channel.disclaim(
            RegisterNotFirstOperation(
                f"rank {self.rank} has left group '{self.name}' with the op in flight; its outcome "
                "is not known"
            )
        )

    @property
    def should_leave(self) -> bool:
        """True once this process was told to leave: it got SIGTERM, or its node drains.

        Programs with an elastic group need not check it: the rank leaves at the next edge anyway.
        """
        if self._draining.reason is None and not self.membership.left:
            self.membership.session.connection.drain()
        return self._draining.reason is not None

    def drain(self) -> None:
        """Have this process leave its groups at the next edge, which raises ``Drained``.

        That is its next collective; with ``joins="commit"`` it is :meth:`edge`. For programs that
        handle SIGTERM themselves: a handler may call it.

        Raises:
            InvalidArgument: the group is not elastic, so that nobody can leave it while it runs.
        """
        if not self.elastic:
            raise InvalidArgument(
                f"group '{self.name}' is not elastic: its ranks leave it together, with shutdown"
            )
        self._draining.ask("the program asked for it")

    def quiesce(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return True if no op is in flight any more."""
        return self._channel.quiesce(seconds)

    def empty(
        self, shape: int | tuple[int, ...], dtype: Any = np.float32, *, device: Any = "cpu"
    ) -> Any:
        """Make an uninitialized tensor in the arena: collectives on it copy nothing.

        What a forked child writes to its copy of the tensor stays in the child. Where the arena
        is larger than 8 MiB, the child may see what its parent writes later, in pages to which it
        has not written: copy what a child is to read as it was before the fork.

        Args:
            shape: its shape.
            dtype: a torch dtype makes a torch tensor, a NumPy dtype (or its name) an array.
            device: ``"cpu"``, or ``"cuda:0"`` as torch names it. There, a NumPy dtype makes an
                array that ``cupy.asarray`` takes without a copy.

        Raises:
            ArenaExhausted: no memory is left.
        """
        self.membership.check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise InvalidArgument(f"a shape has no negative sizes, got {sizes}")
        itemsize = itemsize_of(dtype)
        session = self.membership.session
        if str(device) != "cpu":
            from allfold._cuda import gpu

            ordinal = gpu.ordinal_of_device(device)
            if ordinal is not None:
                return gpu.empty(session.gpu(ordinal), sizes, dtype)
        nbytes = itemsize * int(np.prod(sizes, dtype=np.int64))
        return _tensors.make(session.arena.array(nbytes), sizes, dtype)

    def strategy_for(self, kind: str, nbytes: int) -> str:
        """Return the strategy that ``"auto"`` chooses for an op; ``"local"`` on one node alone.

        Args:
            kind: ``"all_reduce"``, ``"broadcast"`` ...
            nbytes: of the tensor, or of all blocks together.
        """
        return self.membership.explain(kind, nbytes)

    # Calling

    def _repeat(self, key: Likeness, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Do a call that is like an earlier one, if nothing else has to be seen to before."""
        if (prepared := self._prepared.get(key)) is None:
            return UNLIKE
        now = monotonic()
        if prepared.recipe is not None:
            self._connection.glance(now)
        if not self._may_repeat(prepared):
            return UNLIKE
        if not named:
            return self._channel.repeat(prepared, given, self.timeout, now, waits=True)
        seconds = self._seconds(named.get("timeout"))
        given, waits = (*given, *named.values()), not named.get("async_op")
        return self._channel.repeat(prepared, given, seconds, now, waits=waits)

    def _may_repeat(self, prepared: Prepared) -> bool:
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
        """Start a collective."""
        self._see_to_leaving()
        if self.membership.epochs.awaits_others:
            self._await_others()
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
        self._prepared[key] = Prepared(view, packed, template, lane)

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

    def _see_to_failed(self, call: str, error: BaseException, number: int) -> None:
        if self.next_op > number:
            self._note_in_flight(error, f"op {number}")
        elif not self.membership.epochs.awaits_others:
            # Where too few ranks are left, the others wait at an edge, and call no op.
            self._channel.abandon(call, error)

    def _note_in_flight(self, error: BaseException, what: str) -> None:
        """Have the results of calls put in place that nobody has a handle of, and say so."""
        self._channel.watch()
        if not isinstance(error, AllfoldError):
            error.add_note(
                f"allfold: the interrupted call is {what} of group '{self.name}'. It counts: the "
                "other ranks go on with it, and its result comes to its tensor by itself."
            )

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else checked_seconds("timeout", timeout)
