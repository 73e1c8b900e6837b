"""The drawing of plots: text stays text, and the same figures give the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "allfold", "font.size": 9}


def save(figure: Figure, path: Path) -> Path:
    """Write a figure without a date; its path."""
    figure.savefig(path, format="svg", metadata={"Date": None})
    return path
