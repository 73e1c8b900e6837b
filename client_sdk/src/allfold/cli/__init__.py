"""The ``allfold`` command, and the launcher behind it."""

from __future__ import annotations

import os
import sys

_NEEDED = ("click", "rich", "cryptography")


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    try:
        from allfold.cli._main import cli

        cli(prog_name="allfold")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        print('The allfold command needs more: pip install "allfold[cli]"', file=sys.stderr)
        sys.exit(2)


def _open_standard_streams() -> None:
    """Fill closed ones, or a pipe of ours would get their number and be taken for them."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
