"""One op whose local ranks have memory on GPUs: its kernels, and what they read and write.

One GPU folds the op. It reads the ranks' memory directly if it can reach it: its own memory, that
of GPUs which it can access, and page-locked memory of the host, which holds the tensors of ranks
without a GPU and the work buffer of an exchange with other nodes. Memory that it cannot reach is
copied through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.gpu.device import GpuDevice, GpuEvent, RankMemory
from allfold_agent.gpu.gpus import Pins, fold_on
from allfold_agent.gpu.kernels import Variant
from allfold_agent.runtime.buffers import Buffer, BufferPool, MappedMemory
from allfold_agent.runtime.locks import make_lock, make_rlock
from allfold_core.errors import GpuFailed
from allfold_core.schedules.parts import End, NodeParts, Part, Piece

Done = Callable[[Exception | None], None]

_MOST_IN_FLIGHT = 64
_MOST_PIECES = 16  # of an op: with a launch each, the GPU has room for all that are in flight
_LEAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class GpuRange:
    """Bytes of a rank on a GPU."""

    memory: RankMemory
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.memory.address + self.offset


@dataclass(frozen=True, slots=True)
class HostRange:
    """Bytes of a rank in the memory of the host; none of them are nowhere."""

    mapping: MappedMemory | None
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Nowhere:
    """The bytes of a rank that is dead: nobody reads what would be written there."""

    nbytes: int


Place = GpuRange | HostRange | Nowhere


class GpuOperands:
    """The operands of one op on a GPU.

    Nothing here waits for the GPU: the functions give it work, and call ``done`` when that is done,
    from the thread that watches GPUs, or at once where it cannot be given.

    Args:
        inputs: what each local rank brings.
        outputs: where each gets its result.
        buffers: for what has to be copied through the host.
        until: when the op has to be over (monotonic). What is given to the GPU has a second in any
            case, then it counts as stuck.
    """

    def __init__(
        self,
        layout: NodeParts,
        arithmetic: Arithmetic,
        inputs: Mapping[int, Place],
        outputs: Mapping[int, Place],
        *,
        buffers: BufferPool,
        pins: Pins,
        until: float,
    ) -> None:
        self._layout = layout
        self._arithmetic = arithmetic
        self._buffers = buffers
        self._pins = pins
        self._until = until
        self._inputs = inputs
        self._outputs = outputs
        homes = _homes(inputs, outputs)
        devices = {home.ordinal: home for home in homes}
        chosen = fold_on(
            [home.ordinal for home in homes],
            lambda one, other: devices[one].reaches(devices[other]),
        )
        self._device = devices.pop(chosen)
        self._others = [*devices.values()]
        self._lock = make_rlock("gpu operands")  # of the two below
        self._sources: dict[int, int] | None = None
        # Memory of the host in place of what the GPU does not reach.
        self._detours: dict[tuple[int, bool], Buffer] = {}
        self._count = make_lock("gpu work")  # of the two below; held for a moment only
        self._given = 0  # and not done yet
        self._released = False

    # What an op does

    def fold_locally(self, pieces: Sequence[Piece], done: Done) -> None:
        """Fold what the local ranks bring into their outputs, where there is no other node."""
        size = self._arithmetic.itemsize

        def work() -> list[GpuEvent]:
            sources, targets = self._bring(), self._addresses(self._outputs, is_output=True)
            for part, start, stop in pieces:
                if part.targets and part.sources and stop > start:
                    inputs = _at(sources, part.sources, part, start, size)
                    outputs = _at(targets, part.targets, part, start, size)
                    variant = folding(self._arithmetic, len(inputs))
                    self._launch(variant, inputs, outputs, stop - start)
            return self._take_home(pieces)

        self._give(work, done)

    def contribute(self, pieces: Iterable[Piece], buffer: Buffer, done: Done) -> None:
        """Fold what the local ranks bring to ranges of a work buffer."""
        size = self._arithmetic.itemsize

        def work() -> list[GpuEvent]:
            sources = self._bring()
            for part, start, stop in pieces:
                if part.sources and stop > start:
                    inputs = _at(sources, part.sources, part, start, size)
                    variant = contributing(self._arithmetic, len(inputs))
                    self._launch(variant, inputs, [self._place(buffer, start)], stop - start)
            return [self._device.mark()]

        self._give(work, done)

    def hand_out(self, pieces: Sequence[Piece], buffer: Buffer, done: Done) -> None:
        """Write what the work buffer has of the result to the local ranks that get it."""
        size = self._arithmetic.itemsize
        variant = finishing(self._arithmetic)

        def work() -> list[GpuEvent]:
            targets = self._addresses(self._outputs, is_output=True)
            for part, start, stop in pieces:
                if part.targets and stop > start:
                    outputs = _at(targets, part.targets, part, start, size)
                    self._launch(variant, [self._place(buffer, start)], outputs, stop - start)
            return self._take_home(pieces)

        self._give(work, done)

    def outputs_are_no_inputs(self) -> bool:
        """Return true if no rank's output overlaps its input."""
        return not any(_overlap(self._inputs[rank], out) for rank, out in self._outputs.items())

    def is_quick(self, pieces: Sequence[Piece]) -> bool:
        """Return true if :meth:`fold_locally` has no long preparation."""
        places = [*self._inputs.values(), *self._outputs.values()]
        at_hand = all(
            isinstance(each, GpuRange) and not self._is_out_of_reach(each) for each in places
        )
        # Else a launch may have to wait.
        idle = self._device.completions.count < _MOST_IN_FLIGHT and len(pieces) <= _MOST_PIECES
        return (
            idle
            and at_hand
            and all(
                self._device.has(folding(self._arithmetic, len(part.sources)))
                for part, _, _ in pieces
                if part.targets and part.sources
            )
        )

    def release(self) -> None:
        """Release the memory in which results and inputs were on their way.

        The GPU may still be at work there, where the attempt was given up: then once that is done.
        """
        with self._count:
            self._released = True
        self._release_if_idle()

    def _release_if_idle(self) -> None:
        with self._count:
            if not self._released or self._given:
                return
            detours, self._detours = self._detours, {}
        for buffer in detours.values():
            buffer.release()

    # How

    def _give(self, work: Callable[[], list[GpuEvent]], done: Done) -> None:
        """Give the GPU work, and call ``done`` when that is done; none after :meth:`release`."""
        with self._count:
            is_wanted = not self._released
            self._given += is_wanted
        if not is_wanted:
            done(None)
            return

        def ended(error: Exception | None) -> None:
            if not isinstance(error, GpuFailed):  # a failed GPU may still use the memory: keep it
                with self._count:
                    self._given -= 1
                self._release_if_idle()
            done(error)

        self._start(work, ended)

    def _start(self, work: Callable[[], list[GpuEvent]], done: Done) -> None:
        if self._device.completions.is_stuck:
            done(GpuFailed(f"{self._device.name.name} is stuck with what it was given before"))
            return
        try:
            with self._device.current():
                points = work()
        except Exception as error:  # noqa: BLE001 - it is handed on
            self._give_up(error, done)
            return
        self._await(points, done)

    def _give_up(self, error: Exception, done: Done) -> None:
        """Something could not be given; what was given before it still has to end."""
        given = []
        for device in (self._device, *self._others):
            with suppress(GpuFailed):  # the error that is known already says why
                given.append(_mark(device))
        # If a GPU is stuck as well, that matters more: it may still use the memory.
        self._await(given, lambda late: done(late or error))

    def _await(self, points: Sequence[GpuEvent], done: Done) -> None:
        """Call ``done`` when all points are reached; those of several GPUs one after the other."""
        if not points:
            done(None)
            return
        first, *others = points
        seconds = max(self._until - monotonic(), _LEAST_SECONDS)

        def reached(error: Exception | None) -> None:
            if isinstance(error, TimeoutError):
                name = first.device.name.name
                error = GpuFailed(
                    f"{name} is stuck: it has not done its work after {seconds:.1f} s"
                )
            self._await(others, lambda later: done(error or later))

        first.device.completions.add(first, reached, seconds)

    def _launch(
        self, variant: Variant, inputs: Sequence[int], outputs: Sequence[int], numel: int
    ) -> None:
        factor, divisor = self._arithmetic.factor, self._arithmetic.divisor
        self._device.launch(variant, inputs, outputs, numel, factor, float(divisor or 1))

    def _place(self, buffer: Buffer, start: int) -> int:
        """Return the GPU's address of an element of the index space in a work buffer."""
        base = self._pins.address(buffer.mapping, self._device)
        return base + self._layout.place(start) * self._arithmetic.kept_itemsize

    def _addresses(self, places: Mapping[int, Place], *, is_output: bool) -> dict[int, int]:
        """Return the addresses at which the folding GPU reads each rank's bytes, or writes them."""
        return {
            rank: self._detour(rank, place, is_output)
            if self._is_out_of_reach(place)
            else self._address(place)
            for rank, place in places.items()
            if place.nbytes
        }

    def _is_out_of_reach(self, place: Place) -> bool:
        """Return true if there are bytes that the folding GPU cannot use where they are."""
        if isinstance(place, GpuRange):
            return place.nbytes > 0 and not self._device.reaches(place.memory.device)
        return isinstance(place, Nowhere) and place.nbytes > 0

    def _address(self, place: Place) -> int:
        if isinstance(place, GpuRange):
            place.memory.allow(self._device)
            return place.address
        # As there is none for no bytes alone.
        assert isinstance(place, HostRange) and place.mapping is not None
        return self._pins.address(place.mapping, self._device) + place.offset

    def _detour(self, rank: int, place: Place, is_output: bool) -> int:
        key = rank, is_output
        with self._lock:
            if key not in self._detours:
                self._detours[key] = self._buffers.take(place.nbytes)
            return self._pins.address(self._detours[key].mapping, self._device)

    def _bring(self) -> dict[int, int]:
        """Return the places of the inputs at the time of the GPU's next piece of work."""
        with self._lock:
            if self._sources is None:
                sources = self._addresses(self._inputs, is_output=False)
                for rank, place in self._inputs.items():
                    if isinstance(place, GpuRange) and self._is_out_of_reach(place):
                        self._fetch(place, sources[rank])
                self._sources = sources
            return self._sources

    def _fetch(self, place: GpuRange, detour: int) -> None:
        owner = place.memory.device
        with owner.current():
            owner.copy(detour, place.address, place.nbytes)
            fetched = owner.mark()
        self._device.wait_for(fetched)

    def _take_home(self, pieces: Sequence[Piece]) -> list[GpuEvent]:
        """Copy results to where the folding GPU could not write; when everything is there."""
        folded = self._device.mark()
        touched: dict[int, GpuDevice] = {}
        size = self._arithmetic.itemsize
        for part, start, stop in pieces:
            for end in part.targets:
                place = self._outputs[end.rank]
                if stop > start and isinstance(place, GpuRange) and self._is_out_of_reach(place):
                    owner = place.memory.device
                    offset = (end.offset + start - part.slice.start) * size
                    source = self._detour(end.rank, place, True) + offset
                    with owner.current():
                        owner.wait_for(folded)
                        owner.copy(place.address + offset, source, (stop - start) * size)
                    touched[owner.ordinal] = owner
        return [folded, *map(_mark, touched.values())]


def _mark(device: GpuDevice) -> GpuEvent:
    with device.current():
        return device.mark()


def _overlap(one: Place, other: Place) -> bool:
    """Return true if two places of one rank share bytes."""
    if isinstance(one, Nowhere) or isinstance(other, Nowhere):
        return False
    if not one.nbytes or not other.nbytes:
        return False
    homes = [each.memory if isinstance(each, GpuRange) else each.mapping for each in (one, other)]
    begin, start = one.offset, other.offset
    return homes[0] is homes[1] and begin < start + other.nbytes and start < begin + one.nbytes


def _homes(inputs: Mapping[int, Place], outputs: Mapping[int, Place]) -> list[GpuDevice]:
    """The GPU of each rank that has memory on one, in rank order."""
    homes: list[GpuDevice] = []
    for rank in sorted(inputs):
        for place in (inputs[rank], outputs[rank]):
            if isinstance(place, GpuRange):
                homes.append(place.memory.device)
                break
    return homes


def _at(
    addresses: Mapping[int, int], ends: Sequence[End], part: Part, start: int, itemsize: int
) -> list[int]:
    """Return the first byte of a range of a part at each of its ends."""
    low = start - part.slice.start
    return [addresses[end.rank] + (end.offset + low) * itemsize for end in ends]


def folding(arithmetic: Arithmetic, inputs: int) -> Variant:
    """From what ranks bring to their results."""
    given, kept, op = arithmetic.given, arithmetic.kept_type, arithmetic.reduce_op
    divided = bool(arithmetic.divisor)
    return Variant(given, kept, given, op, inputs, arithmetic.factor != 1.0, divided)


def contributing(arithmetic: Arithmetic, inputs: int) -> Variant:
    """Return the kernel variant that folds the ranks' inputs into what nodes exchange."""
    given, kept, op = arithmetic.given, arithmetic.kept_type, arithmetic.reduce_op
    return Variant(given, kept, kept, op, inputs, arithmetic.factor != 1.0)


def finishing(arithmetic: Arithmetic) -> Variant:
    """Return the kernel variant that turns the exchanged values into the ranks' results."""
    given, kept = arithmetic.given, arithmetic.kept_type
    return Variant(kept, kept, given, None, 1, divided=bool(arithmetic.divisor))
