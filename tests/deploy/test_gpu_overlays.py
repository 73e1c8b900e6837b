"""The additions of the overlays for GPUs to the agents of the base."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.deploy.manifests import FOLDER, GPU_PAGE, OVERLAYS, Object, built, of_kind, services

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
GPU, MOUNTS = OVERLAYS
DRIVER = {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"}
GPUS_BY_MOUNT = {"name": "all-gpus", "mountPath": "/var/run/nvidia-container-devices/all"}
NOTHING = {"name": "all-gpus", "hostPath": {"path": "/dev/null", "type": "CharDevice"}}


@cache
def agent(folder: str) -> tuple[Object, Object]:
    """The agents' pod and its only container that stays."""
    found = services(built(FOLDER / folder))["agent"]
    (container,) = found.pod["containers"]
    assert container == found.spec
    return found.pod, container


def added(folder: str, base: str, key: str) -> list[Object]:
    """Return what a list of the container has beside the base's; it must have all of that, too."""
    ours, theirs = agent(folder)[1][key], agent(base)[1][key]
    assert all(each in ours for each in theirs)
    return [each for each in ours if each not in theirs]


@pytest.mark.parametrize("name", OVERLAYS)
def test_agents_for_gpus_are_where_gpus_are_and_take_none_from_jobs(name: str) -> None:
    pod, container = agent(name)
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["runtimeClassName"] == "nvidia"
    assert "nvidia.com/gpu" not in str(container["resources"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_all_of_an_agents_containers_are_of_one_image_for_gpus(name: str) -> None:
    pod, container = agent(name)
    (init,) = pod["initContainers"]
    assert init["image"] == container["image"]
    assert re.search(r"-cuda1[23]$", container["image"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_agents_for_gpus_are_otherwise_those_of_the_base(name: str) -> None:
    (base, container), (ours, our_container) = agent("base"), agent(name)
    assert ours.keys() - base.keys() == {"nodeSelector", "runtimeClassName"}
    changed = {key for key in our_container if container.get(key) != our_container[key]}
    assert changed - {"volumeMounts"} == {"env", "image"}
    different = {key for key in base if base[key] != ours[key]}
    assert different - {"volumes"} == {"containers", "initContainers"}
    base_daemons, our_daemons = (
        {**of_kind(built(FOLDER / each), "DaemonSet")["agent"]["spec"], "template": None}
        for each in ("base", name)
    )
    assert base_daemons == our_daemons


def test_the_overlay_asks_for_all_gpus_with_a_variable() -> None:
    variable = {"name": VISIBLE, "value": "all"}
    assert sorted(map(str, added(GPU, "base", "env"))) == sorted(map(str, [variable, DRIVER]))
    assert added(GPU, "base", "volumeMounts") == []
    assert agent(GPU)[0]["volumes"] == agent("base")[0]["volumes"]


def test_the_other_overlay_asks_for_them_with_a_mount_instead() -> None:
    assert added(MOUNTS, "base", "env") == [DRIVER]
    assert added(MOUNTS, "base", "volumeMounts") == [GPUS_BY_MOUNT]
    volumes = [each for each in agent(MOUNTS)[0]["volumes"] if each["name"] == "all-gpus"]
    assert volumes == [NOTHING]
    assert [each for each in agent(MOUNTS)[0]["volumes"] if each not in volumes] == (
        agent("base")[0]["volumes"]
    )


def test_the_page_names_both_overlays() -> None:
    assert set(re.findall(r"\boverlays/[\w-]+", GPU_PAGE)) == set(OVERLAYS)
