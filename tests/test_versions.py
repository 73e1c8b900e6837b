"""One version for the four packages, their images and the changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
PROJECTS = ["collective_core", "orchestrator", "node_agent", "client_sdk"]
VERSION = tomllib.loads((ROOT / "client_sdk" / "pyproject.toml").read_text())["project"]["version"]
IMAGES = [*ROOT.glob("docker-compose*.yml"), *ROOT.glob("deploy/kubernetes/**/*.yaml")]
# Name, version and CUDA, if any, of an image in a manifest; Compose has a default for CUDA.
IMAGE = re.compile(
    r"(allfold-(?:orchestrator|agent|job))(?::|, newTag: )(\d+\.\d+\.\d+)"
    r"(?:-(?:\$\{\w+:-)?(\w+))?"
)


def test_the_packages_have_one_version_and_need_each_other_in_it() -> None:
    for folder in PROJECTS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert project["version"] == VERSION, folder
        extras = project.get("optional-dependencies", {}).values()
        needs = [*project["dependencies"], *(need for extra in extras for need in extra)]
        pins = [need for need in needs if re.match(r"allfold-[a-z]+", need)]
        assert all(need.endswith(f"=={VERSION}") for need in pins), folder


def test_the_code_says_the_version_of_its_package() -> None:
    said = {
        path.parent.name: found.group(1)
        for path in ROOT.glob("*/src/*/__init__.py")
        if (found := re.search(r'^__version__ = "([^"]+)"$', path.read_text(), re.MULTILINE))
    }
    assert {"allfold", "allfold_agent", "allfold_core"} <= set(said)
    assert set(said.values()) == {VERSION}


def test_compose_and_kubernetes_name_images_of_the_version() -> None:
    versions = [found[1] for path in IMAGES for found in IMAGE.findall(path.read_text())]
    assert len(versions) >= 8
    assert set(versions) == {VERSION}


def test_the_chart_has_the_version_and_installs_images_of_it() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "allfold" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "allfold" / "values.yaml").read_text())
    assert {values["images"][name]["tag"] for name in ("orchestrator", "agent")} == {""}


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def pushed(variant: dict[str, str], folder: Path) -> tuple[str, str]:
    """Return the image of one variant of the release's matrix: its name, and the tag it gets."""
    steps = workflow("release.yml")["jobs"]["images"]["steps"]
    (step,) = [step for step in steps if "run" in step]
    assert step["env"] == {"CUDA": "${{ matrix.cuda }}"}
    variables = folder / "variables"
    variables.unlink(missing_ok=True)
    environment = {"GITHUB_REF_NAME": f"v{VERSION}", "GITHUB_ENV": str(variables)}
    environment["CUDA"] = variant.get("cuda", "")
    subprocess.run(["bash", "-ec", step["run"]], env=environment, check=True)
    (tags,) = [step["with"]["tags"] for step in steps if "tags" in step.get("with", {})]
    assert tags.endswith("/allfold-${{ matrix.image }}:${{ env.TAG }}")
    return f"allfold-{variant['image']}", variables.read_text().strip().removeprefix("TAG=")


def test_a_release_has_the_images_that_compose_and_kubernetes_name(tmp_path: Path) -> None:
    variants = workflow("release.yml")["jobs"]["images"]["strategy"]["matrix"]["include"]
    built = {pushed(variant, tmp_path) for variant in variants}
    named = {
        (name, f"{version}-{cuda}" if cuda else version)
        for path in IMAGES
        for name, version, cuda in IMAGE.findall(path.read_text())
    }
    assert built == named


def test_nothing_is_published_that_has_not_passed_the_gate() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert jobs["gate"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["wheels"]["needs"] == "gate"
    assert {job["needs"] for name, job in jobs.items() if name not in ("gate", "wheels")} == {
        "wheels"
    }


def test_the_newest_release_in_the_changelog_is_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[([^\]]+)\](.*)$", changelog, re.MULTILINE)
    released = [(version, date) for version, date in headings if version != "Unreleased"]
    linked = re.findall(r"^\[([^\]]+)\]: https://", changelog, re.MULTILINE)
    assert linked == [version for version, _ in released]
    assert released[0][0] == VERSION
    assert all(re.fullmatch(r" - \d{4}-\d{2}-\d{2}", date) for _, date in released)
