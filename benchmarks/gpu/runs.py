"""What is done one after the other, as the options say. After a failure the rest is done too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from allfold_core.errors import AllfoldError
from benchmarks.conductor import Budget
from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import Figures
from benchmarks.gpu import plan
from benchmarks.gpu.options import Options
from benchmarks.gpu.plan import (
    AUTO,
    BANDWIDTH,
    CHECK,
    COPY,
    CPU,
    KERNEL,
    LATENCY,
    LATENCY_BYTES,
    OTHERS,
    OURS,
    PEERS,
    SWEEP,
    Setting,
)
from benchmarks.gpu.report import Check, Report, Timing, summary
from benchmarks.gpu.stage import Joined, Stage
from benchmarks.plan import MIB, Case, Shape, human_size

_ROUNDS, _QUICK_ROUNDS = 50, 10
_KERNEL_ROUNDS = 20
_CARD_SECONDS = 120.0
_CHECK_SECONDS = 150.0
# Ops in a row, of which the slowest rank's times are samples.
_BATCH = 20
_TURNS = (3, 100)
# From here on an op takes so long that few of them have to do.
_LARGE = 256 * MIB
_LARGE_ROUNDS = (3, 50)
_BANDWIDTH_ROUNDS = (10, 200)


Batch = Callable[[str], tuple[list[float], int]]


class Runs:
    """One run of the options' parts."""

    def __init__(
        self, options: Options, stage: Stage, report: Report, say: Callable[[str], None]
    ) -> None:
        """Args:
        say: tells a person what is under way.
        """
        self._options = options
        self._stage = stage
        self._report = report
        self._say = say
        self._until = time.monotonic() + options.deadline
        self._shapes = plan.shapes(options.ranks, options.agents)

    def look(self) -> str | None:
        """Start everything, and see whether there is a GPU; why there is none."""
        found = self._stage.alone("look", _CARD_SECONDS)
        self._report.device = found
        if "why" in found:
            return str(found["why"])
        self._fit(int(found["free"]))
        return None

    def measure(self) -> None:
        """Every part, in the order of the plan."""
        for part in self._options.parts:
            if part in (COPY, KERNEL):
                self._attempt(part, self._copy if part == COPY else self._kernel)
            elif part == CHECK:
                self._checks()
            elif part == BANDWIDTH:
                self._bandwidth()
        self._compare(LATENCY, self._shapes)
        largest = max(shape.world for shape in self._shapes)
        self._compare(SWEEP, [shape for shape in self._shapes if shape.world == largest])
        self._attempt("the end of the ranks", self._stage.leave, always=True)

    def sanitized(self) -> None:
        """A small check of every shape, on the first path alone and mixed with the host."""
        for setting in plan.settings(self._shapes, self._options.paths[:1]):
            self._check(setting, quick=True)
        self._attempt("the end of the ranks", self._stage.leave, always=True)

    # --- the parts

    def _copy(self) -> None:
        rounds = _QUICK_ROUNDS if self._options.quick else _ROUNDS
        size = self._options.large
        self._report.copy = self._stage.alone("copy", _CARD_SECONDS, size=size, rounds=rounds)

    def _kernel(self) -> None:
        rounds = _QUICK_ROUNDS if self._options.quick else _KERNEL_ROUNDS
        size, ranks = self._options.large, max(self._options.ranks)
        found = self._stage.alone("kernel", _CARD_SECONDS, size=size, ranks=ranks, rounds=rounds)
        self._report.kernel = found["rows"]

    def _checks(self) -> None:
        for setting in plan.settings(self._shapes, self._options.paths):
            self._check(setting, quick=self._options.quick or setting.is_mixed)

    def _check(self, setting: Setting, *, quick: bool) -> None:
        def check() -> None:
            with self._stage.group(setting) as joined:
                answers = joined.check_calls(quick, _CHECK_SECONDS)
            first = [
                f"rank {rank}: {each}" for rank, one in enumerate(answers) for each in one["first"]
            ]
            wrong = sum(answer["wrong"] for answer in answers)
            seconds = max(answer["seconds"] for answer in answers)
            found = Check(str(setting), answers[0]["calls"], wrong, first, seconds)
            self._report.checks.append(found)

        self._attempt(f"{CHECK} {setting}", check)

    def _bandwidth(self) -> None:
        fewest = min(self._options.agents)
        shapes = [shape for shape in self._shapes if shape.nodes == fewest]
        shape = max(shapes, key=lambda each: each.world)
        budget = Budget(3 * self._options.seconds, _BANDWIDTH_ROUNDS)

        def measure() -> None:
            with self._group(shape, OURS) as joined:
                self._time(BANDWIDTH, joined, self._options.large, budget)

        self._attempt(f"{BANDWIDTH} {shape}", measure)

    def _compare(self, part: str, shapes: list[Shape]) -> None:
        """Allfold and the peers, as far as they were asked for; those need no agents."""
        ours = OURS if part in self._options.parts else ()
        for shape in shapes:
            alone = shape.nodes == min(self._options.agents)
            peers = OTHERS if PEERS in self._options.parts and alone else ()
            contestants = (*ours, *peers)
            if contestants:
                work = self._latency if part == LATENCY else self._sweep
                self._attempt(f"{part} {shape}", partial(work, shape, contestants))

    def _latency(self, shape: Shape, contestants: Sequence[str]) -> None:
        case = Case("all_reduce", LATENCY_BYTES)
        with self._group(shape, contestants) as joined:
            conductor = joined.conductor(Budget())
            with conductor.prepared(case) as names:
                batch = partial(joined.slowest, conductor, ops=_BATCH)
                for name, figures in self._samples(names, batch).items():
                    self._add(LATENCY, joined, case.size, name, figures)

    def _samples(self, names: Sequence[str], batch: Batch) -> dict[str, Figures]:
        """The contestants in turn until the time is over, after a turn that opens connections."""
        wrong = {name: batch(name)[1] for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        until, turns = time.monotonic() + self._options.seconds * len(names), 0
        while turns < _TURNS[0] or (turns < _TURNS[1] and time.monotonic() < until):
            for name in names:
                more, bad = batch(name)
                seconds[name] += more
                wrong[name] += bad
            turns += 1
        return {name: Figures.of(seconds[name], wrong[name], 0.0) for name in names}

    def _sweep(self, shape: Shape, contestants: Sequence[str]) -> None:
        with self._group(shape, contestants) as joined:
            for size in self._options.sizes:
                budget = Budget(self._options.seconds)
                if size >= _LARGE:
                    budget = Budget(self._options.seconds, _LARGE_ROUNDS)
                if self._is_late(f"{SWEEP} {shape} {human_size(size)}"):
                    continue
                self._time(SWEEP, joined, size, budget)

    # --- how

    @contextmanager
    def _group(self, shape: Shape, contestants: Sequence[str]) -> Iterator[Joined]:
        """Ranks whose tensors take whichever way is best."""
        way = CPU if self._options.without_gpu else AUTO
        with self._stage.group(Setting.alike(shape, way), contestants) as joined:
            self._report.unable.update(joined.unable)
            if joined.path not in ("ipc", CPU):
                self._report.notes.append(f"{shape}: path {joined.path}, because {joined.why}")
            yield joined

    def _time(self, part: str, joined: Joined, size: int, budget: Budget) -> None:
        case = Case("all_reduce", size).fitting(joined.setting.shape.world)
        for name, figures in joined.conductor(budget).measure(case).items():
            self._add(part, joined, case.size, name, figures)

    def _add(self, part: str, joined: Joined, size: int, name: str, figures: Figures) -> None:
        shape = joined.setting.shape
        self._report.timings.append(Timing(part, shape, size, name, joined.path, figures))
        self._say(f"{part} {shape} {human_size(size)} {name}: {figures.median * 1e6:.1f} us")

    def _attempt(self, name: str, work: Callable[[], object], *, always: bool = False) -> None:
        """Do it, if there is time, and tell how it went."""
        if not always and self._is_late(name):
            return
        began = time.monotonic()
        try:
            work()
        except (BenchmarkFailed, AllfoldError) as error:
            self._say(f"{name} FAILED: {error}")
            self._report.failures.append(f"{name}: {summary(str(error))}")
        else:
            self._say(f"{name}: {time.monotonic() - began:.1f} s")

    def _is_late(self, name: str) -> bool:
        if time.monotonic() < self._until:
            return False
        self._report.left_out.append(f"{name}, because the time was over")
        return True

    def _fit(self, free: int) -> None:
        """Sizes that the card has no memory for are not measured."""
        options = self._options
        most = plan.largest_size(free, max(options.ranks))
        sizes = [size for size in options.sizes if size <= most]
        if most < options.large or len(sizes) < len(options.sizes):
            large = min(options.large, 1 << (most.bit_length() - 1))
            self._options = replace(options, sizes=sizes, large=large)
            self._report.notes.append(
                f"the card has {human_size(free >> 20 << 20)} free: no tensor is longer than "
                f"{human_size(large)}"
            )
