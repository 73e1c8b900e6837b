"""A virtual clock in place of the real one, for leases, patience, deadlines and pauses.

The product asks ``time.monotonic`` for the time; each module has it under a name of its own. While
:func:`virtual_time` lasts, all of them ask the event loop of the test instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tests.support.virtual_loop import VirtualLoop

PACKAGES = ("allfold", "allfold_core", "allfold_agent", "allfold_orchestrator", "tenacity")

_REAL = time.monotonic


class _Time(ModuleType):
    """The module ``time``, with another clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__("time")
        self.monotonic = self.time = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """Let the product's modules that are loaded go by the virtual time of a loop; yield that."""
    loop = VirtualLoop()  # type: ignore[abstract]  # it has no I/O
    with ExitStack() as stack:
        for module, name, instead in _places(loop.time):
            stack.enter_context(patch.object(module, name, instead))
        try:
            yield loop
        finally:
            loop.close()


def _places(clock: Callable[[], float]) -> Iterator[tuple[ModuleType, str, object]]:
    """Yield where modules have the clock: the module, the name, and what is to be there."""
    module_of_time = _Time(clock)
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] not in PACKAGES:
            continue
        found = vars(module)
        if found.get("monotonic") is _REAL:
            yield module, "monotonic", clock
        if found.get("time") is time:
            yield module, "time", module_of_time
