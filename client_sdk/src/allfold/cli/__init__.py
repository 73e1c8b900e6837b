"""The ``allfold`` command, and the launcher behind it."""

from __future__ import annotations

import sys

_NEEDED = ("click", "rich")


def main() -> None:
    """Run the command line."""
    try:
        from allfold.cli._main import cli
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        print('The allfold command needs more: pip install "allfold[cli]"', file=sys.stderr)
        sys.exit(2)
    cli(prog_name="allfold")
