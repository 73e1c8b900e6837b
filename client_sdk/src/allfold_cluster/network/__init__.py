"""Nodes in network namespaces of their own, behind links with a rate or a delay.

Nothing of it touches the machine's own network: the nodes' switch is in a namespace too.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_RATES = {"mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Network:
    """The links of all nodes.

    Attributes:
        name: as the user said it.
        rate: bits per second in each direction; 0 for no limit.
        delay: seconds from a node to another, one way.
        loss: share of the segments of 1448 bytes that get lost on the way.
    """

    name: str
    rate: float
    delay: float
    loss: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """``1gbit``, ``20ms`` (one way), ``20ms+1gbit``, ``20ms+0.1%``; ``ValueError`` else."""
        rate = delay = loss = 0.0
        for part in text.strip().lower().split("+"):
            found = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit|ms|%)", part)
            if not found or not float(found[1]):
                raise ValueError(f"{text!r} is not a network such as 1gbit, 20ms or 20ms+1gbit")
            if found[2] == "ms":
                delay = float(found[1]) / 1e3
            elif found[2] == "%":
                loss = float(found[1]) / 1e2
            else:
                rate = float(found[1]) * _RATES[found[2]]
        return cls(text.strip().lower(), rate, delay, loss)

    def __str__(self) -> str:
        return self.name

    @property
    def is_forwarded(self) -> bool:
        """A process forwards its packets, because kernels may be unable to delay or lose them."""
        return self.delay > 0 or self.loss > 0


def why_not(networks: Iterable[Network]) -> str | None:
    """Return why this process cannot make these networks, or ``None``."""
    if os.geteuid():
        return "networks need root, because they are network namespaces"
    if missing := [command for command in ("ip", "tc") if shutil.which(command) is None]:
        return f"networks need {' and '.join(missing)}, of iproute2"
    if any(each.is_forwarded for each in networks) and not Path("/dev/net/tun").exists():
        return "networks with a delay or a loss need /dev/net/tun"
    return None
