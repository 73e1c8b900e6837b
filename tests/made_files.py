"""The files of this repository, and parts of them, that are made from the code.

python -m tests.made_files          # writes them again: `make docs`
python -m tests.made_files --check  # shows what differs: `make docs-check`, in the gate
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import (
    architecture_tables,
    cli_page,
    grafana_dashboard,
    kubernetes_manifests,
    metrics_page,
    rest_page,
    schedule_pictures,
    sdk_page,
    settings_page,
)

ROOT = Path(__file__).parents[1]


def _drawn(picture: schedule_pictures.Picture) -> Callable[[str], str]:
    return lambda _: picture.svg()


MADE: dict[Path, Callable[[str], str]] = {
    architecture_tables.PAGE: architecture_tables.renewed,
    cli_page.PAGE: cli_page.renewed,
    metrics_page.PAGE: metrics_page.renewed,
    rest_page.PAGE: rest_page.renewed,
    sdk_page.PAGE: sdk_page.renewed,
    settings_page.PAGE: settings_page.renewed,
    **{each.path: _drawn(each) for each in schedule_pictures.PICTURES},
    grafana_dashboard.FILE: lambda _: grafana_dashboard.text(),
    **kubernetes_manifests.MADE,
}
"""By file, what makes its text from the one that it has."""


def differences() -> Iterator[str]:
    """Yield the lines of a unified diff, from what the files have to what the code says."""
    for path, make in MADE.items():
        has = path.read_text() if path.exists() else ""
        name = str(path.relative_to(ROOT))
        before, after = has.splitlines(keepends=True), make(has).splitlines(keepends=True)
        yield from difflib.unified_diff(before, after, name, f"{name}, as the code says")


def write() -> None:
    """Write all of them again."""
    for path, make in MADE.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(path.read_text() if path.exists() else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and show differences")
    if not parser.parse_args().check:
        write()
        return 0
    found = list(differences())
    sys.stdout.writelines(found)
    if found:
        print("these files are not what the code says; run: make docs", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
