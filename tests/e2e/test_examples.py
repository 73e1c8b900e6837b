"""The examples, as a user runs them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.cli import Commands, commands
from tests.support.processes.fixtures import services_with
from tests.support.processes.services import Services

EXAMPLES = Path(__file__).parents[2] / "examples"
SYNCHRONISATIONS = (
    r"synchronisations: 16 per token, 4096 bytes each, median \d+ us, \d+% of the time"
)
OK = r"demo: ok accuracy=0\.9[5-9]\d\d ranks_identical=yes"

# The example with everything broken that it checks: the average, one bit on one rank, and a goal
# that cannot be reached.
SABOTAGED = """
import sys
sys.path.insert(0, {folder!r})
import allfold, torch, train_digits

all_reduce, train = allfold.all_reduce, train_digits.train

def train_and_flip_a_bit(model, *data, distributed):
    train(model, *data, distributed=distributed)
    if distributed and allfold.rank() == 1:
        model[2].bias.data.view(torch.int32)[0] ^= 1

allfold.all_reduce = lambda tensor, op: all_reduce(tensor, op.replace("mean", "sum"))
train_digits.train = train_and_flip_a_bit
train_digits.MIN_ACCURACY = 1.01
train_digits.main()
"""
# The elastic example on four ranks, of which those of the second node are killed, each once in an
# epoch of its own. The others go on once it is about to join again.
KILLED = """
import sys
sys.path.insert(0, {folder!r})
import os, pathlib, signal, time, allfold, train_elastic

init, commit = allfold.init, allfold.ElasticSampler.commit
restarted, me = os.environ["ALLFOLD_RESTARTS"] != "0", int(os.environ["RANK"])
doors, deaths = pathlib.Path({doors!r}), {{2: 1, 3: 4}}

def knock_and_init(**arguments):
    if restarted:
        (doors / str(me)).touch()
    return init(**arguments)

def commit_or_die(sampler):
    if not restarted and sampler.epoch == deaths.get(me):
        os.kill(os.getpid(), signal.SIGKILL)
    expected = [rank for rank, epoch in deaths.items() if epoch <= sampler.epoch]
    while allfold.world_size() < 4 and not all((doors / str(rank)).exists() for rank in expected):
        time.sleep(0.01)
    return commit(sampler)

allfold.init, allfold.ElasticSampler.commit = knock_and_init, commit_or_die
train_elastic.main()
"""
# For one command; a machine that has nothing else to do needs a tenth of it.
SECONDS = 200.0


# Two tests let the command start an Allfold, which takes longer than some examples.
services = services_with("node0", "node1")


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def shape(nodes: int, per_node: int) -> tuple[str, ...]:
    return ("--nodes", str(nodes), "--nproc-per-node", str(per_node))


def placed(services: Services, nodes: int, per_node: int) -> tuple[str, ...]:
    """The same shape on agents that run already."""
    names = ("node0", "node1")[:nodes]
    return (*services.options_of(*names), "--nproc-per-node", str(per_node))


def run(allfold: Commands, *arguments: str | Path) -> tuple[int, str]:
    """Status and output of ``allfold run`` after its end."""
    # Where torch may keep what it leaves behind.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(allfold.folder / "torch")}
    command = allfold.start("run", "--no-prefix", *arguments, env=env)
    status = command.wait(SECONDS)
    return status, command.out


@pytest.mark.long
def test_the_quickstart_prints_the_mean_on_every_rank(allfold: Commands) -> None:
    out = allfold.run("run", *shape(2, 2), EXAMPLES / "quickstart.py").out
    assert sorted(out.splitlines()) == [f"[{rank}] rank {rank} of 4: 1.5" for rank in range(4)]


# In the gate, the containers of Compose run it.
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (2, 2)])
def test_training_ends_with_the_same_weights_everywhere(
    allfold: Commands, nodes: int, per_node: int
) -> None:
    status, out = run(allfold, *shape(nodes, per_node), EXAMPLES / "train_digits.py")
    assert status == 0, out
    assert re.fullmatch(OK, out.splitlines()[-1])
    # Few lines where nobody watches, and none of them a bar that moves.
    assert len(out.splitlines()) < 10
    assert "\r" not in out


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_training_fails_with_a_line_that_names_each_check_that_failed(
    allfold: Commands, services: Services
) -> None:
    script = allfold.script(SABOTAGED.format(folder=str(EXAMPLES)))
    status, out = run(allfold, *placed(services, 1, 2), script)
    line = out.splitlines()[-1]
    assert (status, line.partition(":")[0]) == (1, "demo"), out
    assert line.startswith("demo: FAILED accuracy 0.")
    assert " is below 1.01; " in line
    assert "; the ranks hold different weights; " in line
    assert "; the weights differ from a single process's by " in line


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_an_elastic_training_uses_each_image_once_though_ranks_die_and_come_back(
    allfold: Commands, services: Services
) -> None:
    doors = allfold.folder / "doors"
    doors.mkdir()
    script = allfold.script(KILLED.format(folder=str(EXAMPLES), doors=str(doors)))
    options = ("--epochs", "15", "--pause", "0.02")
    command: tuple[str | Path, ...] = (*placed(services, 2, 2), "--max-restarts", "2", script)
    status, out = run(allfold, *command, *options)
    assert status == 0, out
    sizes = [int(size) for size in re.findall(r"^epoch \d+ of 15, ranks: (\d)$", out, re.M)]
    assert 3 in sizes, "ranks have died"
    assert sizes[-1] == 4, "and come back"
    last = out.splitlines()[-1]
    assert re.fullmatch(r"elastic: ok accuracy=0\.9[5-9]\d\d each_image_once_per_epoch=yes", last)


def losses(
    allfold: Commands, place: tuple[str, ...], *command: str | Path
) -> tuple[list[float], str]:
    """The losses of all steps of the plain torch training, and what it printed."""
    file = allfold.folder / "losses.json"
    file.unlink(missing_ok=True)
    status, out = run(allfold, *place, *command, "--losses", file)
    assert status == 0, out
    return json.loads(file.read_text()), out


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize(("options", "per_node"), [((), 2), (("--fsdp",), 1)])
def test_a_plain_torch_training_finds_the_losses_that_it_finds_on_gloo(
    allfold: Commands, services: Services, options: tuple[str, ...], per_node: int
) -> None:
    """FSDP2 on four ranks is compared with Gloo in tests/torch_backend, too."""
    place = placed(services, 2, per_node)
    script = EXAMPLES / "train_ddp.py"
    ours, out = losses(allfold, place, script, *options)
    assert " on allfold: ok accuracy=0." in out.splitlines()[-1]
    gloo = ("--backend", "gloo", "--epochs", "2")
    wrapper = Path(__file__).with_name("on_gloo.py")
    theirs, _ = losses(allfold, place, wrapper, script, *gloo, *options)
    assert len(ours) == 4 * len(theirs)
    # Both add up the same float32 gradients, in another order: an error of 1e-7 per step, which
    # the steps carry on.
    assert ours[:40] == pytest.approx(theirs[:40], rel=1e-6)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_mixed_precision_trains_with_float32_master_weights(
    allfold: Commands, services: Services
) -> None:
    """With the format that rounds most; without it there is one thing less to go wrong."""
    script = EXAMPLES / "train_mixed_precision.py"
    status, out = run(allfold, *placed(services, 2, 2), script, "--wire", "int8")
    assert status == 0, out
    last = out.splitlines()[-1]
    assert re.fullmatch(r"mixed precision: ok accuracy=0\.9[5-9]\d\d wire=int8", last)


def figures(allfold: Commands, services: Services, mode: str) -> list[dict[str, Any]]:
    """The lines of JSON that the training between sites writes, which it prints, too."""
    file = allfold.folder / f"{mode}.json"
    steps = ("--steps", "20", "--every", "5", "--delay", "2", "--evaluate", "10")
    options = ("--mode", mode, *steps, "--json", file)
    script = EXAMPLES / "train_diloco.py"
    status, out = run(allfold, *placed(services, 2, 1), script, *options)
    assert status == 0, out
    lines = file.read_text().splitlines()
    assert [line for line in out.splitlines() if line.startswith("{")] == lines
    return [json.loads(line) for line in lines]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
def test_training_between_sites_sends_little_and_hides_it_and_learns_all_the_same(
    allfold: Commands, services: Services
) -> None:
    local, common = (figures(allfold, services, mode) for mode in ("diloco", "ddp"))
    for lines in (local, common):
        assert [line["step"] for line in lines] == [10, 20]
        assert {line["ranks"] for line in lines} == {2}
        assert lines[1]["loss"] < lines[0]["loss"] < 4.0, "all alike would be 4.6"
    # Between two nodes, 20 steps of 2 bytes an element, and 4 rounds of int4: 0.516 bytes.
    fewer = common[1]["bytes"] / local[1]["bytes"]
    assert fewer == pytest.approx(20 * 2 / (4 * 0.516), rel=0.05)
    assert local[1]["hidden"] > common[1]["hidden"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(("nodes", "strategy"), [(1, "local"), (2, "direct")])
def test_tensor_parallel_decoding_finds_the_tokens_of_a_single_process(
    allfold: Commands, services: Services, nodes: int, strategy: str
) -> None:
    script = EXAMPLES / "tensor_parallel_llm.py"
    status, out = run(allfold, *placed(services, nodes, 2 // nodes), script, "--tokens", "12")
    assert status == 0, out
    assert re.search(r"tokens per second: \d+\.\d", out)
    assert re.search(rf"{SYNCHRONISATIONS}, strategy {strategy}\n", out)
    assert out.splitlines()[-1] == "tokens: the same as a single process"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_tensor_parallel_decoding_runs_on_gloo_for_comparison(
    allfold: Commands, services: Services
) -> None:
    script = EXAMPLES / "tensor_parallel_llm.py"
    options = ("--tokens", "4", "--backend", "gloo")
    status, out = run(allfold, *placed(services, 1, 2), script, *options)
    assert status == 0, out
    assert re.search(rf"{SYNCHRONISATIONS}, backend gloo\n", out)
    assert out.splitlines()[-1] == "tokens: the same as a single process"
