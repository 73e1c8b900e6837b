"""The matrix, the figures, the options and the shares of the benchmark suite: pure logic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from allfold._calls.options import Options
from allfold.cli._bench.data import Bench
from allfold.cli._bench.kinds import KINDS as COLLECTIVES
from allfold_cluster.network import Network
from benchmarks import cores, machine, mpi, options, requirements, runs
from benchmarks.data import LARGEST, RandomShare, count_wrong
from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import Figures, percentile
from benchmarks.options import Scale
from benchmarks.plan import (
    BARRIER,
    KINDS,
    MIB,
    MODELS,
    Case,
    Shape,
    cases,
    full_cases,
    human_size,
    human_time,
    latency_cases,
    most_ops,
    parse_size,
    parse_time,
    usual_cases,
)
from tests.benchmarks.samples import result


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_recv", 1.0),
        (BARRIER, 1.0),
        ("burst", 1.5),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(kind: str, factor: float) -> None:
    assert Case(kind, 64).bus_factor(4) == factor


def test_bandwidths_and_ratios_come_from_the_medians() -> None:
    found = result({"allfold": 0.001, "gloo": 0.004}, size=MIB)
    assert found.algbw("allfold") == pytest.approx(MIB / 1e6)
    assert found.busbw("allfold") == pytest.approx(1.5 * MIB / 1e6)
    assert found.ratio("gloo") == pytest.approx(4.0)
    assert found.cpu_per_gb("gloo") == pytest.approx(0.5 / (MIB / 1e9))


def test_a_barrier_has_no_bandwidth() -> None:
    found = result({"allfold": 0.001}, kind=BARRIER, size=0)
    assert (found.algbw("allfold"), found.busbw("allfold")) == (None, None)


def test_communication_is_what_a_step_takes_longer_than_without() -> None:
    found = result({"allfold": 0.3, "gloo": 0.5, "no_sync": 0.2}, kind="ddp")
    assert found.communication("gloo") == pytest.approx(0.3)
    assert found.communication("no_sync") is None


def test_figures_are_of_the_sorted_samples() -> None:
    figures = Figures.of([7.5, 1.0, 4.0, 2.0, 3.0], wrong=2, cpu=0.5)
    assert (figures.median, figures.mean, figures.p99, figures.least) == (3.0, 3.5, 7.5, 1.0)
    assert (figures.samples, figures.wrong) == (5, 2)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile(range(1, 11), 90) == 9
    assert percentile([7.0], 90) == 7.0


@pytest.mark.parametrize("text", ["0x1", "2", "2x", "x2", "-1x2", "2x1x1"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a shape"):
        Shape.parse(text)


def test_a_shape_has_nodes_times_ranks() -> None:
    assert Shape.parse("2x4") == Shape(2, 4)
    assert Shape(2, 4).world == 8


def test_sizes_are_read_and_shown_with_their_units() -> None:
    assert [parse_size(text) for text in ("4", "4K", "64M", "1GiB")] == [4, 4096, 64 * MIB, 1 << 30]
    assert [human_size(size) for size in (4, 4096, 6144, 64 * MIB)] == [
        *("4 B", "4 KiB", "6 KiB", "64 MiB"),
    ]
    with pytest.raises(ValueError, match="is not a size"):
        parse_size("0")


def test_every_size_fits_the_ranks() -> None:
    assert Case("all_reduce", 4).fitting(4).size == 4
    assert Case("all_gather", 4).fitting(4).size == 16
    assert Case("all_to_all", 1000).fitting(3).size == 996
    assert Case(BARRIER, 0).fitting(4).size == 0


def test_the_full_matrix_has_everything_from_4_bytes_to_256_mib() -> None:
    found = full_cases()
    assert {case.kind for case in found} == set(KINDS)
    sizes = sorted({case.size for case in found} - {0})
    assert (sizes[0], sizes[-1]) == (4, 256 * MIB)


def test_a_barrier_is_measured_once() -> None:
    assert cases([BARRIER], [4, 8]) == [Case(BARRIER, 0)]


def test_the_usual_cases_have_every_collective() -> None:
    assert {case.kind for case in usual_cases(Shape(1, 4))} == set(KINDS)
    assert {case.kind for case in usual_cases(Shape(4, 1))} == {"all_reduce"}


def test_large_ops_are_not_repeated_in_a_sample() -> None:
    assert [most_ops(Case("all_reduce", size)) for size in (4096, MIB, 64 * MIB)] == [20, 10, 1]
    assert most_ops(Case("burst", 4096)) == 1


def test_a_selection_is_what_is_measured() -> None:
    chosen = options.parse(
        ["--shapes", "1x2", "--kinds", "all_reduce,barrier", "--sizes", "4K", "--peers", "gloo"]
    )
    assert chosen.libraries == ["allfold", "gloo"]
    assert chosen.parts == ["collectives"]
    assert chosen.cases(Shape(1, 2), None) == [
        *(Case("all_reduce", 4096), Case("all_reduce", 4096, 0.005)),
        *(Case(BARRIER, 0), Case(BARRIER, 0, 0.005)),
    ]


def test_what_is_said_twice_is_measured_once() -> None:
    chosen = options.parse(
        ["--peers", "gloo,gloo", "--shapes", "1x2,1x2", "--kinds", "all,barrier"]
    )
    assert chosen.libraries == ["allfold", "gloo"]
    assert chosen.shapes == [Shape(1, 2)]
    assert chosen.kinds == KINDS


def test_what_is_not_installed_is_named_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    with pytest.raises(BenchmarkFailed, match="not installed: torch; install"):
        requirements.require(["gloo", "gloo_host", "nccl"], plots=False)
    with pytest.raises(BenchmarkFailed, match="not installed: torch, mpi4py, matplotlib; install"):
        requirements.require(["plain", "gloo", "mpich"], plots=True)
    with pytest.raises(BenchmarkFailed, match=r"deepspeed; .* -r requirements-deepspeed.txt"):
        requirements.require(["deepspeed"], plots=False)
    requirements.require(["plain"], plots=False)


def test_an_mpi_without_its_starter_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "starter", lambda _: None)
    with pytest.raises(BenchmarkFailed, match="Open MPI; install with: apt-get install openmpi"):
        requirements.require(["openmpi"], plots=False)
    assert "the mpiexec of MPICH is not installed" in requirements.left_out("mpich")


@pytest.mark.parametrize("peer", ["deepspeed", "openmpi", "ucx", "mpich"])
def test_a_peer_takes_part_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    monkeypatch.setattr(options, "is_installed", lambda each: each != peer)
    chosen = options.parse(["--shapes", "1x2"])
    assert peer not in chosen.libraries
    assert chosen.left_out == [peer]
    assert options.parse(["--peers", "gloo"]).left_out == []


def test_a_peer_that_cannot_be_imported_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "commux.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    requirements._import_error.cache_clear()
    assert "its wheel was built for another torch (ImportError: undefined symbol)" in (
        requirements.left_out("ucx")
    )
    requirements._import_error.cache_clear()


def test_open_mpi_binds_no_rank_and_gives_cores_away_where_there_are_more_ranks() -> None:
    command = mpi.start("openmpi", 4, crowded=True)
    assert command[1:5] == ["-n", "4", "--bind-to", "none"]
    assert "mpi_yield_when_idle" in command
    assert "mpi_yield_when_idle" not in mpi.start("openmpi", 2, crowded=False)
    assert mpi.settings("openmpi", crowded=False)["MPI4PY_MPIABI"] == "openmpi"
    assert mpi.settings("mpich", crowded=True) == {"MPIR_CVAR_NOLOCAL": "1"}


@pytest.mark.parametrize("variable", ["PMI_RANK", "OMPI_COMM_WORLD_RANK"])
def test_a_rank_has_the_number_that_its_mpi_gave_it(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "3")
    assert mpi.rank() == 3


def test_another_priority_than_the_ordinary_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpriority", lambda *_: -5)
    assert machine.priority() == "nice -5"
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    assert machine.priority() is None
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_FIFO)
    assert "scheduling policy" in str(machine.priority())


def test_a_node_is_pinned_where_there_is_a_core_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert runs.why_not(options.parse(["--pin", "--shapes", "2x2"])) is None
    assert "4 nodes with a core each" in str(runs.why_not(options.parse(["--pin"])))


def test_a_process_is_pinned_with_all_its_threads() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        cores.pin([child.pid])
        assert os.sched_getaffinity(child.pid) == {cores.available()[0]}


def test_a_training_step_has_gradients_of_three_sizes() -> None:
    assert [human_size(model.size) for model in MODELS] == ["0.2 MiB", "16 MiB", "65 MiB"]


def test_without_a_selection_everything_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "is_installed", lambda _: True)
    chosen = options.parse([])
    ours, theirs = ["allfold", "plain", "allfold-torch"], ["gloo", "ucx", "mpich", "openmpi"]
    assert chosen.libraries == [*ours, *theirs, "deepspeed"]
    assert set(chosen.parts) == {"collectives", "burst", "decode", "ddp", "memory"}
    assert [str(shape) for shape in chosen.shapes] == ["1x2", "1x4", "2x1", "2x2", "4x1"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--peers mvapich",
        "--network 5parsecs",
        "--network 1gbit --peers mpich",
        "--network 1gbit --peers openmpi",
        "--network 1gbit --pin",
        "--device cuda --pin",
        "--network 1gbit --peers deepspeed",
        "--computing 2",
        "--pages no/such/folder",
        "--network 1gbit --shapes 1x4",
        "--sizes 4X",
        "--kinds all_gossip",
        "--peers none,gloo",
        "--json no/such/folder/results.json",
        "--device tpu",
        "--device cuda --peers mpich",
        "--peers nccl",
        "--device cuda --network 1gbit",
        "--device cuda --parts ddp",
        "--device cuda --parts decode",
        "--parts limits",
        "--sanitize",
        "--device cuda --sanitize valgrind",
        "--parts scale --nodes 2",
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(arguments.split())
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_ranks_on_gpus_are_measured_by_the_same_plan() -> None:
    chosen = options.parse(["--device", "cuda"])
    assert chosen.parts == ["limits", "collectives", "burst"]
    assert chosen.libraries == ["allfold", "plain", "gloo", "gloo_host", "nccl"]
    assert {case.kind for case in chosen.cases(Shape(1, 2), None)} == set(KINDS)
    picked = options.parse(["--device", "cuda", "--sizes", "4K,1G", "--computing", "0"])
    assert picked.cases(Shape(1, 2), None) == cases(["all_reduce"], [4096, 1 << 30])


@pytest.mark.parametrize(("gpus", "is_measured"), [(1, False), (2, True)])
def test_nccl_needs_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, is_measured: bool
) -> None:
    monkeypatch.setattr(runs, "gpus", lambda: gpus)
    chosen = options.parse(["--device", "cuda", "--peers", "nccl,gloo"])
    found = runs.libraries_of(chosen, Shape(1, 2))
    assert found == (["allfold", "nccl", "gloo"] if is_measured else ["allfold", "gloo"])


def test_deepspeed_is_measured_on_one_node() -> None:
    chosen = options.parse(["--peers", "deepspeed,gloo"])
    assert "deepspeed" in runs.libraries_of(chosen, Shape(1, 4))
    assert runs.libraries_of(chosen, Shape(2, 2)) == ["allfold", "gloo"]
    assert "deepspeed is left out of 2x1, 2x2, 4x1: it has one node only" in runs.left_out(chosen)


def test_latency_is_of_ops_back_to_back_and_after_computing() -> None:
    chosen = options.parse(["--parts", "latency"])
    found = chosen.cases(Shape(1, 2), None)
    assert {(case.kind, case.computing) for case in found} == {
        ("all_reduce", 0.0),
        ("all_reduce", 0.005),
    }
    assert {case.size for case in found} == {case.size for case in latency_cases()}
    assert (chosen.ops, options.parse(["--parts", "latency", "--ops", "60"]).ops) == (500, 60)
    assert options.parse(["--parts", "collectives"]).ops == 0


def test_latency_of_tensors_on_gpus_is_that_of_4_kib_to_1_mib() -> None:
    chosen = options.parse(["--device", "cuda", "--parts", "latency"])
    sizes = [case.size >> 10 for case in chosen.cases(Shape(2, 1), None) if not case.computing]
    assert sizes == [4, 16, 64, 256, 1024]


def test_any_collective_can_be_measured_after_computing() -> None:
    chosen = options.parse(["--kinds", "barrier", "--computing", "0,0.5ms"])
    assert chosen.cases(Shape(1, 2), None) == [Case(BARRIER, 0), Case(BARRIER, 0, 0.0005)]
    assert Case(BARRIER, 0, 0.0005).title == "barrier after 0.5ms"


def test_times_are_read_and_shown_with_their_unit() -> None:
    assert [parse_time(text) for text in ("0", "2ms", "0.5ms")] == [0.0, 0.002, 0.0005]
    assert [human_time(seconds) for seconds in (0.0, 0.002)] == ["0", "2ms"]


def test_scale_is_three_parts_of_the_same_program() -> None:
    chosen = options.parse(["--parts", "scale", "--nodes", "10000"])
    assert chosen.parts == ["membership", "orchestrator", "predictions"]
    assert chosen.scale == Scale(10_000, 8, 1, 64)


def test_networks_have_a_rate_a_delay_and_losses_or_some_of_these() -> None:
    assert Network.parse("1gbit") == Network("1gbit", 1e9, 0.0)
    assert Network.parse("20ms+200mbit") == Network("20ms+200mbit", 2e8, 0.02)
    assert Network.parse("1gbit+0.1%") == Network("1gbit+0.1%", 1e9, 0.0, 0.001)
    chosen = options.parse(["--network", "1gbit,20ms", "--wires", "int8", "--json", "x"])
    assert [network.name for network in chosen.networks] == ["1gbit", "20ms"]
    assert chosen.libraries == ["allfold", "allfold:int8", "gloo"]
    assert chosen.json == Path("x")


# --- the data


def share(kind: str, rank: int, world: int = 4, variant: int = 0) -> RandomShare:
    return RandomShare(Bench(kind, "sum", "float32", 1000, Options()), rank, world, variant)


def test_ranks_bring_different_whole_numbers() -> None:
    ours, theirs = share("all_reduce", 0), share("all_reduce", 1)
    x = ours.brought_by(0, 1000)
    assert x.dtype == np.float32
    assert np.array_equal(x, np.rint(x))
    assert np.abs(x).max() <= LARGEST
    assert not np.array_equal(x, ours.brought_by(1, 1000))
    assert np.array_equal(x, theirs.brought_by(0, 1000))
    assert np.mean(x == share("all_reduce", 0, variant=1).brought_by(0, 1000)) < 0.01


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_the_expected_results_are_those_of_the_definition(kind: str) -> None:
    world = 4
    given = np.stack([share(kind, rank).brought_by(rank, 1000) for rank in range(world)])
    for rank in range(world):
        ours = share(kind, rank)
        block = slice(rank * 250, (rank + 1) * 250)
        definition = {
            "all_reduce": given.sum(0),
            "reduce": given.sum(0) if rank == 0 else None,
            "broadcast": given[0],
            "all_gather": given[:, :250].reshape(-1),
            "reduce_scatter": given.sum(0)[block],
            "gather": given[:, :250].reshape(-1) if rank == 0 else None,
            "scatter": given[0][block],
            "all_to_all": given[:, block].reshape(-1),
            "send_recv": given[(rank - 1) % world],
        }[kind]
        expected = COLLECTIVES[kind].expected(ours)
        assert (expected is None) == (definition is None)
        if expected is not None and definition is not None:
            assert np.array_equal(expected[: len(definition)], definition)


def test_sums_of_the_wire_of_the_tensor_are_exact() -> None:
    ours = share("all_reduce", 0, world=3)
    total = ours.folded()
    assert ours.tolerance(nodes=2, wire="native") == 0
    result = total.copy()
    assert count_wrong(result, total, 0.0) == 0
    result[7] = np.nextafter(result[7], np.float32(np.inf))
    assert count_wrong(result, total, 0.0) == 1


def test_a_lossy_wire_may_be_wrong_by_its_rounding_and_no_more() -> None:
    ours = share("all_reduce", 0)
    total, allowed = ours.folded(), ours.tolerance(nodes=2, wire="int8")
    assert count_wrong(total + np.float32(allowed * 0.9), total, allowed) == 0
    assert count_wrong(total + np.float32(allowed * 1.1), total, allowed) == len(total)
    assert count_wrong(np.full_like(total, np.nan), total, allowed) == len(total)
