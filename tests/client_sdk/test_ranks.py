"""The sources of a rank: every launcher, every half-given source, every contradiction."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from allfold._process.ranks import RankInfo, resolve
from allfold_core.errors import InvalidArgument, RankSourcesContradict

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "job",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
LEADER_WORKER_SET = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "4"}
KUBEFLOW = {"PET_NODE_RANK": "1", "PET_NNODES": "4", "PET_NPROC_PER_NODE": "1"}


def exported(rank: int, world_size: int) -> dict[str, str]:
    """``RANK`` and ``WORLD_SIZE`` without torchrun's mark, as somebody writes them by hand."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size)}


def slurm(rank: int, size: int) -> dict[str, str]:
    return {"SLURM_STEP_ID": "3", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size)}


@pytest.mark.parametrize(
    ("env", "arguments", "expected"),
    [
        ({}, {}, RankInfo(0, 1, "single process")),
        (
            {},
            {"rank": 2, "world_size": 4},
            RankInfo(2, 4, "arguments: rank, world_size"),
        ),
        (
            {"ALLFOLD_RANK": "2", "ALLFOLD_WORLD_SIZE": "4"},
            {},
            RankInfo(2, 4, "environment: ALLFOLD_RANK, ALLFOLD_WORLD_SIZE"),
        ),
        (
            {"ALLFOLD_WORLD_SIZE": "4"},
            {"rank": 2},
            RankInfo(2, 4, "arguments: rank, ALLFOLD_WORLD_SIZE"),
        ),
        ({}, {"world_size": 1}, RankInfo(0, 1, "arguments: world_size")),
        (TORCHRUN, {}, RankInfo(5, 8, "torchrun: RANK, WORLD_SIZE")),
        (exported(5, 8), {}, RankInfo(5, 8, "torchrun: RANK, WORLD_SIZE")),
        (
            OPEN_MPI,
            {},
            RankInfo(5, 8, "Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"),
        ),
        (PMI, {}, RankInfo(5, 8, "MPI: PMI_RANK, PMI_SIZE")),
        (SLURM_STEP, {}, RankInfo(5, 8, "Slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS")),
        (slurm(1, 4), {}, RankInfo(1, 4, "Slurm: SLURM_PROCID, SLURM_NTASKS")),
        (
            LEADER_WORKER_SET,
            {},
            RankInfo(1, 4, "Kubernetes LeaderWorkerSet: LWS_WORKER_INDEX, LWS_GROUP_SIZE"),
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "ALLFOLD_WORLD_SIZE": "4"},
            {},
            RankInfo(1, 4, "Kubernetes Indexed Job: JOB_COMPLETION_INDEX, ALLFOLD_WORLD_SIZE"),
        ),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            {"world_size": 4},
            RankInfo(1, 4, "Kubernetes Indexed Job: JOB_COMPLETION_INDEX, world_size"),
        ),
        (KUBEFLOW, {}, RankInfo(1, 4, "Kubeflow: PET_NODE_RANK, PET_NNODES")),
        (
            {"PET_NODE_RANK": "1", "PET_NNODES": "4"},
            {},
            RankInfo(1, 4, "Kubeflow: PET_NODE_RANK, PET_NNODES"),
        ),
    ],
)
def test_every_source_gives_a_rank_and_is_named(
    env: dict[str, str], arguments: dict[str, int], expected: RankInfo
) -> None:
    assert resolve(env, **arguments) == expected


@pytest.mark.parametrize(
    ("outer", "source"),
    [
        pytest.param(slurm(1, 2), "torchrun", id="srun starts one torchrun per node"),
        pytest.param(slurm(3, 5), "torchrun", id="an elastic torchrun lost some of Slurm's nodes"),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "torchrun",
            id="mpirun starts one torchrun per node and they found another order",
        ),
        pytest.param(KUBEFLOW | {"PET_NPROC_PER_NODE": "4"}, "torchrun", id="torchrun in pods"),
        pytest.param({"JOB_COMPLETION_INDEX": "1"}, "torchrun", id="torchrun in an Indexed Job"),
        pytest.param({"RANK": "", "SLURM_PROCID": ""}, "single process", id="all are empty"),
    ],
)
def test_what_torchrun_started_is_numbered_by_torchrun(outer: dict[str, str], source: str) -> None:
    info = resolve((TORCHRUN if source == "torchrun" else {}) | outer)
    assert info.source.split(":")[0] == source


@pytest.mark.parametrize(
    ("env", "arguments", "rank", "world_size"),
    [
        pytest.param(OPEN_MPI | slurm(0, 1), {}, 5, 8, id="mpirun in a Slurm step"),
        pytest.param(OPEN_MPI | slurm(1, 3), {}, 5, 8, id="Slurm numbers mpirun's daemons"),
        pytest.param(PMI | SLURM_STEP, {}, 5, 8, id="srun --mpi=pmi2 sets both alike"),
        pytest.param(exported(5, 8) | SLURM_STEP, {}, 5, 8, id="exported from Slurm's, alike"),
        pytest.param(exported(5, 8) | slurm(1, 2), {}, 5, 8, id="Slurm numbers the nodes"),
        pytest.param(exported(5, 8) | slurm(0, 1), {}, 5, 8, id="Slurm knows one process"),
        pytest.param(slurm(3, 4) | LEADER_WORKER_SET, {}, 3, 4, id="Slurm runs inside pods"),
        pytest.param(
            KUBEFLOW | {"JOB_COMPLETION_INDEX": "1"}, {}, 1, 4, id="Kubeflow's pods are a Job's"
        ),
        pytest.param(TORCHRUN, {"rank": 5, "world_size": 8}, 5, 8, id="the arguments agree"),
        pytest.param(TORCHRUN, {"world_size": 8}, 5, 8, id="half the arguments agree"),
        pytest.param(exported(1, 2), {"rank": 5, "world_size": 8}, 5, 8, id="4 each, spawned"),
        pytest.param(exported(0, 1), {"rank": 5, "world_size": 8}, 5, 8, id="all in one pod"),
        pytest.param({"RANK": "3"}, {"rank": 5, "world_size": 8}, 5, 8, id="half says nothing"),
        pytest.param(
            TORCHRUN | slurm(3, 5), {"rank": 5, "world_size": 8}, 5, 8, id="agrees with torchrun"
        ),
        pytest.param({"RANK": "5"}, {"world_size": 8}, 5, 8, id="each has one half"),
    ],
)
def test_sources_that_are_nested_or_agree_are_accepted(
    env: dict[str, str], arguments: dict[str, int], rank: int, world_size: int
) -> None:
    info = resolve(env, **arguments)
    assert (info.rank, info.world_size) == (rank, world_size)


@pytest.mark.parametrize(
    ("env", "arguments", "first", "second"),
    [
        (
            TORCHRUN,
            {"rank": 2, "world_size": 8},
            "arguments: rank 2 of 8 (rank=2, world_size=8)",
            "torchrun: rank 5 of 8 (RANK=5, WORLD_SIZE=8)",
        ),
        (
            TORCHRUN,
            {"world_size": 4},
            "arguments: any rank of 4 (world_size=4)",
            "torchrun: rank 5 of 8 (RANK=5, WORLD_SIZE=8)",
        ),
        (
            TORCHRUN,
            {"rank": 1},
            "arguments: rank 1 (rank=1)",
            "torchrun: rank 5 of 8 (RANK=5, WORLD_SIZE=8)",
        ),
        (
            {"ALLFOLD_RANK": "3"},
            {"rank": 1, "world_size": 4},
            "arguments: rank 1 of 4 (rank=1, world_size=4)",
            "environment: rank 3 (ALLFOLD_RANK=3)",
        ),
        (
            {"ALLFOLD_RANK": "1", "ALLFOLD_WORLD_SIZE": "4"} | slurm(2, 4),
            {},
            "environment: rank 1 of 4 (ALLFOLD_RANK=1, ALLFOLD_WORLD_SIZE=4)",
            "Slurm: rank 2 of 4 (SLURM_PROCID=2, SLURM_NTASKS=4)",
        ),
        (
            exported(0, 1) | OPEN_MPI,
            {},
            "torchrun: rank 0 of 1 (RANK=0, WORLD_SIZE=1)",
            "Open MPI: rank 5 of 8 (OMPI_COMM_WORLD_RANK=5, OMPI_COMM_WORLD_SIZE=8)",
        ),
        (
            exported(0, 8) | slurm(1, 2),
            {},
            "torchrun: rank 0 of 8 (RANK=0, WORLD_SIZE=8)",
            "Slurm: rank 1 of 2 (SLURM_PROCID=1, SLURM_NTASKS=2)",
        ),
        (
            exported(1, 4) | {"LWS_WORKER_INDEX": "2", "LWS_GROUP_SIZE": "4"},
            {},
            "torchrun: rank 1 of 4 (RANK=1, WORLD_SIZE=4)",
            "Kubernetes LeaderWorkerSet: rank 2 of 4 (LWS_WORKER_INDEX=2, LWS_GROUP_SIZE=4)",
        ),
    ],
)
def test_two_sources_that_number_the_process_differently_are_both_shown(
    env: dict[str, str], arguments: dict[str, int], first: str, second: str
) -> None:
    with pytest.raises(RankSourcesContradict) as caught:
        resolve(env, **arguments)
    assert f"{first}; {second}." in caught.value.message
    assert caught.value.details == {"first": first, "second": second}


@pytest.mark.parametrize(
    ("env", "arguments", "words"),
    [
        ({"RANK": "1"}, {}, "RANK is 1, but WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "4"}, {}, "WORLD_SIZE is 4, but RANK is missing"),
        ({"RANK": "1"} | slurm(1, 4), {}, "RANK is 1, but WORLD_SIZE is missing"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, {}, "OMPI_COMM_WORLD_SIZE is missing"),
        ({"PMI_SIZE": "2"}, {}, "PMI_RANK is missing"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, {}, "SLURM_NTASKS is missing"),
        ({"LWS_GROUP_SIZE": "4"}, {}, "LWS_WORKER_INDEX is missing"),
        ({"PET_NODE_RANK": "1"}, {}, "PET_NNODES is missing"),
        ({"ALLFOLD_RANK": "1"}, {}, "ALLFOLD_RANK is 1, but ALLFOLD_WORLD_SIZE is missing"),
        ({"ALLFOLD_WORLD_SIZE": "4"}, {}, "ALLFOLD_WORLD_SIZE is 4, but ALLFOLD_RANK is missing"),
        ({}, {"rank": 0}, "rank is 0, but world_size is missing"),
        ({"JOB_COMPLETION_INDEX": "1"}, {}, "Set ALLFOLD_WORLD_SIZE, or the argument world_size"),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, {}, "start the script with torchrun"),
        (
            KUBEFLOW | {"PET_NPROC_PER_NODE": "2", "ALLFOLD_WORLD_SIZE": "8"},
            {},
            "start the script with torchrun",
        ),
        (KUBEFLOW | {"PET_NNODES": "2:4"}, {}, "PET_NNODES=2:4"),
    ],
)
def test_half_a_source_is_refused_with_the_name_of_what_is_missing(
    env: dict[str, str], arguments: dict[str, int], words: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(env, **arguments)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("env", "arguments", "words"),
    [
        ({"RANK": "one", "WORLD_SIZE": "4"}, {}, "RANK is 'one'"),
        ({"RANK": "1.0", "WORLD_SIZE": "4"}, {}, "RANK is '1.0'"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, {}, "RANK is '-1'"),
        ({"RANK": "1_0", "WORLD_SIZE": "40"}, {}, "RANK is '1_0'"),
        ({"RANK": "²", "WORLD_SIZE": "4"}, {}, "RANK is '²'"),
        ({"ALLFOLD_WORLD_SIZE": "tcp://10.0.0.1:80"}, {"rank": 0}, "ALLFOLD_WORLD_SIZE is 'tcp"),
        (exported(4, 4), {}, "RANK is 4, but WORLD_SIZE is 4: ranks go from 0 to 3"),
        (exported(0, 0), {}, "WORLD_SIZE is 0"),
        ({}, {"rank": 4, "world_size": 4}, "rank is 4, but world_size is 4"),
        ({}, {"rank": "1", "world_size": 4}, "rank is '1'"),
        ({}, {"rank": 0.0, "world_size": 4}, "rank is 0.0"),
        ({}, {"rank": -1, "world_size": 4}, "rank is -1"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_name(
    env: dict[str, str], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(env, **arguments)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "step",
    [
        pytest.param({}, id="batch script"),
        pytest.param({"SLURM_STEP_ID": "4294967291"}, id="batch step"),
        pytest.param({"SLURM_STEP_ID": "4294967290"}, id="interactive shell of salloc"),
    ],
)
def test_slurm_counts_only_inside_an_srun_step(step: dict[str, str]) -> None:
    allocation = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert resolve(allocation | step).source == "single process"


def test_the_log_line_says_who_and_why() -> None:
    assert resolve(exported(1, 4)).describe() == "rank 1 of 4 (from torchrun: RANK, WORLD_SIZE)"
    assert resolve({}).describe() == "rank 0 of 1 (single process)"


class NoServiceLinks(Mapping[str, str]):
    """An environment that fails the test when a name is read that Kubernetes may have set."""

    def __getitem__(self, name: str) -> str:
        assert not name.endswith(("_PORT", "_HOST", "_ADDR")), f"{name} was read"
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the environment was listed")

    def __len__(self) -> int:
        return 0


def test_names_that_kubernetes_sets_for_services_are_never_read() -> None:
    assert resolve(NoServiceLinks()).rank == 0
