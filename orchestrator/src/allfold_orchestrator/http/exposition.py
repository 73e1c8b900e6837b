"""The values of a look at the orchestrator, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from allfold_core.metrics import Metric, Values

__all__ = ["CONTENT_TYPE", "Exposition"]


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
