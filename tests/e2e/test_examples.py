"""The examples, as a user runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli import Command, Commands, commands

EXAMPLES = Path(__file__).parents[2] / "examples"
OK = r"demo: ok accuracy=0\.9[5-9]\d\d ranks_identical=yes"

# Runs the example with something broken on purpose.
SABOTAGED = """
import sys
sys.path.insert(0, {folder!r})
import allfold, torch, train_digits
{sabotage}
train_digits.main()
"""
HIGHER_BAR = "train_digits.MIN_ACCURACY = 1.01"
ONE_BIT = """
train = train_digits.train
def train_and_flip(model, *data, distributed):
    train(model, *data, distributed=distributed)
    if distributed and allfold.rank() == 1:
        model[2].bias.data.view(torch.int32)[0] ^= 1
train_digits.train = train_and_flip
"""
SUM_FOR_MEAN = """
all_reduce = allfold.all_reduce
allfold.all_reduce = lambda tensor, op: all_reduce(tensor, op.replace("mean", "sum"))
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def shape(nodes: int, per_node: int) -> tuple[str, ...]:
    return ("--nodes", str(nodes), "--nproc-per-node", str(per_node))


def last_line(command: Command) -> str:
    return command.out.splitlines()[-1]


def run_sabotaged(allfold: Commands, sabotage: str) -> Command:
    script = allfold.script(SABOTAGED.format(folder=str(EXAMPLES), sabotage=sabotage))
    return allfold.run("run", *shape(1, 2), "--no-prefix", script, status=1)


def test_the_quickstart_prints_the_mean_on_every_rank(allfold: Commands) -> None:
    out = allfold.run("run", *shape(2, 2), EXAMPLES / "quickstart.py").out
    assert sorted(out.splitlines()) == [f"[{rank}] rank {rank} of 4: 1.5" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (2, 2)])
def test_training_ends_with_the_same_weights_everywhere(
    allfold: Commands, nodes: int, per_node: int
) -> None:
    script = EXAMPLES / "train_digits.py"
    command = allfold.run("run", *shape(nodes, per_node), "--no-prefix", script)
    assert re.fullmatch(OK, last_line(command)), command.out
    # Few lines where nobody watches, and none of them a bar that moves.
    assert len(command.out.splitlines()) < 10
    assert "\r" not in command.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        (HIGHER_BAR, "is below 1.01"),
        (ONE_BIT, "the ranks hold different weights"),
        (SUM_FOR_MEAN, "the weights differ from a single process's by"),
    ],
    ids=["accuracy", "one bit on one rank", "sum for mean"],
)
def test_training_fails_with_a_clear_line_when_a_check_fails(
    allfold: Commands, sabotage: str, words: str
) -> None:
    line = last_line(run_sabotaged(allfold, sabotage))
    assert line.startswith("demo: FAILED ")
    assert words in line
