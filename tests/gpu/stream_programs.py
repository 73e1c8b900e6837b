"""Programs of ranks on several streams; run by :mod:`tests.support.processes.rank_worker`.

Results are held up on the GPU: whoever does not wait for them there sees something else.
"""

from __future__ import annotations

from typing import Any

import torch

import allfold
from tests.gpu.devices import (
    Moment,
    delay_results,
    hold_up,
    keep_busy,
    new_stream,
    on,
    path_of,
    synchronize,
    take,
)

NUMEL = 1 << 22
BUSY_SECONDS = 1.5
OTHER = 7.0
_DROPPED = 70
_IN_FLIGHT = 12


def warm(group: allfold.Group, device: str) -> list[float]:
    """A first op of the size of the others: memory is there from now on, and code is loaded."""
    home = take(device, group.rank)
    delay_results(group, home, 0.001)
    keep_busy(home, 0.001)
    reduced = group.all_reduce(torch.ones(NUMEL, device=home))
    return _ends(reduced * 2 - reduced + 0)


def on_a_side_stream(group: allfold.Group, device: str, arena: bool) -> dict[str, Any]:
    """Made, reduced and used on one stream that is busy, without a word to the host between."""
    home = take(device, group.rank)
    with on(new_stream(home)):
        tensor = _new(group, home, arena).fill_(OTHER)
        busy = keep_busy(home, BUSY_SECONDS)
        tensor.fill_(group.rank + 1)
        work = group.all_reduce(tensor, async_op=True)
        returned_early = not busy.is_over
        hold_up(work, group, home, BUSY_SECONDS)
        assert work.wait() is tensor
        result = tensor * 2
        waited_for_copy = Moment(home).is_over
        return {
            "path": path_of(group, home),
            "call waited": not returned_early,
            "wait waited": waited_for_copy,
            "result": _ends(result),
        }


def waited_for_elsewhere(group: allfold.Group, device: str) -> dict[str, list[float]]:
    """Called on one stream and waited for on two others, by a new result as well."""
    home = take(device, group.rank)
    here, there, elsewhere = (new_stream(home) for _ in range(3))
    with on(here):
        keep_busy(home, 0.2)
        tensor = torch.full((NUMEL,), group.rank + 1.0, device=home)
        reduced = group.all_reduce(tensor, async_op=True)
        gathered = group.all_gather(tensor[:3] * 0 + group.rank, async_op=True)
        hold_up(gathered, group, home, 0.5)
    found = {}
    for name, stream in (("there", there), ("elsewhere", elsewhere)):
        with on(stream):
            found[name] = _ends(reduced.wait() + 0)
            found[f"new, {name}"] = (gathered.wait() + 0).tolist()
    return found


def memory_of_a_result(group: allfold.Group, device: str, arena: bool) -> dict[str, Any]:
    """Dropped after it was waited for on another stream: who gets the memory then keeps it.

    The tensors of a list are copied, those of the arena as well.
    """
    home = take(device, group.rank)
    here, there = new_stream(home), new_stream(home)
    with on(here):
        tensors = [_new(group, home, arena).fill_(group.rank + 1.0) for _ in range(2)]
        work = group.all_reduce(tensors, async_op=True)
        hold_up(work, group, home, BUSY_SECONDS)
    with on(there):
        work.wait()
    del tensors, work
    with on(here):
        others = [_new(group, home, arena).fill_(OTHER) for _ in range(4)]
    synchronize(home)
    return {"others": [_ends(each) for each in others]}


def memory_of_an_input(group: allfold.Group, device: str) -> list[float]:
    """Overwritten on the caller's stream as soon as the op is waited for; and dropped before."""
    home = take(device, group.rank)
    with on(new_stream(home)):
        keep_busy(home, 0.2)
        output = torch.full((NUMEL * group.world_size,), OTHER, device=home)
        given = torch.full((NUMEL,), float(group.rank), device=home)
        work = group.all_gather(given, output, async_op=True)
        del given
        others = [torch.full((NUMEL,), OTHER, device=home) for _ in range(4)]
        hold_up(work, group, home, 0.2)
        work.wait()
        found = [_ends(block) for block in output.chunk(group.world_size)]
        assert all((each == OTHER).all() for each in others)
        assert all(first == last for first, last in found)
        return [first for first, _ in found]


def received_behind_other_work(group: allfold.Group, device: str) -> list[float]:
    """Of a rank that brings nothing: what its stream was given before the call comes first."""
    home = take(device, group.rank)
    here, there = new_stream(home), new_stream(home)
    with on(here):
        tensor = torch.full((NUMEL,), OTHER, device=home)
        if group.rank:
            keep_busy(home, 0.5)
            tensor.zero_()
        work = group.broadcast(tensor, root=0, async_op=True)
    with on(there):
        work.wait()
    synchronize(home)
    return _ends(tensor)


def nobody_waits(group: allfold.Group, device: str) -> dict[str, Any]:
    """Ops whose handles are dropped: later ones work, and few are still kept in the end."""
    home = take(device, group.rank)
    kept = torch.ones(1000, device=home)
    for _ in range(_DROPPED):
        group.all_reduce(torch.ones(1000, device=home), async_op=True)
    group.all_reduce(kept, async_op=True)
    group.barrier()
    late = group.all_reduce(torch.ones(1000, device=home))
    for work in group._channel.in_flight():
        work.wait()
    synchronize(home)  # nobody has told a stream to wait for what nobody has waited for
    return {"late": _ends(late), "kept": _ends(kept)}


def many_in_flight(group: allfold.Group, device: str) -> list[list[float]]:
    """Ops of two streams in turn, waited for on a third one in the opposite order."""
    home = take(device, group.rank)
    streams, third = [new_stream(home) for _ in "12"], new_stream(home)
    works = []
    for number in range(_IN_FLIGHT):
        with on(streams[number % 2]):
            keep_busy(home, 0.01 * (number % 3))
            tensor = torch.full((1000 + number,), float(group.rank + number), device=home)
            works.append(group.all_reduce(tensor, async_op=True))
    with on(third):
        return [_ends(work.wait() + 0) for work in reversed(works)][::-1]


def chained(group: allfold.Group, device: str, arena: bool) -> list[float]:
    """One op after the other on a tensor, with something else on the stream between them."""
    home = take(device, group.rank)
    with on(new_stream(home)):
        tensor = _new(group, home, arena).fill_(1.0)
        for _ in range(5):
            keep_busy(home, 0.01)
            group.all_reduce(tensor)
            tensor /= group.world_size
            group.broadcast(tensor, root=0)
            tensor += 1
        return _ends(tensor)


def _new(group: allfold.Group, home: torch.device, arena: bool) -> torch.Tensor:
    if not arena:
        return torch.empty(NUMEL, device=home)
    made: torch.Tensor = group.empty(NUMEL, torch.float32, device=home)
    return made


def _ends(tensor: torch.Tensor) -> list[float]:
    """The least and the greatest element, after what the current stream does with the tensor."""
    return [tensor.min().item(), tensor.max().item()]
