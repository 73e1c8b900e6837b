"""The files of deploy/kubernetes, what kubectl makes of them, and the commands for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from string import Template

import pytest
import yaml  # type: ignore[import-untyped]

from allfold_agent import __version__
from tests.deploy.manifests import (
    BASE_FILES,
    COMPONENTS,
    EXAMPLES,
    FILES,
    FOLDER,
    JOBS,
    OVERLAYS,
    PAGE,
    ROOT,
    Object,
    built,
    containers,
    of_kind,
    read,
)

IMAGES = {
    "agent": "allfold-agent",
    "orchestrator": "allfold-orchestrator",
    "redis": "redis",
    **{owner: "allfold-job" for owner, _ in JOBS},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_file_is_yaml_of_kubernetes(path: Path) -> None:
    found = read(path)
    assert found
    for each in found:
        assert each["apiVersion"]
        assert each["kind"]


def test_the_base_has_every_file_of_its_folder() -> None:
    (kustomization,) = read(FOLDER / "base" / "kustomization.yaml")
    names = {path.name for path in BASE_FILES} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == names


def test_every_overlay_and_component_is_one_that_is_tested() -> None:
    folders = {path.parent for path in FOLDER.rglob("kustomization.yaml")}
    assert folders == {FOLDER / name for name in ("base", *OVERLAYS, *COMPONENTS)}


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_every_folder_builds_with_all_objects_in_one_namespace(name: str) -> None:
    objects = built(FOLDER / name)
    kinds = ["DaemonSet", "Deployment", "Namespace", *["NetworkPolicy"] * 4, "PodDisruptionBudget"]
    kinds += ["PriorityClass", "Service", "Service", "StatefulSet"]
    assert sorted(each["kind"] for each in objects) == kinds
    namespaces = {
        each["metadata"].get("namespace")
        for each in objects
        if each["kind"] not in ("Namespace", "PriorityClass")
    }
    assert namespaces == set(of_kind(objects, "Namespace")) == {"allfold"}


def test_examples_are_in_the_namespace_of_the_agents() -> None:
    of_the_cluster = ("ClusterQueue", "ClusterTrainingRuntime", "ResourceFlavor")
    found = [each for each in read(*EXAMPLES) if each["kind"] not in of_the_cluster]
    assert {each["metadata"]["namespace"] for each in found} == {"allfold"}


def test_images_have_the_version_of_the_packages(objects: list[Object]) -> None:
    tags = set()
    for container in containers(objects):
        image, _, tag = container.spec["image"].partition(":")
        assert image == IMAGES[container.owner]
        if image != "redis":
            tags.add(tag)
    assert tags == {__version__, f"{__version__}-cuda13"}


# --- docs/kubernetes.md


def own_overlay(folder: Path) -> list[Object]:
    """Return the objects of the page's overlay with a registry."""
    found = re.search(r"cat > mine/kustomization\.yaml <<END\n(.*?)^END$", PAGE, re.DOTALL | re.M)
    assert found
    shutil.copytree(FOLDER, folder / "deploy" / "kubernetes")
    (folder / "mine").mkdir()
    text = Template(found[1]).substitute(R="registry/x", TAG="tag")
    (folder / "mine" / "kustomization.yaml").write_text(text)
    return built(folder / "mine")


def job_as_sent() -> Object:
    """Return the object that the page's command hands to ``kubectl apply`` for a job."""
    found = re.search(r"^sed .*?(?= \|$)", PAGE, re.M)
    assert found
    env = {**os.environ, "R": "registry/x", "TAG": "tag"}
    command = ["sh", "-c", found[0]]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=60, check=True)
    job: Object = yaml.safe_load(done.stdout)
    return job


def test_an_overlay_with_a_registry_has_the_images_that_the_page_builds(tmp_path: Path) -> None:
    built_and_pushed = {
        f"registry/x/{name}:{'tag' if tag == '$TAG' else tag}"
        for name, tag in re.findall(r"-t \$R/([\w-]+):(\S+)", PAGE)
    }
    objects = [*own_overlay(tmp_path), job_as_sent()]
    used = {each.spec["image"] for each in containers(objects)}
    assert used - {"redis:7-bookworm"} == built_and_pushed
    assert len(built_and_pushed) == 3


def test_a_job_as_the_page_sends_it_is_the_example_with_another_image() -> None:
    sent, (example,) = job_as_sent(), read(FOLDER / "examples" / "job.yaml")
    (container,) = example["spec"]["template"]["spec"]["containers"]
    container["image"] = "registry/x/allfold-job:tag"
    assert sent == example


def test_the_page_names_every_example_and_component() -> None:
    examples = [f"examples/{path.name}" for path in EXAMPLES]
    assert [name for name in [*examples, *COMPONENTS] if name not in PAGE] == []
