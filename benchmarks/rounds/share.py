"""The share of the time that is spent computing, with rounds and with blocking all-reduces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allfold_cluster.network import Network, why_not
from benchmarks.figures import percentile
from benchmarks.rounds.nodes import Told, nodes
from benchmarks.rounds.options import NEAR, WORLD, Options
from benchmarks.rounds.training_rank import ALL_REDUCE, Orders

HEAD = (
    *("line", "parameters", "what", "H", "fragments", "share computing", "to reach", "rounds"),
    *("round p50 s", "hidden", "MB per round and node", "agent CPU s per round", "different"),
)
MODULE = "benchmarks.rounds.training_rank"
_TO_REACH = 0.95
# Beyond what was asked for: starts, a period and a round that are under way, and their end.
SPARE_SECONDS = 240.0


@dataclass(frozen=True)
class Case:
    """A training on a line with so many Mbit/s."""

    rate: float
    wire: str
    every: int


CASES = (Case(50, "int4", 128), Case(200, "topk", 8))


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """Measure each case on its line, and again on one that is long and loses."""
    lines = [
        (case, Network.parse(f"{case.rate / options.scale:g}mbit{more}"))
        for more in ("", *(f"+{each}" for each in options.far))
        for case in CASES
        if not options.cases or case.wire in options.cases
    ]
    if reason := why_not([network for _, network in lines]):
        yield {"line": "any", "what": f"not run: {reason}"}
        return
    for case, network in lines:
        yield from _on_line(case, network, options)


def _on_line(case: Case, network: Network, options: Options) -> Iterator[dict[str, Any]]:
    delay = case.every if options.delay is None else options.delay
    rounds = Orders(
        numel=options.numel // options.scale,
        step=options.step,
        every=case.every,
        delay=delay,
        fragments=options.fragments,
        wire=case.wire,
        what="round",
        seconds=options.seconds,
    )
    yield _measured(case, network, rounds)
    if options.blocking == "all" or (options.blocking == NEAR and not network.is_forwarded):
        # Shorter by what one all-reduce takes at least, so that none begins that cannot end.
        line = 2 * (WORLD - 1) / WORLD * rounds.numel * 4 * 8 / network.rate
        seconds = max(0.0, options.seconds - line)
        blocking = replace(
            rounds, delay=0, fragments=1, wire=None, what=ALL_REDUCE, seconds=seconds
        )
        yield _measured(case, network, blocking)


def _measured(case: Case, network: Network, orders: Orders) -> dict[str, Any]:
    with nodes(WORLD, network) as found:
        told = found.run(MODULE, [orders] * WORLD, orders.seconds + SPARE_SECONDS)
    return row(case, network, orders, told)


def row(case: Case, network: Network, orders: Orders, told: Told) -> dict[str, Any]:
    """Return the row of a run: of the rank that has computed least."""
    reports = told.reports
    share = min(each["steps"] * orders.step / each["elapsed"] for each in reports)
    took = [seconds for each in reports for seconds in each["took"]]
    hidden = sum(sum(each["hidden"]) for each in reports) / sum(took)
    is_round = orders.what != ALL_REDUCE
    what = f"rounds of {orders.wire}, waited for {orders.delay} steps later"
    return {
        "line": str(network),
        "parameters": f"{orders.numel / 1e6:.2f} M",
        "what": what if is_round else "blocking all-reduce, native",
        "H": case.every,
        "fragments": orders.fragments,
        "share computing": f"{share:.3f}",
        "to reach": f">= {_TO_REACH}" if is_round else "",
        "rounds": len(reports[0]["took"]),
        "round p50 s": f"{percentile(took, 50):.3f}",
        "hidden": f"{hidden:.2f}" if is_round else "",
        "MB per round and node": f"{_bytes(told) / 1e6:.2f}",
        "agent CPU s per round": f"{told.cpu / len(reports) / len(reports[0]['sent']):.3f}",
        "different": different(reports),
    }


def _bytes(told: Told) -> float:
    """Return the bytes of a round and node: as results say, else as the agents have counted."""
    sent = [nbytes for each in told.reports for nbytes in each["sent"]]
    return sum(sent) / len(sent) if any(sent) else sum(told.sent) / len(sent)


def different(reports: Sequence[dict[str, Any]]) -> int:
    """Return how many ranks have other bits than the first."""
    return sum(each["digest"] != reports[0]["digest"] for each in reports)
