"""``allfold bench --against``: the same ops side by side with other libraries.

What does that is no part of this package, which would then need those libraries: it is the folder
``benchmarks`` of Allfold's repository, and this is a way to call it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from allfold_core.operations import AUTO

_ROOT = Path(__file__).parents[5]
_SUITE = "benchmarks"
# It starts all ranks itself, and measures float32 sums.
_ONLY: Mapping[str, object] = {
    "agents": (),
    "nnodes": None,
    "node_rank": None,
    "iterations": None,
    "strategy": AUTO,
}


def become_suite(
    libraries: str,
    *,
    nodes: int,
    per_node: int,
    kinds: Sequence[str],
    sizes: Sequence[int],
    wire: str,
) -> None:
    """Turn this process into ``python -m benchmarks`` with these cases."""
    if not (_ROOT / _SUITE / "__main__.py").exists():
        raise click.UsageError(
            "--against needs a checkout of Allfold's repository with the packages installed from "
            "it (pip install -e); there, `make bench` does it too"
        )
    command = [sys.executable, "-m", _SUITE, "--peers", libraries]
    command += ["--shapes", f"{nodes}x{per_node}", "--kinds", ",".join(kinds)]
    command += ["--sizes", ",".join(map(str, sizes))]
    if wire != "native":
        command += ["--wires", wire]
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": os.pathsep.join(path)})


def refuse(given: Mapping[str, Any]) -> None:
    """``UsageError`` for options that the suite does not have."""
    for name, usual in _ONLY.items():
        if given[name] != usual:
            option = "agent" if name == "agents" else name.replace("_", "-")
            raise click.UsageError(f"--against cannot be combined with --{option}")
    if given["ops"] not in ((), ("sum",)) or given["dtypes"] not in ((), ("float32",)):
        raise click.UsageError("--against measures sums of float32, no other --op or --dtype")
