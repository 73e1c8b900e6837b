"""The groups that are open in this process, which are left when it ends.

Rank 0 of the default group holds the server of torch's store. A rank that leaves its last group
waits for the end of that server: whoever opens a group anew would otherwise meet the others in the
old store, which then ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from time import monotonic, sleep
from typing import Any, Protocol
from weakref import WeakSet

from allfold._parting import Parting, at_exit
from allfold._registry import patience_at_exit

log = logging.getLogger("allfold")

_LAST_SECONDS = 0.2
_STORE_SECONDS = 1.0
_NEW_STORE_SECONDS = 0.05
_STORE_PAUSE_SECONDS = 0.005


class _Open(Protocol):
    """A group that can be left."""

    @property
    def has_left(self) -> bool: ...

    def leave(self, seconds: float, parting: Parting) -> None: ...

    def end_threads(self, seconds: float) -> None: ...


_groups: WeakSet[_Open] = WeakSet()


def add(group: _Open) -> None:
    """Have a group left when the process ends."""
    _groups.add(group)


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
