"""The share of the time that is spent computing, of every line, period and codec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from allfold_cluster.network import Network, why_not
from benchmarks.rounds.nodes import Nodes, nodes
from benchmarks.rounds.options import NEAR, WORLD, Options
from benchmarks.rounds.share import MODULE, SPARE_SECONDS, Case, row
from benchmarks.rounds.training_rank import ALL_REDUCE, Orders

RATES = (50, 200, 1000)
EVERY = (8, 32, 128)
WIRES = ("bfloat16", "int4", "int2", "topk")
_BLOCKING = "blocking, native"
HEAD = ("line", "H", _BLOCKING, *WIRES, "different")


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """Measure each line with every period and codec, one after the other."""
    lines = [
        Network.parse(f"{rate / options.scale:g}mbit{more}")
        for more in ("", *(f"+{each}" for each in options.far))
        for rate in RATES
    ]
    if reason := why_not(lines):
        yield {"line": f"not run: {reason}"}
        return
    for network in lines:
        with nodes(WORLD, network) as found:
            for every in EVERY:
                yield _row(found, network, every, options)


def _row(found: Nodes, network: Network, every: int, options: Options) -> dict[str, Any]:
    rounds = Orders(
        numel=options.numel // options.scale,
        step=options.step,
        every=every,
        delay=every if options.delay is None else options.delay,
        fragments=options.fragments,
        wire=None,
        what="round",
        seconds=options.seconds,
    )
    orders = {wire: replace(rounds, wire=wire) for wire in WIRES}
    if options.blocking == "all" or (options.blocking == NEAR and not network.is_forwarded):
        blocking = replace(rounds, delay=0, fragments=1, what=ALL_REDUCE, seconds=0.0)
        orders = {_BLOCKING: blocking, **orders}
    measured = {name: _measured(found, network, each) for name, each in orders.items()}
    shares = {name: each["share computing"] for name, each in measured.items()}
    different = sum(each["different"] for each in measured.values())
    return {"line": str(network), "H": every, **shares, "different": different}


def _measured(found: Nodes, network: Network, orders: Orders) -> dict[str, Any]:
    told = found.run(MODULE, [orders] * WORLD, orders.seconds + SPARE_SECONDS)
    return row(Case(network.rate, orders.wire or "", orders.every), network, orders, told)
