"""The results of measurements, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.devices import CPU
from benchmarks.figures import Figures
from benchmarks.plan import BARRIER, DDP, DECODE, OURS, Case, Shape
from benchmarks.workloads import NO_SYNC

LOOPBACK, PINNED = "loopback", "pinned"
"""Networks that are none: all nodes share this machine; pinned, each has one core of it."""
_FORMAT = 3


@dataclass(frozen=True)
class Result:
    """One case of one shape.

    Attributes:
        network: between the nodes.
        line: what one TCP stream carries between two nodes, in bytes per second of payload; 0
            where nothing limits it.
        figures: by library, in the order of their turns.
        path: how agents reach the tensors: ``cpu``, or the path of a GPU and the reason for it.
    """

    network: str
    line: float
    shape: Shape
    case: Case
    figures: Mapping[str, Figures]
    path: str = CPU

    @property
    def place(self) -> str:
        """Return what is between the nodes, in words."""
        if self.network == PINNED:
            return f"{LOOPBACK}, one core per node"
        if self.network == LOOPBACK:
            return LOOPBACK
        gbit = self.line * 8 / 1e9
        return f"{self.network}, {gbit:.3f} Gbit/s of payload in one TCP stream"

    def algbw(self, library: str) -> float | None:
        """GB/s; ``None`` where no bytes stand for the op."""
        if self.case.kind in (BARRIER, DDP, DECODE):
            return None
        return self.case.size / self.figures[library].median / 1e9

    def busbw(self, library: str) -> float | None:
        """GB/s that each rank's link carries, as nccl-tests reckons."""
        algbw = self.algbw(library)
        return None if algbw is None else algbw * self.case.bus_factor(self.shape.world)

    def cpu_per_gb(self, library: str) -> float | None:
        """CPU-seconds of all ranks and agents per GB of size."""
        size = self.case.size
        return self.figures[library].cpu / (size / 1e9) if size else None

    def ratio(self, library: str) -> float | None:
        """The library's time in units of Allfold's."""
        if OURS not in self.figures:
            return None
        return self.figures[library].median / self.figures[OURS].median

    def communication(self, library: str) -> float | None:
        """Of a training step: seconds that it takes longer than one without communication."""
        if NO_SYNC not in self.figures or library == NO_SYNC:
            return None
        return self.figures[library].median - self.figures[NO_SYNC].median

    def communication_ratio(self, library: str) -> float | None:
        """Of a training step: Allfold's communication in units of the library's."""
        ours, theirs = self.communication(OURS), self.communication(library)
        return ours / theirs if ours is not None and theirs and theirs > 0 else None

    def tokens_per_second(self, library: str) -> float | None:
        """Of decoding, where an op is a token."""
        return 1 / self.figures[library].mean if self.case.kind == DECODE else None


@dataclass(frozen=True)
class Memory:
    """The memory of a library beside the tensors, in ranks and agents together, in bytes.

    Attributes:
        peak: during the first ops of this size.
        kept: after them.
    """

    shape: Shape
    case: Case
    library: str
    peak: int
    kept: int


@dataclass(frozen=True)
class Report:
    """A run, and what it ran on.

    Attributes:
        limits: rows of :mod:`benchmarks.gpu.limits`.
        scale: by part, what it found of thousands of nodes.
    """

    environment: Mapping[str, Any]
    results: Sequence[Result] = ()
    memory: Sequence[Memory] = ()
    limits: Sequence[Mapping[str, Any]] = ()
    scale: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """As JSON, with derived figures for those who do not want to compute them."""
        found = {
            "format": _FORMAT,
            "environment": self.environment,
            "results": [_as_json(result) for result in self.results],
            "memory": [asdict(each) | {"shape": str(each.shape)} for each in self.memory],
            "limits": self.limits,
            "scale": self.scale,
        }
        path.write_text(json.dumps(found, indent=1) + "\n")

    def write_short(self, path: Path) -> None:
        """As JSON to be kept: four digits, nothing that can be derived, a line for each result."""
        results = ",\n".join(json.dumps(_short(result)) for result in self.results)
        rest: dict[str, Any] = {"memory": [], "limits": [], "scale": {}}
        head = json.dumps({"format": _FORMAT, "environment": self.environment, **rest})
        path.write_text(f'{head[:-1]}, "results": [\n{results}\n]}}\n')

    @property
    def wrong(self) -> int:
        """Elements that were wrong, in all."""
        counts = [each.wrong for result in self.results for each in result.figures.values()]
        return sum([*counts, *(int(row["wrong"]) for row in self.limits)])


def read(paths: Iterable[Path]) -> Report:
    """Several files as one report; the environment is that of the first.

    Raises:
        OSError, ValueError: a file cannot be read, or is none that :meth:`Report.write` wrote.
    """
    return together([_read(path) for path in paths])


def together(reports: Sequence[Report]) -> Report:
    """Several reports as one; the environment is that of the first."""
    return Report(
        reports[0].environment,
        [result for report in reports for result in report.results],
        [memory for report in reports for memory in report.memory],
        [row for report in reports for row in report.limits],
        {part: found for report in reports for part, found in report.scale.items()},
    )


def _read(path: Path) -> Report:
    try:
        found = json.loads(path.read_text())
    except ValueError:  # no JSON, or no text
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f"{path} is no file of this command, or of another version of it")
    return Report(
        found["environment"],
        [_from_json(each) for each in found["results"]],
        [
            Memory(Shape.parse(each["shape"]), Case(**each["case"]), *_sizes(each))
            for each in found["memory"]
        ],
        found["limits"],
        found["scale"],
    )


def _sizes(found: Mapping[str, Any]) -> tuple[str, int, int]:
    return found["library"], found["peak"], found["kept"]


def _as_json(result: Result) -> dict[str, Any]:
    libraries = {
        name: asdict(figures)
        | {
            "algbw": result.algbw(name),
            "busbw": result.busbw(name),
            "cpu_per_gb": result.cpu_per_gb(name),
            "communication": result.communication(name),
            "communication_ratio": result.communication_ratio(name),
            "tokens_per_second": result.tokens_per_second(name),
        }
        for name, figures in result.figures.items()
    }
    where: dict[str, Any] = {"network": result.network, "line": result.line, "path": result.path}
    where["shape"] = str(result.shape)
    return {**where, **asdict(result.case), "libraries": libraries}


def _short(result: Result) -> dict[str, Any]:
    found = _as_json(result)
    found["libraries"] = {
        name: {field: _rounded(value) for field, value in asdict(figures).items()}
        for name, figures in result.figures.items()
    }
    return found


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _from_json(found: Mapping[str, Any]) -> Result:
    names = Figures.__dataclass_fields__
    figures = {
        library: Figures(**{name: figures[name] for name in names})
        for library, figures in found["libraries"].items()
    }
    case = Case(found["kind"], found["size"], found["computing"])
    shape = Shape.parse(found["shape"])
    return Result(found["network"], found["line"], shape, case, figures, found["path"])
