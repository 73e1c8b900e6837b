"""What the agent imports as it starts: not torch, which takes longer than all else."""

from __future__ import annotations

import subprocess
import sys

_LOADERS = ("allfold_agent.arithmetic.torch_kernels",)
_WALK = f"""
import importlib, pkgutil, sys
import allfold_agent
for module in pkgutil.walk_packages(allfold_agent.__path__, "allfold_agent."):
    if module.name not in {_LOADERS}:
        importlib.import_module(module.name)
        if "torch" in sys.modules:
            sys.exit(f"{{module.name}} imports torch")
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_no_module_of_the_agent_imports_torch_but_the_one_that_is_there_for_it() -> None:
    found = run(_WALK)
    assert (found.returncode, found.stderr) == (0, "")


def test_that_one_does() -> None:
    """Else the test above would show nothing."""
    found = run(f"import sys, {_LOADERS[0]}; sys.exit('torch' not in sys.modules)")
    assert (found.returncode, found.stderr) == (0, "")
