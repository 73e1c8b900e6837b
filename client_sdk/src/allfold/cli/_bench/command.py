"""``allfold bench``: the collectives' speed and correctness, as nccl-tests shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from allfold.cli._bench.data import DTYPES, OPS
from allfold.cli._bench.kinds import KINDS, BenchSelection, sizes
from allfold.cli._parameters import Size, StrategyName
from allfold.cli._run.command import run
from allfold_core.dtypes import Wire
from allfold_core.operations import AUTO
from allfold_core.schedules.registry import STRATEGIES

_ROOT = Path(__file__).parents[5]
_SUITE = "benchmarks"
# It starts all ranks itself, and measures float32 sums.
_ONLY: Mapping[str, object] = {
    "agents": (),
    "nnodes": None,
    "node_rank": None,
    "iterations": None,
    "strategy": AUTO,
}


def become_suite(
    libraries: str,
    *,
    nodes: int,
    per_node: int,
    kinds: Sequence[str],
    sizes: Sequence[int],
    wire: str,
) -> None:
    """Turn this process into ``python -m benchmarks`` with these cases."""
    if not (_ROOT / _SUITE / "__main__.py").exists():
        raise click.UsageError(
            "--against needs a checkout of Allfold's repository with the packages installed from "
            "it (pip install -e); there, `make bench` does it too"
        )
    command = [sys.executable, "-m", _SUITE, "--peers", libraries]
    command += ["--shapes", f"{nodes}x{per_node}", "--kinds", ",".join(kinds)]
    command += ["--sizes", ",".join(map(str, sizes))]
    if wire != "native":
        command += ["--wires", wire]
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": os.pathsep.join(path)})


def refuse(given: Mapping[str, Any]) -> None:
    """``UsageError`` for options that the suite does not have."""
    for name, usual in _ONLY.items():
        if given[name] != usual:
            option = "agent" if name == "agents" else name.replace("_", "-")
            raise click.UsageError(f"--against cannot be combined with --{option}")
    if given["ops"] not in ((), ("sum",)) or given["dtypes"] not in ((), ("float32",)):
        raise click.UsageError("--against measures sums of float32, no other --op or --dtype")


# How `allfold run` is to start the ranks, where the user has no say.
_AS_RANKS: dict[str, Any] = {
    "timeout": None,
    "grace": 5.0,
    "keep_going": False,
    "quiet_others": True,
    "no_prefix": True,
    "module": True,
    "script": "allfold.cli._bench.rank",
}


@click.command(short_help="Measure and check the collectives.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes to start on this machine.  [1]")
@click.option("--nproc-per-node", type=click.IntRange(1), default=2, show_default=True)
@click.option("--agent", "agents", multiple=True, metavar="SOCKET", help="Use a running agent.")
@click.option("--nnodes", type=click.IntRange(1), help="Machines that take part.")
@click.option("--node-rank", type=click.IntRange(0), help="Which of them this is.")
@click.option("--group", envvar="ALLFOLD_GROUP", help="The ranks' group.  [one for this run]")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(["all", *KINDS]), help="[all]")
@click.option("--op", "ops", multiple=True, type=click.Choice(OPS), help="[sum]")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="[float32]")
@click.option("--min-bytes", type=Size(), default="4K", show_default=True)
@click.option("--max-bytes", type=Size(), default="16M", show_default=True)
@click.option(
    "--factor", type=click.IntRange(2), default=8, show_default=True, help="From size to size."
)
@click.option("--iterations", type=click.IntRange(1), help="Ops per figure.  [by size]")
@click.option(
    "--strategy",
    type=StrategyName(),
    default=AUTO,
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join([AUTO, *(each.label for each in STRATEGIES.values())])}.",
)
@click.option(
    "--wire",
    # What is sparse has no error bound without the calls before and after.
    type=click.Choice([wire.label for wire in Wire if not wire.is_sparse]),
    default=Wire.NATIVE.label,
    show_default=True,
)
@click.option("--against", metavar="PEERS", help="Side by side with gloo,mpich; in a checkout.")
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    *,
    against: str | None,
    kinds: tuple[str, ...],
    ops: tuple[str, ...],
    dtypes: tuple[str, ...],
    min_bytes: int,
    max_bytes: int,
    factor: int,
    iterations: int | None,
    strategy: str,
    wire: str,
    **placement: Any,
) -> None:
    """Measure and check the collectives on the nodes that `allfold run` would use.

    The inputs are small integers, so that every result is known exactly; #wrong counts the elements
    of all ranks that are not equal to it (with a lossy --wire: that are further away than the wire
    format's error bound). The time is that of the slowest rank. algbw is size / time; busbw is what
    a link of every rank must carry for it, as nccl-tests defines it: comparable between collectives
    and numbers of ranks.

    What cannot run, such as a collective that does not have the --strategy, is skipped, and named.

    This measures Allfold alone and needs nothing else. With --against, in a checkout of Allfold's
    repository, the same ranks do the same ops with Gloo and MPICH in turn, and the table is that of
    `make bench`.

    The status is 1 if anything was wrong.
    """
    every = tuple(KINDS) if not kinds or "all" in kinds else kinds
    wanted = BenchSelection(every, ops or ("sum",), dtypes or ("float32",), strategy, wire)
    _refuse_nothing(wanted, min_bytes, max_bytes)
    if against is not None:
        refuse({**placement, **ctx.params})
        become_suite(
            against,
            nodes=placement["nodes"] or 1,
            per_node=placement["nproc_per_node"],
            kinds=wanted.kinds,
            sizes=sizes(min_bytes, max_bytes, factor),
            wire=wire,
        )
    chosen = {
        "kind": wanted.kinds,
        "op": wanted.ops,
        "dtype": wanted.dtypes,
        "min-bytes": [min_bytes],
        "max-bytes": [max_bytes],
        "factor": [factor],
        "iterations": [iterations or 0],
        "strategy": [strategy],
        "wire": [wire],
    }
    ctx.invoke(run, **placement, **_AS_RANKS, arguments=_as_arguments(chosen))


def _refuse_nothing(wanted: BenchSelection, min_bytes: int, max_bytes: int) -> None:
    """A bench that checks nothing is no success."""
    if min_bytes > max_bytes:
        raise click.UsageError(f"--min-bytes {min_bytes} is more than --max-bytes {max_bytes}")
    if not wanted.possible():
        raise click.UsageError(f"nothing is left to measure: {'; '.join(wanted.skipped())}")


def _as_arguments(chosen: Mapping[str, Iterable[object]]) -> tuple[str, ...]:
    return tuple(f"--{name}={value}" for name, values in chosen.items() for value in values)
