"""An all-reduce in place of one size, by several contestants in turn. A rank's side.

The data are random whole numbers that float32 adds up exactly. Of long tensors they repeat
themselves after :data:`PERIOD` elements, so that they are made and checked on the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

import allfold
from allfold._options import Options
from allfold.cli._bench_data import Bench
from benchmarks.data import RandomShare
from benchmarks.gpu.devices import Device
from benchmarks.gpu.peers import Peers, Reduce
from benchmarks.gpu.plan import ARENA, OURS

PERIOD = 4_194_301
"""A prime, so that what lies at another's place does not look right."""


class AllReduce:
    """One size, see :class:`benchmarks.workloads.Workload`.

    Attributes:
        contestants: ``arena`` (Allfold on a tensor of ``group.empty``), ``plain`` (on torch's own)
            and the peers; all but the first have one tensor together.
    """

    def __init__(
        self,
        size: int,
        contestants: Sequence[str],
        group: allfold.Group,
        device: Device,
        peers: Peers | None,
    ) -> None:
        self.contestants = contestants
        self._device = device
        count = size // 4
        self._tensors: dict[str, torch.Tensor] = {}
        self._operations: dict[str, Reduce] = {}
        plain = torch.empty(count, dtype=torch.float32, device=device.name)
        for name in contestants:
            tensor = plain
            if name == ARENA:
                tensor = group.empty(count, torch.float32, device=device.name)
            self._tensors[name] = tensor
            self._operations[name] = _operation(name, tensor, group, peers)
        period = Bench("all_reduce", "sum", "float32", min(count, PERIOD), Options())
        self._share = share = RandomShare(period, group.rank, group.world_size)
        self._given = self._on_device(torch.from_numpy(share.brought_by(group.rank, share.count)))
        self._expected = self._on_device(torch.from_numpy(share.folded()))

    def reset(self, contestant: str) -> None:
        """Fill its tensor with what the rank brings."""
        body, rest = _periods(self._tensors[contestant], len(self._given))
        body.copy_(self._given.expand_as(body))
        rest.copy_(self._given[: len(rest)])
        self._device.synchronize()

    def run(self, contestant: str, ops: int) -> list[float]:
        """Seconds of each op, back to back; each is over when the stream is."""
        operation, synchronize = self._operations[contestant], self._device.synchronize
        found = []
        for _ in range(ops):
            began = time.perf_counter()
            operation()
            synchronize()
            found.append(time.perf_counter() - began)
        return found

    def count_wrong(self, contestant: str, ops: int) -> int:
        """Elements that so many ops have not made what they should be."""
        body, rest = _periods(self._tensors[contestant], len(self._expected))
        truth = self._expected * self._share.growth(ops)
        allowed = self._share.tolerance(1, ops, "native")
        pairs = [(row, truth) for row in body] + [(rest, truth[: len(rest)])]
        return sum(int((~((ours - theirs).abs() <= allowed)).sum()) for ours, theirs in pairs)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device.name)


def _operation(
    name: str, tensor: torch.Tensor, group: allfold.Group, peers: Peers | None
) -> Reduce:
    if name in OURS:
        return lambda: group.all_reduce(tensor)
    if peers is None:
        raise ValueError(f"the rank has not joined {name}")
    return peers.all_reduce(name, tensor)


def _periods(tensor: torch.Tensor, period: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole periods of a tensor, as rows, and what is left."""
    whole = tensor.numel() // period * period
    return tensor[:whole].view(-1, period), tensor[whole:]
