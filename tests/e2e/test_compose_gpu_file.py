"""The additions of docker-compose.gpu.yml to docker-compose.yml; no GPU is needed."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.processes import docker
from tests.support.require import requires

ROOT = Path(__file__).parents[2]
FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
BASE, GPU = (yaml.safe_load((ROOT / name).read_text())["services"] for name in FILES)
AGENTS, JOBS = ("agent-a", "agent-b"), ("train-a", "train-b", "ddp-a", "ddp-b")
SOURCES = [*ROOT.glob("node_agent/src/**/*.py"), *ROOT.glob("client_sdk/src/**/*.py")]


@cache
def merged() -> dict[str, Any]:
    """The services as Compose itself puts the two files together."""
    requires("docker")
    env = os.environ | {"COMPOSE_PROFILES": docker.all_profiles()}
    files = [part for name in FILES for part in ("--file", name)]
    shown = docker.run([*docker.compose_command(env), *files, "config"], env)
    services: dict[str, Any] = yaml.safe_load(shown)["services"]
    return services


def mounted(service: dict[str, Any], folder: str) -> tuple[str, bool]:
    """The volume that a service has at a folder, and whether it may only be read."""
    (found,) = (each for each in map(mount, service["volumes"]) if each[1] == folder)
    return found[0], found[2]


def mount(volume: str | dict[str, Any]) -> tuple[str, str, bool]:
    """Source, target and whether it is read-only, of both forms that Compose has."""
    if isinstance(volume, str):
        source, target, mode = f"{volume}:rw".split(":")[:3]
        return source, target, mode == "ro"
    return volume["source"], volume["target"], volume.get("read_only", False)


def test_agents_and_jobs_see_the_gpus_and_nothing_else_does() -> None:
    assert GPU.keys() == {*AGENTS, *JOBS}
    for service in GPU.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        # libcuda.so.1 comes with "compute".
        assert device["capabilities"] == ["gpu", "compute", "utility"]
        assert (device["driver"], device["count"]) == ("nvidia", "all")


def test_only_jobs_get_torch_for_cuda() -> None:
    for agent in AGENTS:
        assert "TORCH_INDEX" not in GPU[agent]["build"]["args"]
    for job in JOBS:
        assert re.search(r"/cu\d+$", docker.with_defaults(GPU[job]["build"]["args"]["TORCH_INDEX"]))


def test_images_for_gpus_are_of_the_same_version_and_have_names_of_their_own() -> None:
    for name, service in GPU.items():
        extra = docker.with_defaults(service["build"]["args"]["ALLFOLD_EXTRA"])
        assert extra in ("cuda12", "cuda13")
        assert docker.with_defaults(service["image"]) == f"{BASE[name]['image']}-{extra}"


def test_jobs_run_the_same_training_on_the_gpu() -> None:
    for job in JOBS:
        assert GPU[job]["command"] == [*BASE[job]["command"], "--device", "cuda"]


def test_every_variable_is_one_that_is_read() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    names = {name for service in GPU.values() for name in service["environment"]}
    assert [name for name in sorted(names) if f'"{name}"' not in text] == []


def test_both_dockerfiles_take_the_extra() -> None:
    for name in ("agent", "job"):
        final = (ROOT / f"deploy/docker/{name}.Dockerfile").read_text().rpartition("\nFROM ")[2]
        declared, used = final.index("\nARG ALLFOLD_EXTRA=\n"), final.index("$ALLFOLD_EXTRA]")
        assert declared < used


@pytest.mark.docker
@pytest.mark.parametrize("name", GPU)
def test_compose_keeps_what_the_first_file_says(name: str) -> None:
    service = merged()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert BASE[name]["environment"].keys() < service["environment"].keys()
    assert Path(service["build"]["dockerfile"]).name == Path(BASE[name]["build"]["dockerfile"]).name
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"


@pytest.mark.docker
def test_compose_lets_each_job_reach_the_socket_of_its_agent() -> None:
    for agent, job in zip(AGENTS * 2, JOBS, strict=True):
        socket = Path(merged()[agent]["environment"]["ALLFOLD_SOCKET"])
        command = merged()[job]["command"]
        assert command[command.index("--agent") + 1] == str(socket)
        volume, read_only = mounted(merged()[agent], str(socket.parent))
        assert not read_only
        assert mounted(merged()[job], str(socket.parent)) == (volume, True)
    assert len({mounted(merged()[agent], "/run/allfold") for agent in AGENTS}) == len(AGENTS)


@pytest.mark.docker
def test_compose_leaves_the_other_services_alone() -> None:
    assert merged().keys() == BASE.keys()
    assert [name for name in merged().keys() - GPU.keys() if "deploy" in merged()[name]] == []
