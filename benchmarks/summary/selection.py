"""The results of a report that a summary is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from benchmarks.plan import MIB, OURS, human_time
from benchmarks.results import LOOPBACK, Result

_LARGEST = MIB


def latencies(results: Iterable[Result]) -> list[Result]:
    """All-reduces up to 1 MiB, by what comes before each op, by place, by size.

    Of what was measured twice, the later one counts.
    """
    wanted = {
        (each.case.computing, each.network, each.shape, each.case.size): each
        for each in results
        if each.case.kind == "all_reduce" and each.case.size <= _LARGEST and OURS in each.figures
    }
    networks = list(dict.fromkeys(each.network for each in wanted.values()))

    def order(result: Result) -> tuple[object, ...]:
        place = (networks.index(result.network), result.shape)
        return result.case.computing, place, result.case.size

    return sorted(wanted.values(), key=order)


def by_mode(results: Sequence[Result]) -> list[tuple[str, str, list[Result]]]:
    """Per network and what comes before each op: the network, that, and the results."""
    return [
        (network, mode(computing), list(found))
        for (computing, network), found in groupby(
            results, lambda each: (each.case.computing, each.network)
        )
    ]


def by_shape(results: Sequence[Result]) -> list[list[Result]]:
    """Those of each shape."""
    return [list(found) for _, found in groupby(results, lambda each: each.shape)]


def mode(computing: float) -> str:
    """``back to back``, or ``after 2ms of computing``."""
    return f"after {human_time(computing)} of computing" if computing else "back to back"


def libraries(results: Iterable[Result]) -> list[str]:
    """All that have figures, Allfold first."""
    return list(dict.fromkeys(name for each in results for name in each.figures))


def place(result: Result) -> str:
    """``2x1``, or ``2x1 at 1gbit``."""
    where = "" if result.network == LOOPBACK else f" at {result.network}"
    return f"{result.shape}{where}"
