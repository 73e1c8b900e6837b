"""The nodes of a group: what they are, the cost of their links, and the order they stand in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from allfold_core.schema import Rate, Seconds


@dataclass(frozen=True)
class LinkModel:
    """The cost of a link, in the terms of the cost model.

    Attributes:
        latency: α, seconds for one step, software included.
        overhead: o, seconds for each further message inside one step.
        seconds_per_byte: β, the inverse of one direction's bandwidth.
        fold_seconds_per_byte: γ, the inverse of the fold rate.
        shared_cores: the cores of the machine that all nodes share; 0 where they are on several.
    """

    latency: float = 150e-6
    overhead: float = 40e-6
    seconds_per_byte: float = 1 / 1.1e9
    fold_seconds_per_byte: float = 1 / 5e9
    shared_cores: int = 0


LOOPBACK = LinkModel(latency=120e-6, seconds_per_byte=1 / 2e9)
"""The links between nodes of one machine. No wire is in them: what a measurement shows is how busy
the machine was at that moment, from 0.1 to 8 GB/s on the same one. These are those of a quiet
machine of two cores; α has 100 µs of the agents in it."""


class SlowLink(NamedTuple):
    """One direction between two nodes that was measured to be much slower than the others.

    Attributes:
        source: the name of the node that sends.
        destination: that of the node that receives.
        seconds_per_byte: what was measured.
    """

    source: str
    destination: str
    seconds_per_byte: Rate


@dataclass(frozen=True)
class Layout:
    """The order of the nodes in rings and trees, if it differs from that at the opening.

    Attributes:
        ring: the names of the nodes in the order of ``Plan.members``.
        tree: the same in that of ``Plan.tree_order``.
        usual: seconds per byte of each link that is not slow.
        slow: the slow links that this order avoids, sorted.
        reason: why the order was chosen, in a sentence for people.
    """

    ring: tuple[str, ...] = ()
    tree: tuple[str, ...] = ()
    usual: Seconds = 0.0
    slow: tuple[SlowLink, ...] = ()
    reason: str = ""


AS_OPENED = Layout()
"""The order of the group's opening, with all links alike."""


@dataclass(frozen=True)
class Member:
    """One node of the group: where it listens, what it is, and which ranks it holds.

    Attributes:
        incarnation: the name of one life of the node's agent process; "" if it is not known.
    """

    node: str
    control_url: str
    data_address: str
    ranks: tuple[int, ...]
    device_type: str = "cpu"
    zone: str = ""
    incarnation: str = ""
