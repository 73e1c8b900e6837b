"""The files of this repository, and parts of them, that are made from the code.

python -m tools.made_files          # writes them again: `make docs`
python -m tools.made_files --check  # shows what differs: `make docs-check`, in the gate

A page with made parts has a table of *blocks* in its module here; a file that is made whole has a
function that returns its text. Both are listed below, and nowhere else.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tools import (
    architecture_tables,
    cli_page,
    control_page,
    grafana_dashboard,
    kubernetes_manifests,
    metrics_page,
    performance_page,
    rest_page,
    schedule_pictures,
    sdk_page,
    settings_page,
    strategies_page,
)
from tools.pages import DOCS, ROOT, Blocks, renewed

PAGES: Mapping[Path, Blocks] = {
    ROOT / "README.md": {**strategies_page.README, **performance_page.README},
    DOCS / "cli.md": cli_page.BLOCKS,
    DOCS / "control.md": control_page.BLOCKS,
    DOCS / "kubernetes.md": kubernetes_manifests.BLOCKS,
    DOCS / "metrics.md": metrics_page.BLOCKS,
    DOCS / "modules.md": architecture_tables.MODULES,
    DOCS / "performance.md": performance_page.BLOCKS,
    DOCS / "protocol.md": architecture_tables.PROTOCOL,
    DOCS / "rest.md": rest_page.BLOCKS,
    DOCS / "sdk.md": sdk_page.BLOCKS,
    DOCS / "settings.md": settings_page.BLOCKS,
    DOCS / "strategies.md": strategies_page.BLOCKS,
    DOCS / "threads.md": architecture_tables.THREADS,
}
FILES: Mapping[Path, Callable[[], str]] = {
    ROOT / "deploy" / "grafana" / "allfold.json": grafana_dashboard.text,
    **kubernetes_manifests.FILES,
    **schedule_pictures.FILES,
}


def texts() -> Iterator[tuple[Path, str, str]]:
    """Yield each file with the text that it has and the one that it should have."""
    for path, blocks in PAGES.items():
        has = path.read_text()
        yield path, has, renewed(path.name, has, blocks)
    for path, text in FILES.items():
        yield path, path.read_text() if path.exists() else "", text()


def differences() -> Iterator[str]:
    """Yield the lines of a unified diff, from what the files have to what the code says."""
    for path, has, should in texts():
        name = str(path.relative_to(ROOT))
        before, after = has.splitlines(keepends=True), should.splitlines(keepends=True)
        yield from difflib.unified_diff(before, after, name, f"{name}, as the code says")


def write() -> None:
    """Write all of them again."""
    for path, has, should in texts():
        if has != should:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(should)


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
