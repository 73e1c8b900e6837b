"""The pace of three ranks while a fourth is slow, and the rounds in which that one takes part."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any

from benchmarks.rounds.nodes import Nodes, nodes
from benchmarks.rounds.options import WORLD, Options
from benchmarks.rounds.slow_rank import Orders

HEAD = (
    *("what", "rounds", "period p50 ms", "period mean ms", "pace", "to reach"),
    *("rounds with rank 3", "one in", "others left out", "different"),
)
_MODULE = "benchmarks.rounds.slow_rank"
_SPARE_SECONDS = 120.0
_NUMEL = 1 << 20
_EVERY = 8
_QUORUM = WORLD - 1
_SLOW = WORLD - 1
_TO_REACH = 0.95
_SHOWN = 12


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """Measure ranks of one speed, then the same with one that is slow."""
    with nodes(WORLD) as found:
        alike = _row(found, options, 1)
        yield alike
        slow = _row(found, options, options.slower)
        pace = alike["period mean ms"] / slow["period mean ms"]
        yield slow | {"pace": f"{pace:.3f}", "to reach": f">= {_TO_REACH}"}


def _row(found: Nodes, options: Options, slower: int) -> dict[str, Any]:
    period = _EVERY * options.step
    fast = Orders(_NUMEL, period, False, _QUORUM, options.within, "int4", options.seconds)
    last = replace(fast, period=slower * period, is_slow=slower > 1)
    told = found.run_parts(_MODULE, [fast] * _SLOW + [last], options.seconds + _SPARE_SECONDS, [""])
    reports = told[0].reports
    what = "all alike" if slower == 1 else f"rank {_SLOW} {slower} times slower"
    return {
        "what": f"{what}, quorum {_QUORUM} of {WORLD} within {options.within:g} s, int4",
        **figures(reports),
    }


def figures(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all rounds have in common, as the first rank has seen them."""
    first, others = reports[0], reports[:_SLOW]
    periods = [late - early for early, late in pairwise(first["ended"])]
    weights = first["weights"]
    taken = [number for number, each in enumerate(weights) if each[_SLOW]]
    gaps = [late - early for early, late in pairwise(taken)]
    # The slow rank may have called fewer of them.
    seen = zip_longest(*(each["weights"] for each in reports))
    return {
        "rounds": len(weights),
        "period p50 ms": round(statistics.median(periods) * 1e3, 1),
        "period mean ms": round(statistics.fmean(periods) * 1e3, 1),
        "rounds with rank 3": " ".join(map(str, taken[:_SHOWN]))
        + (" ..." if len(taken) > _SHOWN else ""),
        "one in": f"{statistics.fmean(gaps):.2f}" if gaps else "",
        "others left out": sum(not part for each in others for part in each["took_part"]),
        "different": sum(any(each not in (None, ranks[0]) for each in ranks) for ranks in seen),
    }
