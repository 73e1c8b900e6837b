"""The example jobs of deploy/kubernetes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import (
    EXAMPLES,
    JOBS,
    ROOT,
    Container,
    Object,
    jobs,
    of_kind,
    pod_templates,
    read,
    workloads,
)

OBJECTS = read(*EXAMPLES)
FOUND = jobs(OBJECTS)
NAMES = sorted(FOUND)
# Whose ranks are started by allfold run, on two pods.
LAUNCHED = ["ddp", "ddp-set", "decode", "digits", "digits-gpu", "digits-queued"]
TORCH = ["allfold-torch", "ddp", "ddp-set"]
UID = "metadata.labels['batch.kubernetes.io/controller-uid']"


def option(container: Container, name: str) -> str:
    arguments = container.spec["args"]
    return str(arguments[arguments.index(name) + 1])


def job_spec(name: str) -> Object:
    """The spec of a Job, also of the one within a JobSet or a runtime."""
    (found,) = (each for each in workloads(OBJECTS) if each["metadata"]["name"] == name)
    (spec,) = _specs_of_jobs(found)
    return spec


def _specs_of_jobs(found: Any) -> Iterator[Object]:
    if isinstance(found, dict):
        if "backoffLimit" in found:
            yield found
        for each in found.values():
            yield from _specs_of_jobs(each)
    elif isinstance(found, list):
        for each in found:
            yield from _specs_of_jobs(each)


def test_every_example_is_tested() -> None:
    assert sorted(each["metadata"]["name"] for each in workloads(OBJECTS)) == NAMES
    assert sorted(owner for owner, _ in JOBS) == NAMES
    assert {name for name in NAMES if "run" in FOUND[name].spec.get("args", ())} == set(LAUNCHED)


@pytest.mark.parametrize("name", sorted({*LAUNCHED} - {"decode"}))
def test_a_job_is_as_large_as_its_command_says(name: str) -> None:
    spec, container = job_spec(name), FOUND[name]
    nnodes = int(option(container, "--nnodes"))
    assert nnodes > 1
    assert (nnodes, nnodes) == (spec["completions"], spec["parallelism"])


@pytest.mark.parametrize("name", sorted({*LAUNCHED} - {"decode"}))
def test_each_pod_has_the_ranks_of_its_own_index(name: str) -> None:
    assert job_spec(name)["completionMode"] == "Indexed"
    assert option(FOUND[name], "--node-rank") == "$(JOB_COMPLETION_INDEX)"


def test_a_group_of_pods_is_as_large_as_it_is_told_to_be() -> None:
    group = of_kind(OBJECTS, "LeaderWorkerSet")["decode"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] > 1
    # A group that has lost a pod is made anew as a whole.
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert option(FOUND["decode"], "--nnodes") == "$(LWS_GROUP_SIZE)"
    assert option(FOUND["decode"], "--node-rank") == "$(LWS_WORKER_INDEX)"


@pytest.mark.parametrize("name", LAUNCHED)
def test_each_pod_has_a_node_of_its_own(name: str) -> None:
    (apart,) = FOUND[name].pod["affinity"]["podAntiAffinity"].values()
    (rule,) = apart
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    ((label, value),) = rule["labelSelector"]["matchLabels"].items()
    labels = {
        "ddp-set": "jobset.sigs.k8s.io/jobset-name",
        "decode": "leaderworkerset.sigs.k8s.io/name",
    }
    assert (label, value) == (labels.get(name, "batch.kubernetes.io/job-name"), name)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"allfold-torch"}))
def test_each_run_has_a_group_of_its_own(name: str) -> None:
    fields = {"decode": "metadata.labels['leaderworkerset.sigs.k8s.io/group-key']"}
    assert FOUND[name].field("ALLFOLD_GROUP") == fields.get(name, UID)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"decode", "elastic"}))
def test_a_job_that_has_lost_a_rank_is_not_started_in_part(name: str) -> None:
    assert job_spec(name)["backoffLimit"] == 0
    assert FOUND[name].pod["restartPolicy"] == "Never"


@pytest.mark.parametrize("name", NAMES)
def test_every_variable_is_one_that_the_sdk_reads(name: str) -> None:
    sources = "".join(path.read_text() for path in ROOT.glob("client_sdk/src/**/*.py"))
    read_by_sdk = set(re.findall(r"\bALLFOLD_[A-Z_]*[A-Z]\b", sources))
    given = {each for each in FOUND[name].environment if each.startswith("ALLFOLD_")}
    assert given
    assert given <= read_by_sdk


@pytest.mark.parametrize("name", NAMES)
def test_the_program_of_a_job_is_in_its_image(name: str) -> None:
    """The image has the folder of the examples where it starts."""
    spec = FOUND[name].spec
    started = " ".join([*spec.get("command", ()), *spec.get("args", ())])
    (program,) = re.findall(r"\S+\.py\b", started)
    assert (ROOT / program).is_file()
    dockerfile = (ROOT / "deploy" / "docker" / "job.Dockerfile").read_text()
    (folder,) = re.findall(r"^WORKDIR (.+)$", dockerfile, re.MULTILINE)
    assert f"\nCOPY examples {folder}/examples\n" in dockerfile


def test_jobs_on_gpus_claim_one_for_each_rank() -> None:
    (found,) = (
        each for each in FOUND.values() if each.spec.get("args", ())[-2:] == ["--device", "cuda"]
    )
    assert found.owner == "digits-gpu"
    assert found.pod["runtimeClassName"] == "nvidia"
    gpus = claimed(found)
    assert gpus == int(option(found, "--nproc-per-node")) == 1
    assert not any(claimed(each) for name, each in FOUND.items() if name != found.owner)


def claimed(container: Container) -> int:
    limits: Object = container.spec["resources"]["limits"]
    return int(limits.get("nvidia.com/gpu", 0))


@pytest.mark.parametrize("name", NAMES)
def test_the_pods_of_a_job_may_start_minutes_apart(name: str) -> None:
    """A large image takes minutes, and is there on some nodes already."""
    assert FOUND[name].value("ALLFOLD_INIT_TIMEOUT") == "900"


# --- torch


@pytest.mark.parametrize("name", TORCH)
def test_a_script_of_torch_need_not_name_the_backend(name: str) -> None:
    assert FOUND[name].value("ALLFOLD_TORCH_REPLACE") == "gloo,nccl"


def test_torchrun_waits_as_long_for_its_pods_as_allfold_does() -> None:
    found = FOUND["allfold-torch"]
    assert found.value("PET_RDZV_CONF") == f"timeout={found.value('ALLFOLD_INIT_TIMEOUT')}"


def test_a_train_job_finds_its_runtime_and_what_is_put_into_it() -> None:
    ((name, runtime),) = of_kind(OBJECTS, "ClusterTrainingRuntime").items()
    ((_, job),) = of_kind(OBJECTS, "TrainJob").items()
    assert job["spec"]["runtimeRef"] == {"name": name}
    # By these names the Trainer finds the pods, and the container that gets the job's image.
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    ((pod),) = pod_templates(runtime)
    assert [each["name"] for each in pod["spec"]["containers"]] == ["node"]
    (init,) = pod["spec"]["initContainers"]
    (sdk,) = (each for each in init["volumeMounts"] if each["name"] == "sdk")
    node = FOUND["allfold-torch"]
    assert f"--target {sdk['mountPath']} /opt/allfold/wheels/" in init["args"][0]
    assert node.value("PYTHONPATH") == sdk["mountPath"]
    assert node.mount(sdk["mountPath"])[0]["readOnly"] is True
    dockerfile = (ROOT / "deploy" / "docker" / "job.Dockerfile").read_text()
    (wheels,) = re.findall(r"^COPY --from=wheels (.+) /opt/allfold/wheels/$", dockerfile, re.M)
    assert wheels.split() == ["/wheels/allfold_core-*.whl", "/wheels/allfold-*.whl"]


# --- ranks that have to leave


def elastic(folder: Path, program: str) -> subprocess.Popen[bytes]:
    """Start the command of the elastic job, with a program in place of the rank."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    spec = FOUND["elastic"].spec
    command = [*spec["command"], *spec["args"]]
    return subprocess.Popen(command, env={"PATH": f"{folder}:{os.defpath}", "DIR": str(folder)})


LEAVES = "trap 'touch $DIR/left; exit 0' TERM; touch $DIR/runs; while :; do sleep 0.05; done"


def test_a_rank_that_had_to_leave_is_no_training_that_is_done(tmp_path: Path) -> None:
    rank = elastic(tmp_path, LEAVES)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "runs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(30) == 143
    finally:
        rank.kill()
        rank.wait(10)
    assert (tmp_path / "left").exists()  # it was waited for


@pytest.mark.parametrize("status", [0, 3])
def test_otherwise_the_job_sees_the_status_of_the_rank(tmp_path: Path, status: int) -> None:
    assert elastic(tmp_path, f"exit {status}").wait(30) == status


def test_a_pod_that_had_to_leave_is_replaced() -> None:
    spec = job_spec("elastic")
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "Ignore"
    assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # Whoever of a Job without completions ends well says that all is done.
    assert "completions" not in spec
    assert FOUND["elastic"].pod["terminationGracePeriodSeconds"] > 60
