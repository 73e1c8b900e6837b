"""The four packages as wheels: what they say of themselves, and what they are when installed."""

from __future__ import annotations

import subprocess
import sys
import venv
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.require import requires

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "allfold": "client_sdk",
    "allfold-agent": "node_agent",
    "allfold-core": "collective_core",
    "allfold-orchestrator": "orchestrator",
}
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    requires("package-index")
    folder = tmp_path_factory.mktemp("wheels")
    sources = [str(ROOT / each) for each in PACKAGES.values()]
    command = [sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), *sources]
    subprocess.run(command, check=True, timeout=300)
    return folder


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_every_licence_file_is_that_of_the_project() -> None:
    text = (ROOT / "LICENSE").read_bytes()
    assert [(ROOT / each / "LICENSE").read_bytes() == text for each in PACKAGES.values()] == [
        True
    ] * 4


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_wheel_brings_its_readme_licence_links_and_types(wheels: Path) -> None:
    found = {each.name.split("-")[0].replace("_", "-"): each for each in wheels.glob("*.whl")}
    assert set(found) == set(PACKAGES)
    for name, wheel in found.items():
        says = metadata(wheel)
        assert str(says.get_payload()).startswith(f"# {name}\n")
        assert says["License-Expression"] == "Apache-2.0"
        assert says["License-File"] == "LICENSE"
        links = {each.split(", ")[0] for each in says.get_all("Project-URL", [])}
        assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= links
        assert "Typing :: Typed" in says.get_all("Classifier", [])
        with ZipFile(wheel) as archive:
            assert any(each.endswith("/py.typed") for each in archive.namelist())


@pytest.mark.long
def test_the_orchestrators_wheel_brings_every_file_of_the_dashboard(wheels: Path) -> None:
    (wheel,) = wheels.glob("allfold_orchestrator-*.whl")
    folder = ROOT / "orchestrator" / "src" / "allfold_orchestrator" / "dashboard"
    with ZipFile(wheel) as archive:
        brought = {each for each in archive.namelist() if "/dashboard/" in each}
    assert brought == {f"allfold_orchestrator/dashboard/{path.name}" for path in folder.iterdir()}


@pytest.mark.long
def test_the_wheel_of_the_sdk_brings_the_package_that_starts_clusters(wheels: Path) -> None:
    (wheel,) = wheels.glob("allfold-*.whl")
    folder = ROOT / "client_sdk" / "src"
    modules = {str(each.relative_to(folder)) for each in folder.glob("allfold_cluster/**/*.py")}
    with ZipFile(wheel) as archive:
        assert modules <= set(archive.namelist())
    assert "allfold_cluster/cluster.py" in modules


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheels_in_an_empty_environment_run_the_quickstart(
    wheels: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    # To compile all of torch takes longer than to compile the modules that are imported.
    install = [*PIP, "install", "--no-compile", "--find-links", str(wheels), *constraints]
    subprocess.run([python, *install, "allfold[local]"], check=True, timeout=600)
    subprocess.run([python, *PIP, "check"], check=True, timeout=60)
    script = tmp_path / "quickstart.py"
    script.write_bytes((ROOT / "examples" / "quickstart.py").read_bytes())
    command = [str(tmp_path / "venv" / "bin" / "allfold"), "run", "--nodes", "2"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "--no-prefix", str(script)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 4: 1.5" for rank in range(4)]
