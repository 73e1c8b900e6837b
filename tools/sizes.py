"""How large the packages are, and where they are larger than they may be.

python -m tools.sizes  # of `make lint`

A module has at most 400 lines, and a room (a folder) at most 14 modules; a public class name
stands in one module. ``tools/sizes.toml`` has what is beyond that, and how far it may be. It may
only shrink: an exception that is no longer needed has to go, and none is added for new code.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.pages import ROOT

EXCEPTIONS = Path(__file__).with_name("sizes.toml")
_FILE = str(EXCEPTIONS.relative_to(ROOT))
SOURCES = tuple(
    ROOT / package / "src"
    for package in ("client_sdk", "collective_core", "node_agent", "orchestrator")
)
MODULE_LINES = 400
ROOM_MODULES = 14
_SPLIT = "split it by what it is about"
_MERGE = "merge modules that are about one thing, or make a room of some"
_RENAME = "give it a name of its own"


@dataclass
class Sizes:
    """The sizes of some packages.

    Attributes:
        lines: of each module, by its path.
        modules: how many each room has, without ``__init__``, by its path.
        classes: by name of a public class, the modules that define one.
    """

    lines: dict[str, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __str__(self) -> str:
        lines, modules = sum(self.lines.values()), len(self.lines)
        shared = sum(len(places) > 1 for places in self.classes.values())
        return (
            f"{lines} lines in {modules} modules: {lines / max(modules, 1):.0f} lines a module; "
            f"{shared} names of classes stand in several"
        )


def measured(sources: Sequence[Path] = SOURCES) -> Sizes:
    """Measure the modules below some folders."""
    sizes = Sizes()
    for source in sources:
        for path in sorted(source.rglob("*.py")):
            name, text = str(path.relative_to(source)), path.read_text()
            sizes.lines[name] = text.count("\n")
            if path.name != "__init__.py":
                sizes.modules[str(path.parent.relative_to(source))] += 1
            for found in ast.parse(text).body:
                if isinstance(found, ast.ClassDef) and not found.name.startswith("_"):
                    sizes.classes[found.name].append(name)
    return sizes


def complaints(sizes: Sizes, exceptions: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for whatever is too large, and for each exception that is not needed."""
    shared = {name: len(places) for name, places in sizes.classes.items()}
    yield from _beyond("module", "lines", sizes.lines, MODULE_LINES, exceptions, _SPLIT)
    yield from _beyond("room", "modules", sizes.modules, ROOM_MODULES, exceptions, _MERGE)
    for each in _beyond("class", "modules", shared, 1, exceptions, _RENAME):
        name = each.split()[1]
        yield f"{each} ({', '.join(sizes.classes.get(name, ()))})"


def _beyond(
    kind: str, unit: str, found: dict[str, int], most: int, exceptions: dict[str, Any], do: str
) -> Iterator[str]:
    allowed: dict[str, int] = exceptions.get(kind, {})
    for name in sorted(found.keys() | allowed.keys()):
        count, limit = found.get(name, 0), allowed.get(name, most)
        if count > limit:
            yield f"{kind} {name} has {count} {unit}, and may have {limit}: {do}"
        elif name in allowed and count <= most:
            yield f"{kind} {name} has {count} {unit}: take it out of [{kind}] in {_FILE}"


def main() -> int:
    sizes = measured()
    found = list(complaints(sizes, tomllib.loads(EXCEPTIONS.read_text())))
    print(*found, sizes, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
