"""The example jobs of deploy/kubernetes."""

from __future__ import annotations

import re

import pytest

from tests.deploy.manifests import FOLDER, JOB_FILES, JOBS, ROOT, Container, Object, jobs, read

FOUND = jobs(read(*JOB_FILES))
JOB_OBJECTS = {each["metadata"]["name"]: each for each in read(*JOB_FILES)}
NAMES = sorted(owner for owner, _ in JOBS)


def option(container: Container, name: str) -> str:
    arguments = container.spec["args"]
    return str(arguments[arguments.index(name) + 1])


def test_every_example_of_a_job_is_tested() -> None:
    examples = read(*(FOLDER / "examples").glob("*.yaml"))
    assert sorted(each["metadata"]["name"] for each in examples if each["kind"] == "Job") == NAMES
    assert sorted(FOUND) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_job_is_as_large_as_its_command_says(name: str) -> None:
    spec, container = JOB_OBJECTS[name]["spec"], FOUND[name]
    nnodes = int(option(container, "--nnodes"))
    assert nnodes > 1
    assert (nnodes, nnodes) == (spec["completions"], spec["parallelism"])


@pytest.mark.parametrize("name", NAMES)
def test_each_pod_has_the_ranks_of_its_own_index(name: str) -> None:
    assert JOB_OBJECTS[name]["spec"]["completionMode"] == "Indexed"
    assert option(FOUND[name], "--node-rank") == "$(JOB_COMPLETION_INDEX)"


@pytest.mark.parametrize("name", NAMES)
def test_each_pod_has_a_node_of_its_own(name: str) -> None:
    (apart,) = FOUND[name].pod["affinity"]["podAntiAffinity"].values()
    assert apart == [
        {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": {"batch.kubernetes.io/job-name": name}},
        }
    ]


@pytest.mark.parametrize("name", NAMES)
def test_each_run_has_a_group_of_its_own(name: str) -> None:
    label = "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert FOUND[name].field("ALLFOLD_GROUP") == label


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_has_lost_a_rank_is_not_started_in_part(name: str) -> None:
    assert JOB_OBJECTS[name]["spec"]["backoffLimit"] == 0
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
    (program,) = (each for each in FOUND[name].spec["args"] if each.endswith(".py"))
    assert (ROOT / program).is_file()
    dockerfile = (ROOT / "deploy" / "docker" / "job.Dockerfile").read_text()
    (folder,) = re.findall(r"^WORKDIR (.+)$", dockerfile, re.MULTILINE)
    assert f"\nCOPY examples {folder}/examples\n" in dockerfile


def test_jobs_on_gpus_claim_one_for_each_rank() -> None:
    (found,) = (each for each in FOUND.values() if each.spec["args"][-2:] == ["--device", "cuda"])
    assert found.owner == "digits-gpu"
    assert found.pod["runtimeClassName"] == "nvidia"
    gpus = claimed(found)
    assert gpus == int(option(found, "--nproc-per-node")) == 1
    assert claimed(FOUND["digits"]) == 0


def claimed(container: Container) -> int:
    limits: Object = container.spec["resources"]["limits"]
    return int(limits.get("nvidia.com/gpu", 0))


@pytest.mark.parametrize("name", NAMES)
def test_the_pods_of_a_job_may_start_minutes_apart(name: str) -> None:
    assert FOUND[name].value("ALLFOLD_INIT_TIMEOUT") == "900"
