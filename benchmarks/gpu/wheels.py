"""Wheels for another machine: which packages it needs, and where they come from.

pip resolves for the Python that it runs on. Markers such as ``python_version < "3.12"`` may come
out another way on the target, so what was downloaded is checked against the target's own.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.children import ROOT
from benchmarks.errors import BenchmarkFailed

PACKAGES = ("collective_core", "orchestrator", "node_agent", "client_sdk")
THERE = ("torch", "numpy", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
"""What a machine with a GPU has already."""

_OURS = "allfold"
# The newest first; a wheel for an older one runs as well.
_GLIBC = ((2, 34), (2, 31), (2, 28), (2, 27), (2, 24), (2, 17), (2, 12), (2, 5))
_SECONDS = 300.0


def build(folder: Path) -> None:
    """Build our own four packages."""
    sources = [str(ROOT / name) for name in PACKAGES]
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), *sources)


def download(folder: Path, python: str, extras: Sequence[str]) -> None:
    """Download all that our packages need, and what that needs, for a version of Python.

    Args:
        python: such as ``3.12``.
        extras: of our packages, beside those that the benchmarks need.
    """
    wanted = [str(each) for each in outer_requirements(_projects(), ["cli", *extras])]
    while wanted:
        _pip("download", *_target(python), "--dest", str(folder), *wanted)
        again = [str(each) for each in missing(folder, python)]
        if again == wanted:
            raise BenchmarkFailed(f"pip finds no wheels for Python {python} of {', '.join(again)}")
        wanted = again


def outer_requirements(
    projects: Iterable[Mapping[str, object]], extras: Sequence[str]
) -> list[Requirement]:
    """What the projects need of others, with some extras; not what the target has, unless asked."""
    found: dict[str, Requirement] = {}
    for project in projects:
        for requirement, is_asked in _stated(project, extras):
            name = canonicalize_name(requirement.name)
            if not name.startswith(_OURS) and (is_asked or name not in THERE):
                found[str(requirement)] = requirement
    return list(found.values())


def missing(folder: Path, python: str) -> list[Requirement]:
    """What the wheels of a folder need on the target, and what is not there."""
    wheels = sorted(folder.glob("*.whl"))
    there = {parse_wheel_filename(wheel.name)[0] for wheel in wheels} | set(THERE)
    needed: dict[str, Requirement] = {}
    todo = [(wheel, "") for wheel in wheels]
    for wheel, extra in todo:
        for requirement in _requirements(wheel):
            marker = requirement.marker
            if marker and not marker.evaluate(environment(python) | {"extra": extra}):
                continue
            if canonicalize_name(requirement.name) not in there:
                needed[requirement.name] = Requirement(str(requirement).partition(";")[0])
            named = [each for each in wheels if _is(each, requirement.name)]
            todo += [(w, e) for w in named for e in requirement.extras if (w, e) not in todo]
    return list(needed.values())


def environment(python: str) -> dict[str, str]:
    """What markers are held against: Linux on x86-64."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }


def _projects() -> Iterator[Mapping[str, object]]:
    for name in PACKAGES:
        found: Mapping[str, object] = tomllib.loads((ROOT / name / "pyproject.toml").read_text())[
            "project"
        ]
        yield found


def _stated(
    project: Mapping[str, object], extras: Sequence[str]
) -> Iterator[tuple[Requirement, bool]]:
    """A project's requirements, and whether an extra has asked for them."""
    dependencies, optional = project["dependencies"], project.get("optional-dependencies", {})
    assert isinstance(dependencies, list)
    assert isinstance(optional, dict)
    yield from ((Requirement(each), False) for each in dependencies)
    for extra in extras:
        yield from ((Requirement(each), True) for each in optional.get(extra, []))


def _requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        name = next(each for each in names if each.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [Requirement(each) for each in metadata.get_all("Requires-Dist", [])]


def _is(wheel: Path, name: str) -> bool:
    return parse_wheel_filename(wheel.name)[0] == canonicalize_name(name)


def _target(python: str) -> list[str]:
    version = python.replace(".", "")
    platforms = [f"manylinux_{major}_{minor}_x86_64" for major, minor in _GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    options += ["--abi", f"cp{version}", "--abi", "abi3", "--abi", "none"]
    return options + [word for each in platforms for word in ("--platform", each)]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"pip {arguments[0]} took longer than {_SECONDS:g} s") from error
    if done.returncode:
        raise BenchmarkFailed(f"pip {arguments[0]} failed:\n{done.stderr.strip()}")
