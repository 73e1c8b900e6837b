"""The faults of the store and of control links that a scenario allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Losses:
    """The number of times that each of these faults may happen in a scenario.

    Attributes:
        back: the store goes back to an earlier snapshot.
        empty: the store loses everything, but the orchestrator goes on.
        restarts: the orchestrator and its store are restarted, with nothing in them.
        relinks: all control links break.
        anew: a node is restarted.
    """

    back: int = 0
    empty: int = 0
    restarts: int = 0
    relinks: int = 0
    anew: int = 0
