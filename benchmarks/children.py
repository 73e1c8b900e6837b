"""The children of a benchmark: what all processes that it starts have in common.

They are started, watched and ended by :mod:`allfold_cluster.processes`, as ranks are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from allfold_cluster.environment import clean_environment

ROOT = Path(__file__).parents[1]
_OF_ANOTHER_JOB = ("ALLFOLD_RANK", "ALLFOLD_WORLD_SIZE", "ALLFOLD_GROUP", "ALLFOLD_SOCKET")
# Locks are checked in tests, and cost time.
_OF_TESTS = ("ALLFOLD_CHECK_LOCKS",)


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Children find this package, share the cores fairly, and see no other job."""
    ours = clean_environment(*_OF_ANOTHER_JOB, *_OF_TESTS)
    # The examples are programs, not a package.
    path = [str(ROOT), str(ROOT / "examples"), *filter(None, [ours.get("PYTHONPATH")])]
    return ours | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
