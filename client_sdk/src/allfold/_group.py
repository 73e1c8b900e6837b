"""A group: the ranks that call collectives together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from allfold import _tensors
from allfold._collectives import Collectives
from allfold._elements import itemsize_of
from allfold._membership import RankMembership
from allfold._process.draining import LeaveRequest, Parting, by_call
from allfold._process.settings import GroupSettings
from allfold_core.errors import (
    AllfoldError,
    BelowMinWorld,
    InvalidArgument,
    MultipleUnregister,
    PeerMissing,
    RegisterNotFirstOperation,
    WorldChanged,
)
from allfold_core.verdict import counted

log = logging.getLogger("allfold")

_AT_ONCE_SECONDS = 1.0


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
            ``"float16"``, ``"int8"``, ``"int4"``, ``"int2"`` or ``"sign"``, with the same bits on
            every rank; ``"topk"``, for sums and means with ``feedback``, sends the greatest 64th.
            See docs/precision.md.
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
    the program with status 0. With ``joins="commit"`` it is done, and :meth:`boundary` leaves.
    """

    def __init__(
        self,
        membership: RankMembership,
        settings: GroupSettings,
        draining: LeaveRequest,
        on_left: Callable[[Group], None],
    ) -> None:
        super().__init__(membership, settings, draining)
        self._options = options = settings.options
        self.on_loss, self.elastic, self.joins = options.on_loss, options.is_elastic, options.joins
        self.traffic = options.traffic
        # Called when others have come in for whom too few ranks had waited.
        self.on_joined: Callable[[Group], None] = lambda _: None
        self._wants_to_leave = False
        self._on_left = on_left

    def __repr__(self) -> str:
        return f"<allfold.Group {self.name!r}: rank {self.rank} of {self.world_size}>"

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

    # Ranks that join and leave

    def boundary(self, timeout: float | None = None) -> bool:
        """Take in and release ranks here, in a group that was opened with ``joins="commit"``.

        All ranks call it at the same points of the program, where their states are the same:
        :meth:`allfold.State.commit` does. It costs nothing unless a rank waits to join or to leave.
        In that case it returns when all ranks are here and the waiting ones have joined or left.

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
        if not self.membership.come_to_boundary(next_op, seconds, self._see_to_leaving):
            self._draining.leave()
        return self.epoch != before

    def edge(self, timeout: float | None = None) -> bool:
        """Deprecated name of :meth:`boundary`; goes in 0.4."""
        return self.boundary(timeout)

    def _await_others(self) -> None:
        """Wait at a boundary for others to join too few ranks, and give them the state.

        Raises:
            WorldChanged: they have come; the caller's step was begun without them.
            BelowMinWorld: nobody has come in time.
        """
        size, least = self.world_size, self._options.min_world
        seconds = self._options.join_timeout
        try:
            has_changed = self.boundary(seconds)
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

    def _see_to_members(self) -> None:
        self._see_to_leaving()
        if self.membership.epochs.awaits_others:
            self._await_others()

    def _see_to_leaving(self) -> None:
        if self._is_to_leave:
            self._leave_or_ask_to()

    @property
    def _is_to_leave(self) -> bool:
        """True if this process was told to leave, and may leave this group while it runs."""
        return self._draining.reason is not None and self.elastic

    def _leave_or_ask_to(self) -> None:
        """Leave, or ask once to be let go at the next boundary, where all ranks commit.

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
            self.membership.give_up(parting)
        finally:
            self._has_left()

    def depart(self, parting: Parting) -> None:
        """Leave for another group: whatever is in flight, and without waiting for an answer."""
        self._leave_at_once(parting, lost=not self.quiesce(0.0), waits=False)

    def abandon(self, parting: Parting | None = None) -> None:
        """Leave without waiting for what is in flight: the others lose this rank, at once."""
        self._leave_at_once(parting or by_call(), lost=True, waits=True)

    def _leave_at_once(self, parting: Parting, *, lost: bool, waits: bool) -> None:
        """Leave, and leave the tensors of ops in flight alone: they are the program's again."""
        try:
            self.membership.give_up(parting, _AT_ONCE_SECONDS, lost=lost, waits=waits)
        except MultipleUnregister:
            return
        finally:
            self._channel.disclaim(
                RegisterNotFirstOperation(
                    f"rank {self.rank} has left group '{self.name}' with the op in flight; its "
                    "outcome is not known"
                )
            )
            self._has_left()

    def _has_left(self) -> None:
        """Let go of the memory shared with the agent, however long the program keeps this group."""
        self._prepared.clear()
        self._on_left(self)

    @property
    def should_leave(self) -> bool:
        """True once this process was told to leave: it got SIGTERM, or its node drains.

        Programs with an elastic group need not check: the rank leaves at the next boundary anyway.
        """
        if self._draining.reason is None and not self.membership.left:
            self.membership.session.connection.drain()
        return self._draining.reason is not None

    def drain(self) -> None:
        """Ask this process to leave its groups at the next boundary, which raises ``Drained``.

        That is its next collective; with ``joins="commit"`` it is :meth:`boundary`. For programs
        that handle SIGTERM themselves: a handler may call it.

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
        sizes = _tensors.sizes_of(shape)
        itemsize = itemsize_of(dtype)
        session = self.membership.session
        if str(device) != "cpu":
            from allfold._cuda import gpu

            ordinal = gpu.ordinal_of_device(device)
            if ordinal is not None:
                return gpu.empty(session.gpu(ordinal), sizes, dtype)
        nbytes = itemsize * prod(sizes)
        return _tensors.make(session.arena.array(nbytes), sizes, dtype)

    def strategy_for(self, kind: str, nbytes: int) -> str:
        """Return the strategy that ``"auto"`` chooses for an op; ``"local"`` on one node alone.

        Args:
            kind: ``"all_reduce"``, ``"broadcast"`` ...
            nbytes: of the tensor, or of all blocks together.
        """
        return self.membership.explain(kind, nbytes)
