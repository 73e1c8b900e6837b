"""Print what the given pyproject.toml files need from outside the repository, one per line.

The images install this before they copy any source, so that an edited module does not cost a
reinstallation of everything. A file may be followed by extras: `client_sdk/pyproject.toml[cli]`.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

OURS = "allfold"


def requirements(argument: str) -> Iterator[str]:
    """Third-party requirements of one pyproject.toml, with the extras named in brackets."""
    path, _, extras = argument.removesuffix("]").partition("[")
    project = tomllib.loads(Path(path).read_text())["project"]
    yield from project["dependencies"]
    for extra in filter(None, extras.split(",")):
        yield from project["optional-dependencies"][extra]


def main() -> None:
    found = {line for argument in sys.argv[1:] for line in requirements(argument)}
    sys.stdout.writelines(f"{line}\n" for line in sorted(found) if not line.startswith(OURS))


if __name__ == "__main__":
    main()
