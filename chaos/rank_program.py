"""One rank of a life: it calls the ops of the script and writes what became of each.

python -m chaos.rank_program '{"seat": 0, "world": 4, ...}'
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import AgentLost, AllfoldError
from chaos import contents
from chaos.contents import Array, Reading
from chaos.records import AGENT_LOST, BROKEN, EVICTED, FINISHED, Record, Writer
from chaos.script import CONTROL, WORLD, Burst, Op, bursts, group_of

# So many failures in a row, and the rank takes its group for broken.
_PATIENCE = 20
_INIT_SECONDS = 60.0


@dataclass(frozen=True)
class Orders:
    """The arguments of a rank.

    Attributes:
        stop: once this file is there, the next control op is the last one.
        log: the file for the records.
    """

    seat: int
    world: int
    group: str
    agent: str
    seed: int
    timeout: float
    on_loss: str
    stop: str
    log: str


@dataclass
class Started:
    """An op in flight; without a ``work`` it is over, and may have ``failed``."""

    op: Op
    kind: str
    group: allfold.Group
    called: float
    inputs: list[Array]
    before: str
    work: allfold.Work | None = None
    failed: AllfoldError | None = None
    read: Callable[[], Reading] = field(default=lambda: Reading(0, True))
    result: list[Array] = field(default_factory=list)
    # An all-reduce overwrites its input, but only if it succeeds.
    in_place: bool = False


class Player:
    """Plays the script in the groups of this rank."""

    ranks_in_order = True
    """Ranks are numbered in the order of their seats."""

    def __init__(self, orders: Orders, groups: dict[str, allfold.Group], writer: Writer) -> None:
        self._orders = orders
        self._groups = groups
        self._writer = writer
        self._failures = 0
        self._last = False
        self.latest: Record | None = None

    def play(self) -> str:
        """Call the ops until the last one, or until nothing works; return the rank's ending."""
        for burst in bursts(self._orders.seed):
            started = [each for op in burst.ops for each in self._start(op, burst)]
            for each in started:
                ending = self._finish(each)
                if ending:
                    return ending
            if self._last:
                return FINISHED
        raise AssertionError("the script has no end")

    def _start(self, op: Op, burst: Burst) -> list[Started]:
        group = self._groups[group_of(op, self._orders.seat)]
        if op.kind != "shift":
            return [self._begin(op, group, sync=burst.sync)]
        if group.world_size == 1:
            return []
        return [self._send(op, group), self._receive(op, group)]

    def _begin(self, op: Op, group: allfold.Group, *, sync: bool) -> Started:
        number, seat, size = op.number, self._orders.seat, group.world_size
        own = contents.of_seat(seat, number, op.numel, op.dtype)
        options: dict[str, Any] = {} if sync else {"async_op": True}
        match op.kind:
            case "all_reduce":
                options["strategy"] = op.strategy
                return self._call(
                    op, group, [own], lambda: group.all_reduce(own, **options),
                    lambda: contents.read(own, number), [own], in_place=True,
                )  # fmt: skip
            case "reduce_scatter":
                whole = contents.of_seat(seat, number, op.numel * size, op.dtype)
                start = group.rank * op.numel
                return self._call(
                    op, group, [whole], lambda: group.reduce_scatter(whole, own, **options),
                    lambda: contents.read(own, number, start), [own],
                )  # fmt: skip
            case "all_gather":
                all_of_them = np.zeros(op.numel * size, op.dtype)
                return self._call(
                    op, group, [own], lambda: group.all_gather(own, all_of_them, **options),
                    lambda: contents.read_blocks(
                        all_of_them, number, size, ordered=self.ranks_in_order
                    ), [all_of_them],
                )  # fmt: skip
            case "broadcast":
                root = int(op.root * size)
                return self._call(
                    op, group, [own] if group.rank == root else [],
                    lambda: group.broadcast(own, root, **options),
                    lambda: contents.read_one(own, number), [own],
                )  # fmt: skip
            case "barrier":
                return self._call(op, group, [], lambda: group.barrier(**options))
        assert op.kind == CONTROL, op
        flag = np.array([Path(self._orders.stop).exists()], np.int64)
        return self._call(
            op, group, [flag], lambda: group.all_reduce(flag, **options),
            lambda: self._stop_if(flag), [flag], in_place=True,
        )  # fmt: skip

    def _send(self, op: Op, group: allfold.Group) -> Started:
        own = contents.of_seat(self._orders.seat, op.number, op.numel, op.dtype)
        to = (group.rank + 1) % group.world_size
        return self._call(
            op, group, [own], lambda: group.send(own, to, tag=op.number, async_op=True), kind="send"
        )

    def _receive(self, op: Op, group: allfold.Group) -> Started:
        target = np.zeros(op.numel, op.dtype)
        source = (group.rank - 1) % group.world_size
        return self._call(
            op, group, [], lambda: group.recv(target, source, tag=op.number, async_op=True),
            lambda: contents.read_one(target, op.number), [target], kind="recv",
        )  # fmt: skip

    def _call(
        self,
        op: Op,
        group: allfold.Group,
        inputs: list[Array],
        call: Callable[[], Any],
        read: Callable[[], Reading] = lambda: Reading(0, True),
        result: list[Array] | None = None,
        *,
        in_place: bool = False,
        kind: str | None = None,
    ) -> Started:
        """Start an op. One that waits inside the call, or fails in it, is over when it returns."""
        work, failed = None, None
        before, called = contents.digest(inputs), monotonic()
        try:
            work = call()
        except AllfoldError as error:
            failed = error
        return Started(
            op,
            kind or op.kind,
            group,
            called,
            inputs,
            before,
            work if isinstance(work, allfold.Work) else None,
            failed,
            read,
            result or [],
            in_place,
        )

    def _finish(self, started: Started) -> str:
        """Wait for an op and log it; the rank's ending, if this is one."""
        op, error, work, group = started.op, started.failed, started.work, started.group
        try:
            if work is not None:
                work.wait()
        except AllfoldError as raised:
            error = raised
        ended = monotonic()
        reading = started.read() if error is None else Reading(0, True)
        must_stay = error is not None or not started.in_place
        self.latest = Record(
            number=op.number,
            group=op.group if op.group == WORLD else group_of(op, self._orders.seat),
            kind=started.kind,
            called=started.called,
            ended=ended,
            code=type(error).__name__ if error else "",
            text=error.message if error else "",
            digest=contents.digest(started.result) if error is None else "",
            mask=reading.mask,
            exact=reading.exact,
            epoch=group.epoch if work is None else work.epoch,
            participants=work.participants if work is not None else None,
            rank=group.rank,
            world=group.world_size,
            opening=group.membership.opening,
            before=started.before if must_stay else "",
            after=contents.digest(started.inputs) if must_stay else "",
        )
        self._writer.write(self.latest)
        return self._ending_after(error, started.kind)

    def _ending_after(self, error: AllfoldError | None, kind: str) -> str:
        if isinstance(error, AgentLost):
            return AGENT_LOST
        if error is not None and type(error).__name__ == "Evicted":
            return EVICTED
        if kind not in ("send", "recv"):
            self._failures = self._failures + 1 if error else 0
        return BROKEN if self._failures == _PATIENCE else ""

    def _stop_if(self, flag: Array) -> Reading:
        self._last = bool(flag[0])
        return Reading(0, True)


def open_groups(orders: Orders) -> dict[str, allfold.Group]:
    """Open the group of all seats, and the one of this rank's half."""
    world = allfold.init(
        rank=orders.seat,
        world_size=orders.world,
        group=orders.group,
        agent=orders.agent,
        timeout=orders.timeout,
        init_timeout=_INIT_SECONDS,
        on_loss=orders.on_loss,
    )
    parity = orders.seat % 2
    half = allfold.new_group(range(parity, orders.world, 2), init_timeout=_INIT_SECONDS)
    assert half is not None
    return {WORLD: world, ("even", "odd")[parity]: half}


def leave_all_groups() -> None:
    while allfold.is_initialized():
        with suppress(AllfoldError):  # the log has what failed
            allfold.shutdown()


def main() -> None:
    """Play, then leave the groups. SIGUSR1 writes the stacks of all threads."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    orders = Orders(**json.loads(sys.argv[1]))
    writer = Writer(Path(orders.log))
    player = Player(orders, open_groups(orders), writer)
    print("ready", flush=True)
    ending = player.play()
    leave_all_groups()
    writer.end(ending)


if __name__ == "__main__":
    main()
