"""Output for people: tables on a terminal or in a file; times, sizes and rates in words."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_FILE = 200


def console() -> Console:
    """Return a console on standard output, as wide as the terminal; a file has no width."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    return Console(width=width, highlight=False, markup=False, emoji=False)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]] = ()) -> Table:
    """Return a table with its title on the left; rows may be added."""
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def duration(seconds: float) -> str:
    """The time that something takes: ``85 us``, ``1.2 ms``, ``2.50 s``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def age(seconds: float) -> str:
    """The time since something: ``3.4 s``, ``12 min``, ``5.1 h``; 0 if clocks disagree."""
    if seconds < 100:
        return f"{max(seconds, 0.0):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def rate(bytes_per_second: float) -> str:
    """``117 MB/s``, ``1.2 GB/s``."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def size(count: int | None) -> str:
    """``1.5 GiB``; ``?`` where it is not known."""
    if count is None:
        return "?"
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
