"""Allfold's control plane: knows who is there, makes the plans, never touches a tensor."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("allfold-orchestrator")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0.0.0+checkout"

__all__ = ["__version__"]
