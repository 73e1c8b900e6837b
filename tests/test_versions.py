"""One version for the four packages, their images and the changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
PROJECTS = ["collective_core", "orchestrator", "node_agent", "client_sdk"]
VERSION = tomllib.loads((ROOT / "client_sdk" / "pyproject.toml").read_text())["project"]["version"]
IMAGES = [*ROOT.glob("docker-compose*.yml"), *ROOT.glob("deploy/kubernetes/**/*.yaml")]
IMAGE = re.compile(r"allfold-(?:orchestrator|agent|job)(?::|, newTag: )(\d+\.\d+\.\d+)")


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
    tags = [tag for path in IMAGES for tag in IMAGE.findall(path.read_text())]
    assert len(tags) >= 8
    assert set(tags) == {VERSION}


def test_a_release_tags_its_images_with_the_version_and_no_letter(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = workflow["jobs"]["images"]["steps"]
    variables = tmp_path / "variables"
    for step in steps:
        if "run" in step:
            environment = {"GITHUB_REF_NAME": f"v{VERSION}", "GITHUB_ENV": str(variables)}
            subprocess.run(["bash", "-ec", step["run"]], env=environment, check=True)
    assert variables.read_text() == f"VERSION={VERSION}\n"
    (tags,) = [step["with"]["tags"] for step in steps if "tags" in step.get("with", {})]
    assert tags.endswith("/allfold-${{ matrix.image }}:${{ env.VERSION }}")


def test_the_newest_release_in_the_changelog_is_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[([^\]]+)\](.*)$", changelog, re.MULTILINE)
    released = [(version, date) for version, date in headings if version != "Unreleased"]
    linked = re.findall(r"^\[([^\]]+)\]: https://", changelog, re.MULTILINE)
    assert linked == [version for version, _ in released]
    assert released[0][0] == VERSION
    assert all(re.fullmatch(r" - \d{4}-\d{2}-\d{2}", date) for _, date in released)
