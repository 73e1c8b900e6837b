"""One rank that joins an elastic group while it runs, and plays in it until it is told to leave.

python -m chaos.churn_program '{"seat": 0, "joins": "commit", ...}'
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic

import allfold
from allfold_core.errors import AllfoldError
from chaos.rank_program import Orders, Player, Started, leave_all_groups
from chaos.records import BROKEN, DRAINED, FINISHED, Record, Writer
from chaos.script import CONTROL, WORLD, op_at, shift_after

MOST_RANKS = 8
# Ops that are called together, or one after the other; ranks come to a boundary after each block.
_BLOCK = 8
_INIT_SECONDS = 60.0


@dataclass(frozen=True)
class ChurnOrders(Orders):
    """The arguments of a rank that joins a group while it runs."""

    joins: str = "any"


class ChurnPlayer(Player):
    """Plays the ops by their numbers in the group, from the first one of this rank on."""

    ranks_in_order = False

    def __init__(self, orders: ChurnOrders, group: allfold.Group, writer: Writer) -> None:
        super().__init__(orders, {WORLD: group}, writer)
        self._group = group
        self._has_boundaries = orders.joins == "commit"

    def play(self) -> str:
        """Call ops until the last one, or until this rank has left; return its ending."""
        number = self._group.membership.first
        while True:
            end = number - number % _BLOCK + _BLOCK
            ending = self._play_block(range(number, end)) or self._at_boundary(end)
            if ending:
                return ending
            if self._last:
                return FINISHED
            number = end

    def _play_block(self, numbers: Sequence[int]) -> str:
        together = Random(f"{self._orders.seed}/block {numbers[-1]}").random() < 0.5
        for burst in [numbers] if together else [[number] for number in numbers]:
            started: list[Started] = []
            try:
                for number in burst:
                    if not any(each.failed for each in started):  # a lost agent takes no number
                        self._check_number(number)
                    op = op_at(self._orders.seed, number)
                    is_sync = not together and op.kind != CONTROL and number % 2 == 0
                    started.append(self._begin(op, self._group, sync=is_sync))
                drained = ""
            except allfold.Drained:
                drained = DRAINED
            ending = self._finish_all(started) or drained
            if ending:
                return ending
        return ""

    def _check_number(self, number: int) -> None:
        found = self._group._channel.next_op
        assert found == number, f"the group's next op is {found}, the rank's {number}"

    def _at_boundary(self, end: int) -> str:
        """Exchange messages with the neighbours, where all know the same ranks; let others join."""
        op, group = shift_after(end), self._group
        try:
            if group.world_size > 1 and (self._has_boundaries or not self._newcomers_begin_here()):
                ending = self._finish_all([self._send(op, group), self._receive(op, group)])
                if ending:
                    return ending
            if self._has_boundaries and not self._last:
                group.boundary()
        except allfold.Drained:
            return DRAINED
        return ""

    def _newcomers_begin_here(self) -> bool:
        """Return True if the latest op has told of a later view, or failed and may have done so.

        Those whose first op is the next one have no message of this boundary.
        """
        assert self.latest is not None
        return not self.latest.ok or self.latest.epoch != self._group.epoch

    def _finish_all(self, started: Sequence[Started]) -> str:
        """Log the outcomes of these ops; return the first ending, if one ends the rank."""
        endings = [self._finish(each) for each in started]
        return next(filter(None, endings), "")


def _join(orders: ChurnOrders, writer: Writer) -> allfold.Group | None:
    """Join the group, or open it; ``None``, and a record of the error, if that fails."""
    called = monotonic()
    try:
        return allfold.init(
            group=orders.group,
            agent=orders.agent,
            timeout=orders.timeout,
            init_timeout=_INIT_SECONDS,
            on_loss=orders.on_loss,
            min_world=1,
            max_world=MOST_RANKS,
            joins=orders.joins,
        )
    except AllfoldError as error:
        code, ended = type(error).__name__, monotonic()
        writer.write(Record(-1, WORLD, "init", called, ended, code, error.message))
        return None


def main() -> None:
    """Join, play, and leave. SIGUSR1 writes the stacks of all threads."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    orders = ChurnOrders(**json.loads(sys.argv[1]))
    writer = Writer(Path(orders.log))
    group = _join(orders, writer)
    if group is None:
        writer.end(BROKEN)
        return
    print("ready", flush=True)
    try:
        ending = ChurnPlayer(orders, group, writer).play()
    except AllfoldError as error:  # at a boundary
        code, now = type(error).__name__, monotonic()
        opening = group.membership.opening
        writer.write(Record(-1, WORLD, "boundary", now, now, code, error.message, opening=opening))
        ending = BROKEN
    leave_all_groups()
    writer.end(ending)


if __name__ == "__main__":
    main()
