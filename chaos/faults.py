"""The kinds of faults, and a seeded schedule of them: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random


class Kind(Enum):
    """A fault in the fleet. Its victim is drawn among the live processes."""

    RESET = "reset"
    """All connections between two nodes are reset."""
    FLIP = "flip"
    """A bit of what goes from one node to another is flipped."""
    SLOW = "slow"
    """For a while, one direction between two nodes has a low rate."""
    CUT = "cut"
    """For a moment nothing passes between a node and all others; connections stay."""
    CUT_ONE_WAY = "cut-one-way"
    """For a moment nothing passes from a node to all others."""
    PAUSE_RANK = "pause-rank"
    """SIGSTOP, and SIGCONT a moment later."""
    PAUSE_AGENT = "pause-agent"
    RESTART_ORCHESTRATOR = "restart-orchestrator"
    """SIGKILL, and a new process a moment later."""
    RESTART_REDIS = "restart-redis"
    """The same; what it knew is gone."""
    KILL_RANK = "kill-rank"
    """SIGKILL, for good."""
    KILL_AGENT = "kill-agent"
    """SIGKILL, for good: its ranks are lost with it."""
    STOP_AGENT = "stop-agent"
    """SIGSTOP for good: its node falls silent."""
    PART = "part"
    """A node is cut off from all others for good."""
    PART_ONE_WAY = "part-one-way"
    """From now on nothing passes from a node to all others."""


ENDURED = tuple(Kind)
"""The faults that no op may notice, whatever comes together: those of the test and of make chaos.

Whoever adds a kind that a group does not outlive yet leaves it out here.
"""

TAKES_A_RANK = (Kind.KILL_RANK,)
TAKES_A_NODE = (Kind.KILL_AGENT, Kind.STOP_AGENT, Kind.PART, Kind.PART_ONE_WAY)
SILENCES_A_NODE = (Kind.STOP_AGENT, Kind.PART, Kind.PART_ONE_WAY)
"""Nothing proves that such a node is gone, so the others must outnumber those that are silent."""

_GAP_SECONDS = (0.5, 2.0)
_SECOND_FAULT = 0.3
_SECOND_FAULT_SECONDS = 0.05
# How long what ends by itself lasts. Pauses are far below what a node is given up for.
_LASTS = {
    Kind.SLOW: (0.2, 1.0),
    Kind.CUT: (0.02, 0.25),
    Kind.CUT_ONE_WAY: (0.02, 0.25),
    Kind.PAUSE_RANK: (0.05, 0.5),
    Kind.PAUSE_AGENT: (0.02, 0.25),
    Kind.RESTART_ORCHESTRATOR: (0.1, 2.0),
    Kind.RESTART_REDIS: (0.1, 2.0),
}


@dataclass(frozen=True)
class Fault:
    """One fault of the schedule.

    Attributes:
        after: seconds since the fault before.
        lasts: seconds until it ends; 0 if it does not.
        victim, other: fractions, by which those it happens to are drawn from the living.
    """

    kind: Kind
    after: float
    lasts: float
    victim: float
    other: float


def schedule(seed: int, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Yield faults without end; often a second one comes while the first is being mended.

    Each kind comes once before any comes again, so that a short run has all of them, and no kind
    comes so often that a group has no time to recover.
    """
    random = Random(f"faults/{seed}")
    for kind in _dealt(random, kinds):
        soon = random.random() < _SECOND_FAULT
        gap = (0.0, _SECOND_FAULT_SECONDS) if soon else _GAP_SECONDS
        yield Fault(
            kind,
            random.uniform(*gap),
            random.uniform(*_LASTS[kind]) if kind in _LASTS else 0.0,
            random.random(),
            random.random(),
        )


def _dealt(random: Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    while kinds:
        yield from random.sample(kinds, len(kinds))


def leaves_enough(kind: Kind, nodes: int, silent: int) -> bool:
    """Return True if a group can go on after a fault of this kind.

    A node that is only silent is given up where most nodes are still heard: while the orchestrator
    has lost its records, and where two sides do not hear each other. A fault that goes beyond that
    shows nothing.

    Args:
        nodes: that no fault has taken.
        silent: nodes whose silence is not decided on yet.
    """
    if kind not in TAKES_A_NODE:
        return True
    return nodes - 1 > silent + (kind in SILENCES_A_NODE)


def parse(text: str) -> tuple[Kind, ...]:
    """Parse names with commas; ``endured`` and ``all`` are lists of them; ``ValueError`` else."""
    lists = {"endured": ENDURED, "all": tuple(Kind), "none": ()}
    if text in lists:
        return lists[text]
    return tuple(dict.fromkeys(Kind(name) for name in text.split(",")))
