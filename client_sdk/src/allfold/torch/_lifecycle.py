"""The life of a process group: it opens, is reconfigured, fails, and ends."""

from __future__ import annotations

import atexit
import logging
import os
import socket
from datetime import timedelta
from threading import Lock
from time import monotonic, sleep
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from allfold._group import Group
from allfold._process.draining import Parting, at_exit, by_call
from allfold._registry import open_group, patience_at_exit, registry
from allfold.torch._communicator import AbortHook, Communicator
from allfold.torch._options import seconds
from allfold.torch._progress import uncompiled
from allfold.torch._rendezvous import Handle, next_group, ordered
from allfold.torch._work import Work
from allfold_core.errors import (
    AgentLost,
    AllfoldError,
    Evicted,
    InvalidArgument,
    PeerLost,
    RegisterNotFirstOperation,
)

log = logging.getLogger("allfold")

_LAST_SECONDS = 0.2
_STORE_SECONDS = 1.0
_NEW_STORE_SECONDS = 0.05
_STORE_PAUSE_SECONDS = 0.005


# Those of this process, which are left when it ends.
_groups: WeakSet[Lifecycle] = WeakSet()


def await_end_after_the_last(store: Any) -> None:
    """Wait for the end of the store if all groups have been left."""
    if store is not None and all(group.has_left for group in list(_groups)):
        await_end_of(store)


def await_end_of(store: Any) -> None:
    """Wait until rank 0 has closed the store, for a second at most."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return  # torchrun's own, which stays
    if type(store).__name__ != "TCPStore":
        return
    # A connection that says nothing ends with the server. (The store's own client would print a
    # C++ stack.) One that is made while the server ends is cut; in the next one it lives on.
    deadline = monotonic() + _STORE_SECONDS
    seconds = _STORE_SECONDS
    try:
        while seconds > 0:
            with socket.create_connection((store.host, store.port), seconds) as connected:
                connected.recv(1)
            sleep(_STORE_PAUSE_SECONDS)  # where something else listens in its place, and closes
            seconds = min(_NEW_STORE_SECONDS, deadline - monotonic())
    except OSError as error:
        log.debug("the store at %s:%d: %s", store.host, store.port, error)


@atexit.register
def _leave_at_exit() -> None:
    """Leave the groups of a script that does not destroy them."""
    groups = list(_groups)
    deadline = monotonic() + patience_at_exit()
    for group in groups:
        group.leave(max(0.0, deadline - monotonic()), at_exit())
    # The connection is closed by now, so nothing is in flight any more.
    for group in groups:
        group.end_threads(_LAST_SECONDS)


_SHUTDOWN_SECONDS = 1.0
_RECONFIGURED = Parting("was reconfigured", failed=False)
_NO_GROUP = (
    "this process group has no ranks now, as it was not reconfigured yet, was aborted, or could "
    "not be reconfigured: call torch.distributed._reconfigure, on all ranks that are to be in it"
)
_AFTER_A_LOSS = (
    "Look at what the lost rank or its agent printed last. A process group of torch keeps the "
    "ranks that it was made with, so every later call fails as well: make a new group of the ranks "
    "that are left, or let torchrun start all of them again."
)
_AFTER_THE_AGENT = (
    "Look at the agent's log, and start it again. The others can make a new group without the "
    "ranks of this node; to have all ranks again, let torchrun start them anew."
)
_AFTER_AN_EVICTION = (
    "Look at the load and the network of this node at that time. The others can make a new group "
    "without this rank; to have all ranks again, let torchrun start them anew."
)
_RECONFIGURE = (
    "Every later call fails as well, until torch.distributed._reconfigure is called on the ranks "
    "that are to go on."
)

# torch's stubs list the overloads of C++, of which a Python class implements one each.
_Base: Any = dist.ProcessGroup


@uncompiled
class Lifecycle(_Base):  # type: ignore[misc]
    """The opening, reconfiguration, errors and end of a process group; collectives are elsewhere.

    Args:
        handle: this rank's handle.
        world_size: the number of ranks; before there is a group, that of the launcher.
        timeout: the timeout of ops in seconds; the same on every rank.
        store: torch's store.
        reconfigurable: open no group before the first ``reconfigure``.
    """

    def __init__(
        self, handle: Handle, world_size: int, timeout: float, store: Any, *, reconfigurable: bool
    ) -> None:
        # The form with a store makes an object that C++ would not call back (torch <= 2.13).
        super().__init__(handle.rank, world_size)
        self._handle = handle
        self._world_size = world_size
        self._agreed_timeout = self._timeout = timeout
        self._communicator: Communicator | None = None
        self._hooks: dict[int, AbortHook] = {}
        self._parting = Lock()
        self._pid = os.getpid()
        self._left = False
        self._reconfigurable = reconfigurable
        # Rank 0 has the server of the store; its end must not wait for us.
        self._store = store if handle.rank else None
        _groups.add(self)

    def enter(self, group: Group) -> None:
        """Run the collectives in a group from now on."""
        self._handle = self._handle.joined(group.name, group.rank)
        self._world_size = group.world_size
        group.timeout = self._timeout
        self._communicator = Communicator(
            group, self._explain, self._hooks, watched=self._reconfigurable
        )

    @property
    def group(self) -> Group:
        """The group that the collectives run in; ``RegisterNotFirstOperation`` without one."""
        return self._current().group

    def _current(self) -> Communicator:
        current = self._communicator
        if current is None or (current.has_left and self._reconfigurable):
            raise RegisterNotFirstOperation(_NO_GROUP)
        return current

    # Two spellings each: C++ calls the first ones, and Python before torch 2.14 the others.

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self._handle.rank

    def getSize(self) -> int:  # noqa: N802
        return self._world_size

    rank, size = getRank, getSize

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the ops that are called from now on."""
        self._timeout = seconds(timeout) or self._timeout
        if self._communicator is not None:
            self._communicator.group.timeout = self._timeout

    _set_default_timeout = set_timeout

    # Other ranks

    @property
    def supports_reconfigure(self) -> bool:
        """True: torch reads it as an attribute."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Return what the ranks of the next group need to know of this one."""
        return str(self._handle)

    def reconfigure(self, opts: Any) -> Work:
        """Leave the group at once and open one of other ranks, as soon as all of them have called.

        Ops in flight fail, here and on the other ranks of the old group.

        Args:
            opts: torch's ``ReconfigureOptions``: ``uuid``, which no rank may have used before;
                ``handles``, a list in the order of the ranks, or a set, of which those that had a
                rank in the last group keep their order and come first; ``timeout``, by default
                what ``ALLFOLD_INIT_TIMEOUT`` says.

        Returns:
            A handle that is done already.

        Raises:
            InvalidArgument: the uuid was used, or the handles cannot make a group with this rank;
                the group stays as it was.
            PeerMissing: not all ranks came in time. There is no group until the next attempt.
        """
        # All that may be refused comes first: the group stays as it was then.
        ranks = ordered(opts.handles)
        rank = self._place_among(ranks)
        name = next_group(ranks, opts.uuid)
        # Before the attempt: the uuid counts as used even if that fails.
        self._handle = self._handle.using(opts.uuid)
        self._reconfigurable, self._left = True, False
        # Between two groups the connection stays, and the memory that is shared with the agent.
        registry.hold(self._handle.session)
        self._depart()
        group = open_group(
            name,
            rank,
            len(ranks),
            agent=registry.agent,  # ranks that come from elsewhere need one that runs for all
            timeout=self._agreed_timeout,
            init_timeout=seconds(getattr(opts, "timeout", None)),
            fixed=True,
        )
        self.enter(group)
        self._tell_torch_its_ranks()
        return self._current().work([], [])

    def _place_among(self, ranks: list[Handle]) -> int:
        """Return this rank's number in the next group."""
        for place, each in enumerate(ranks):
            if each.session == self._handle.session:
                return place
        raise InvalidArgument(
            "this process is in none of the handles that are to be the next group; a rank that is "
            "left out does not reconfigure. The group stays as it was"
        )

    def _tell_torch_its_ranks(self) -> None:
        """Update torch's table of the default group's ranks, which torch itself never changes."""
        if dist.group.WORLD is self:
            _known_groups()[self] = {rank: rank for rank in range(self._world_size)}

    # Errors

    def get_error(self) -> ErrorType:
        """Return the kind of the first error that ended the group, or may have done so."""
        return ErrorType.SUCCESS if self._communicator is None else self._communicator.error()

    def register_abort_hook(self, hook_id: int, hook: AbortHook) -> None:
        """Register what to call, in any thread, at the first error that may end the group."""
        self._hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a function that was registered by :meth:`register_abort_hook`."""
        self._hooks.pop(hook_id, None)

    def _explain(self, error: AllfoldError) -> None:
        """Add advice to an error, and the global ranks where they differ from the group's."""
        if isinstance(error, PeerLost | AgentLost):
            error.advice = _RECONFIGURE if self._reconfigurable else _advice(error)
        ranks = dist.get_process_group_ranks(self) if self in _known_groups() else []
        if ranks != sorted(ranks) or ranks[-1:] != [len(ranks) - 1]:
            numbered = ", ".join(f"{index} is {rank}" for index, rank in enumerate(ranks))
            note = f"Ranks of this group, in the job: {numbered}."
            if ranks and note not in getattr(error, "__notes__", ()):
                error.add_note(note)

    # End

    def shutdown(self) -> None:
        """Leave the group; ops in flight have a second to complete, or are abandoned."""
        self.leave(_SHUTDOWN_SECONDS, by_call())

    def abort(self) -> None:
        """Leave the group at once, and abandon the ops in flight; it may be reconfigured."""
        if self._reconfigurable:
            self._part(0.0, by_call())
        else:
            self.leave(0.0, by_call())

    def leave(self, seconds: float, parting: Parting) -> None:
        """Leave the group, in order if the ops in flight complete within so many seconds."""
        if self._left or self._pid != os.getpid():
            return
        # First: the store's end is awaited once all groups say that they have left, this one too.
        self._left = True
        store, self._store = self._store, None
        in_order = self._part(seconds, parting)
        registry.release(self._handle.session)
        if in_order:
            await_end_after_the_last(store)

    def _part(self, seconds: float, parting: Parting) -> bool:
        """Leave the Allfold group, once; return True if that was in order."""
        current = self._communicator
        if current is None or self._pid != os.getpid():
            return True
        with self._parting:
            return current.has_left or current.leave(seconds, parting)

    def _depart(self) -> None:
        """Leave the Allfold group for another one, unless it was left before."""
        with self._parting:
            if self._communicator is not None and not self._communicator.has_left:
                self._communicator.depart(_RECONFIGURED)

    @property
    def has_left(self) -> bool:
        """Return True if :meth:`leave` was called."""
        return self._left

    def end_threads(self, seconds: float) -> None:
        """End the threads that complete futures; wait so long for a callback that is running."""
        if self._communicator is not None:
            self._communicator.end_threads(seconds)


def _advice(error: AllfoldError) -> str:
    if isinstance(error, Evicted):
        return _AFTER_AN_EVICTION
    return _AFTER_A_LOSS if isinstance(error, PeerLost) else _AFTER_THE_AGENT


def _known_groups() -> Any:
    """Return torch's table of the ranks of each group that was not destroyed."""
    return dist.distributed_c10d._world.pg_group_ranks
