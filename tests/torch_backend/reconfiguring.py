"""Options of a reconfiguration, with any torch: those before 2.14 have no class for them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import distributed_c10d

PATIENCE = timedelta(seconds=20)


def options(uuid: int, handles: Collection[str], timeout: timedelta | None = PATIENCE) -> Any:
    """Return the options that ``torch.distributed._reconfigure`` gives to a process group."""
    made = getattr(distributed_c10d, "ReconfigureOptions", SimpleNamespace)()
    made.uuid, made.handles, made.timeout = uuid, handles, timeout
    return made
