"""The children of a benchmark: what all processes that it starts have in common.

They are started, watched and ended by :mod:`allfold.cli._processes`, as those of ``allfold run``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What a surrounding launcher may have left.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "PMI_", "OMPI_", "SLURM_"),
    *("ALLFOLD_RANK", "ALLFOLD_WORLD_SIZE", "ALLFOLD_GROUP", "ALLFOLD_SOCKET"),
)


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Children find this package, share the cores fairly, and see no other job."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    # The examples are programs, not a package.
    path = [str(ROOT), str(ROOT / "examples"), *filter(None, [ours.get("PYTHONPATH")])]
    return ours | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
