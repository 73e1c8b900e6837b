"""Metrics: one catalogue of what a service shows of itself, the values of one look, their text.

Names and types are those of Prometheus. From a catalogue follow the metrics that are served, their
documentation and the dashboards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

__all__ = [
    "CONTENT_TYPE",
    "Exposition",
    "Histogram",
    "Metric",
    "MetricType",
    "Values",
    "counter",
    "gauge",
    "histogram",
]


class MetricType(StrEnum):
    """The types of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: with the prefix of its service, its unit, and ``_total`` if it is a counter.
        help: one sentence for people.
        labels: the names of its labels.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name without the ``_total`` of counters, as client libraries want it."""
        return self.name.removesuffix("_total")

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which its values can be queried."""
        if self.type is MetricType.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def counter(name: str, help: str, *labels: str) -> Metric:
    """Return a metric that only grows, until its service is started anew."""
    return Metric(name, MetricType.COUNTER, help, labels)


def gauge(name: str, help: str, *labels: str) -> Metric:
    """Return a metric that is measured anew at each look."""
    return Metric(name, MetricType.GAUGE, help, labels)


def histogram(name: str, help: str, *labels: str) -> Metric:
    """Return a metric that counts values by their size."""
    return Metric(name, MetricType.HISTOGRAM, help, labels)


class Histogram:
    """Values counted by their size: an update takes a fraction of a microsecond.

    Args:
        bounds: the highest value of each bucket, rising; one more takes what is higher.

    Attributes:
        counts: of each bucket.
        sum: of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Count all values of another one with the same buckets."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def cumulative(self) -> list[tuple[str, int]]:
        """Return the number of values up to each bound, as ``le`` has it."""
        total, found = 0, []
        for bound, count in zip((*map(_shown, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


def _shown(bound: float) -> str:
    """A number as client libraries of Prometheus write it."""
    return repr(float(bound))


class MetricSample(NamedTuple):
    """One value."""

    name: str
    labels: Mapping[str, str]
    value: float


class Values:
    """The values of one look at a service.

    Args:
        catalogue: the metrics that there may be values of.
    """

    def __init__(self, catalogue: Iterable[Metric]) -> None:
        self._values: dict[Metric, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[Metric, dict[tuple[str, ...], Histogram]] = {}
        for metric in catalogue:
            if metric.type is MetricType.HISTOGRAM:
                self._histograms[metric] = {}
            else:
                self._values[metric] = {}

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Add to the value of a counter or gauge; ``KeyError`` where the catalogue lacks it."""
        values = self._values[metric]
        _check(metric, labels)
        values[labels] = values.get(labels, 0.0) + value

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        """Set the value of a counter or gauge; ``KeyError`` where the catalogue lacks it."""
        _check(metric, labels)
        self._values[metric][labels] = value

    def observe(self, metric: Metric, values: Histogram, *labels: str) -> None:
        """Add the values of a histogram; ``KeyError`` where the catalogue lacks it."""
        known = self._histograms[metric]
        _check(metric, labels)
        if labels not in known:
            known[labels] = Histogram(values.bounds)
        known[labels].add(values)

    def families(self) -> Iterator[tuple[Metric, list[MetricSample]]]:
        """Yield every metric of the catalogue with its samples, which may be none."""
        for metric, values in self._values.items():
            samples = [
                MetricSample(metric.name, dict(zip(metric.labels, labels, strict=True)), value)
                for labels, value in values.items()
            ]
            yield metric, samples
        for metric, known in self._histograms.items():
            yield (
                metric,
                [each for labels, one in known.items() for each in _of(metric, labels, one)],
            )


def _check(metric: Metric, labels: tuple[str, ...]) -> None:
    if len(labels) != len(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, and got {labels}")


def _of(metric: Metric, labels: tuple[str, ...], values: Histogram) -> Iterator[MetricSample]:
    named = dict(zip(metric.labels, labels, strict=True))
    buckets = values.cumulative()
    for bound, total in buckets:
        yield MetricSample(f"{metric.name}_bucket", {**named, "le": bound}, total)
    yield MetricSample(f"{metric.name}_count", named, buckets[-1][1])
    yield MetricSample(f"{metric.name}_sum", named, values.sum)


class Exposition:
    """One registry: the metrics of the catalogue, and those of every Python process.

    Args:
        catalogue: the metrics that there are.
        look: returns their values.
    """

    def __init__(self, catalogue: Iterable[Metric], look: Callable[[], Values]) -> None:
        # Not the library's global one: a process may hold several services, as tests do.
        self._registry = CollectorRegistry()
        self._registry.register(_Catalogue(tuple(catalogue), look))
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return what is to be served."""
        return generate_latest(self._registry)


class _Catalogue(Collector):
    def __init__(self, catalogue: tuple[Metric, ...], look: Callable[[], Values]) -> None:
        self._catalogue = catalogue
        self._look = look

    def describe(self) -> Iterator[Family]:
        return map(_family, self._catalogue)

    def collect(self) -> Iterator[Family]:
        for metric, samples in self._look().families():
            family = _family(metric)
            for name, labels, value in samples:
                family.add_sample(name, dict(labels), value)
            yield family


def _family(metric: Metric) -> Family:
    return Family(metric.family, metric.help, metric.type.value)
