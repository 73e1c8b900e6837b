"""A group as an elastic sampler sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Members:
    """A group as one rank sees it."""

    rank: int = 0
    world_size: int = 1
    epoch: int = 0
    name: str = "g"
    elastic: bool = False
    joins: str = "any"
