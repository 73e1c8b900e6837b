"""The ops of a group that are not over, by number, under the lock that orders them."""

from __future__ import annotations

from threading import Condition

from allfold_agent.execution.op import Op
from allfold_agent.runtime.locks import make_rlock


class OpTable:
    """Shared by a group, its epochs and its outcomes.

    Attributes:
        lock: held for every change of an op's state.
        changed: notified when an op has been called, has started or has failed.
        in_flight: the ops that a local rank has called and that are not over, by number.
    """

    def __init__(self) -> None:
        self.lock = make_rlock("group")
        self.changed = Condition(self.lock)
        self.in_flight: dict[int, Op] = {}
