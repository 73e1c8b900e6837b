"""Rounds beside other ways to send less, in one run: bytes, computing, and the loss of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from allfold_cluster.network import Network, why_not
from benchmarks.rounds.nodes import Told, nodes
from benchmarks.rounds.options import WORLD, Options

ALONE, DDP, BFLOAT16, POWER_SGD = "no communication", "DDP", "DDP, bfloat16", "DDP, PowerSGD"
INT4, TOPK = "rounds of int4", "rounds of topk"
WAYS = (ALONE, DDP, BFLOAT16, POWER_SGD, INT4, TOPK)
WARM_UP = "warm-up"
SEEDS = range(3)

HEAD = ("what", "KB per step and node", "share computing", "test loss", "of each seed", "same bits")
_MODULE = "benchmarks.rounds.peers_rank"
_LINE = "50mbit"
_STEP_SECONDS = 0.01
_EVERY = 16
_SECONDS = 600.0
_NEEDED = ("torch", "sklearn")
# What PyPI has under this name is empty (0.0.0a0): the library is installed from its repository.
_GYM = "exogym"
_GYM_HAS = ("DiLoCo", "SPARTA", "DeMo")


@dataclass(frozen=True)
class Orders:
    """The orders of a rank.

    Attributes:
        steps: of each training.
        step: seconds that a step computes besides.
        every: steps from one round to the next; half of them later it is waited for.
    """

    steps: int
    step: float
    every: int


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """Train in every way, on nodes with lines of their own."""
    network = Network.parse(_LINE)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    reason = ", ".join(f"{name} is not installed" for name in missing) or why_not([network])
    if reason:
        yield {"what": f"not run: {reason}"}
        return
    orders = Orders(options.steps, _STEP_SECONDS, _EVERY)
    trainings = [part(way, seed) for seed in SEEDS for way in WAYS]
    with nodes(WORLD, network) as found:
        _, *told = found.run_parts(_MODULE, [orders] * WORLD, _SECONDS, [WARM_UP, *trainings])
    by_name = dict(zip(trainings, told, strict=True))
    by_way = {way: [by_name[part(way, seed)] for seed in SEEDS] for way in WAYS}
    for way, each in by_way.items():
        yield {"what": way, **figures(each, by_way[ALONE], options.steps)}
    for strategy in _GYM_HAS:
        yield {"what": f"EXO Gym, {strategy}: {_gym()}"}


def part(way: str, seed: int) -> str:
    """The name of a training."""
    return f"{way} {seed}"


def figures(told: Sequence[Told], alone: Sequence[Told], steps: int) -> dict[str, Any]:
    """Return the columns of one way to train, of each seed; ``alone`` is that which sends nothing.

    Args:
        steps: of each training.
    """
    sent = [nbytes for each in told for nbytes in each.sent]
    losses = [fmean(report["loss"] for report in each.reports) for each in told]
    is_same = all(len({report["total"] for report in each.reports}) == 1 for each in told)
    return {
        "KB per step and node": f"{fmean(sent) / steps / 1e3:.2f}",
        "share computing": f"{_slowest(alone) / _slowest(told):.3f}",
        "test loss": f"{fmean(losses):.4f}",
        "of each seed": " ".join(f"{loss:.4f}" for loss in losses),
        "same bits": "yes" if is_same else "no",
    }


def _slowest(told: Sequence[Told]) -> float:
    return float(sum(max(report["elapsed"] for report in each.reports) for each in told))


def _gym() -> str:
    """Return why there is no row of EXO Gym."""
    if find_spec(_GYM) is None or find_spec(f"{_GYM}.trainer") is None:
        return "not installed"
    return "not measured: it simulates its nodes in one process, without lines"
