"""Rounds beside other ways to send less, in one run: bytes, computing, and the loss of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from allfold_cluster.network import Network, why_not
from benchmarks.rounds.nodes import Told, nodes
from benchmarks.rounds.options import WORLD, Options

ALONE, DDP, BFLOAT16, POWER_SGD = "no communication", "DDP", "DDP, bfloat16", "DDP, PowerSGD"
INT4, TOPK = "rounds of int4", "rounds of topk"
WAYS = (ALONE, DDP, BFLOAT16, POWER_SGD, INT4, TOPK)

HEAD = ("what", "KB per step and node", "share computing", "test loss", "same bits")
_MODULE = "benchmarks.rounds.peers_rank"
_LINE = "50mbit"
_STEP_SECONDS = 0.01
_EVERY = 16
_SECONDS = 300.0
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
    with nodes(WORLD, network) as found:
        told = found.run_parts(_MODULE, [orders] * WORLD, _SECONDS, WAYS)
    alone = told[WAYS.index(ALONE)]
    for way, each in zip(WAYS, told, strict=True):
        yield {"what": way, **figures(each, alone, options.steps)}
    for strategy in _GYM_HAS:
        yield {"what": f"EXO Gym, {strategy}: {_gym()}"}


def figures(told: Told, alone: Told, steps: int) -> dict[str, Any]:
    """Return the columns of one way to train; ``alone`` is the one that sends nothing."""
    losses = [each["loss"] for each in told.reports]
    return {
        "KB per step and node": f"{sum(told.sent) / len(told.sent) / steps / 1e3:.2f}",
        "share computing": f"{_slowest(alone) / _slowest(told):.3f}",
        "test loss": f"{sum(losses) / len(losses):.4f}",
        "same bits": "yes" if len({each["total"] for each in told.reports}) == 1 else "no",
    }


def _slowest(told: Told) -> float:
    return float(max(each["elapsed"] for each in told.reports))


def _gym() -> str:
    """Return why there is no row of EXO Gym."""
    if find_spec(_GYM) is None or find_spec(f"{_GYM}.trainer") is None:
        return "not installed"
    return "not measured: it simulates its nodes in one process, without lines"
