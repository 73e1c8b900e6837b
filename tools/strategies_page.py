"""The tables of strategies: what each does, costs and sends, and which of them ``auto`` takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.pricing.predict import closed_form
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import STRATEGIES, strategies_for
from allfold_core.schedules.schedule import Send
from allfold_core.schedules.strategy import Description, Strategy
from allfold_core.topology import LOOPBACK, LinkModel, Member
from tools.pages import Blocks, table

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"1 KiB": KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "256 MiB": 256 * MIB}


def _described() -> Iterator[tuple[str, Description]]:
    """Yield each strategy as the tables name it, with the symbol of its formula."""
    for strategy in STRATEGIES.values():
        yield f"`{_written(strategy)}`", strategy.description


def _written(strategy: Strategy) -> str:
    parameter = strategy.parameter
    return f"{strategy.name}({parameter.symbol})" if parameter else strategy.name


def _overview() -> str:
    lines = [[name, about.steps, about.sent, about.auto_for] for name, about in _described()]
    return table(["strategy", "steps", "bytes", "`auto` takes it for"], lines)


def _summaries() -> str:
    lines = [[name, about.summary] for name, about in _described()]
    return table(["strategy", "what it does in an all-reduce"], lines)


def _formulas() -> str:
    return table(["strategy", "seconds"], [[name, about.seconds] for name, about in _described()])


def _kinds() -> str:
    lines = [[kind.label, ", ".join(f"`{name}`" for name in strategies_for(kind))] for kind in Kind]
    return table(["collective", "strategies"], lines)


def _bytes() -> str:
    counts = (2, 4, 6, 8, 16, 64)
    lines = [
        [f"`{name}`", *(f"{_most_sent(name, nodes):.4g}" for nodes in counts)]
        for name in [*strategies_for(Kind.ALL_REDUCE), "tree(4)"]
    ]
    return table(["strategy", *(f"P = {nodes}" for nodes in counts)], lines)


def _most_sent(strategy: str, nodes: int) -> float:
    """Return what the busiest node sends, in tensors."""
    numel = 64 * nodes
    schedule = compile_schedule(Kind.ALL_REDUCE, strategy, nodes=nodes, numel=numel)
    return max(
        sum(len(step.slice) for step in program if isinstance(step, Send)) / numel
        for program in schedule.programs
    )


def _chosen(links: LinkModel, counts: Sequence[int]) -> str:
    lines = [
        [
            str(nodes),
            *(f"`{choose(Kind.ALL_REDUCE, _plan(nodes, links), size)}`" for size in SIZES.values()),
        ]
        for nodes in counts
    ]
    return table(["nodes", *SIZES], lines)


def _plan(nodes: int, links: LinkModel) -> Plan:
    members = tuple(Member(f"node{index}", "", "", (index,)) for index in range(nodes))
    return Plan("group", 1, nodes, members, tuple(range(nodes)), links, GroupOptions(300.0))


def _crossings() -> str:
    lines = [[str(nodes), f"{_crossing(nodes) // KIB} KiB"] for nodes in (3, 4, 8, 16, 64)]
    return table(["nodes", "ring is ahead from"], lines)


def _crossing(nodes: int) -> int:
    """Return the smallest power of two of bytes for which a ring is predicted to be faster."""

    def seconds(strategy: str, nbytes: int) -> float:
        return closed_form(Kind.ALL_REDUCE, strategy, nodes, nbytes, LinkModel())

    sizes = (1 << exponent for exponent in range(10, 30))
    return next(size for size in sizes if seconds("ring", size) < seconds("centralized", size))


README: Blocks = {"strategies": _overview}
BLOCKS: Blocks = {
    "strategies": _summaries,
    "kinds": _kinds,
    "seconds": _formulas,
    "bytes": _bytes,
    "auto": partial(_chosen, LinkModel(), (2, 4, 8, 16, 32, 64, 256)),
    "auto on one machine": partial(_chosen, replace(LOOPBACK, shared_cores=2), (2, 4, 8, 16)),
    "crossing": _crossings,
}
