"""``allfold trace``: the latest ops of all nodes as one trace."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click

from allfold.cli._asking import OUR_CLOCK
from allfold.cli._parameters import (
    Seconds,
    orchestrator_option,
    services_to_ask,
    token,
)
from allfold.cli._report import agents_to_ask
from allfold.cli._trace.asking import Flights, NodeFlight, ask_agents, seen_ops
from allfold.cli._trace.merging import merged, newest_ops
from allfold.cli._trace.torch_dump import group_dumps, write
from allfold_core.errors import InvalidArgument, LocalError
from allfold_core.verdict import counted

_MOST_OPS = 512
_STANDARD_OUTPUT = "-"


@click.command(short_help="Write the latest ops of all nodes as one trace.")
@orchestrator_option
@click.option("--agent-url", "agent_urls", multiple=True, metavar="URL", help="Ask this agent.")
@click.option("--group", default="", metavar="NAME", help="Only ops of this group.")
@click.option(
    "--seconds", type=Seconds(positive=True), metavar="S", help="Only ops of the last S seconds."
)
@click.option(
    "--limit",
    type=click.IntRange(1, _MOST_OPS),
    default=128,
    show_default=True,
    metavar="N",
    help=f"Of each group and node, the latest N ops, at most {_MOST_OPS}.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["perfetto", "torch"]),
    default="perfetto",
    show_default=True,
    help="A trace for people, or dumps for torchfrtrace.",
)
@click.option(
    "--output",
    metavar="PATH",
    help="The file, - for standard output; for torch a folder. [allfold-trace.json, allfold-trace]",
)
def trace(
    orchestrator: str | None,
    agent_urls: tuple[str, ...],
    group: str,
    seconds: float | None,
    limit: int,
    format_: str,
    output: str | None,
) -> None:
    """Write the latest ops of all nodes, on one clock, as one trace for https://ui.perfetto.dev.

    It has a track for each rank and one for what each node does, arrows from node to node, and what
    is still in flight. The clocks of the nodes are compared with this machine's; standard error
    says how sure that is. With --agent-url alone the orchestrator is left out. ALLFOLD_TOKEN must
    hold the join token.

    With --format torch it writes a file per rank into a folder per group, as torch's own flight
    recorder does: torchfrtrace FOLDER says which rank has called something else, or nothing.

    \b
    Exit codes:
      0    the trace is written; agents that did not answer are named on standard error
      1    there is nothing to write, or a service has refused
      2    wrong usage
      3    the orchestrator, an agent that was named, or every agent cannot be reached
    """
    if format_ == "torch" and seconds is not None:
        raise InvalidArgument("--seconds is for traces: torchfrtrace needs all ops; use --limit")
    asked, named = services_to_ask(orchestrator, agent_urls)
    secret = token()
    our_wall = time.time() - time.monotonic()
    urls = agents_to_ask(asked, named, secret)
    flights = ask_agents(urls, named, secret, our_wall=our_wall, group=group, limit=limit)
    for problem in flights.problems.values():
        click.echo(f"no answer: {problem}", err=True)
    try:
        if format_ == "torch":
            _write_dumps(flights, group, Path(output or "allfold-trace"), our_wall)
        else:
            _write_trace(flights, group, seconds, output or "allfold-trace.json", our_wall)
    except OSError as error:
        if error.filename is None:  # nobody reads standard output any more
            raise
        raise LocalError(
            f"{error.filename} cannot be written: {error.strerror}; name another place with "
            "--output, or write a trace to standard output with --output -"
        ) from None


def _write_trace(
    flights: Flights, group: str, seconds: float | None, output: str, our_wall: float
) -> None:
    ops = seen_ops(flights.found, seconds)
    if not ops:
        raise LocalError(_nothing(flights.found, group, seconds))
    kept = newest_ops(ops)
    text = json.dumps(merged(kept, flights, our_wall))
    if output == _STANDARD_OUTPUT:
        click.echo(text)
    else:
        Path(output).write_text(text + "\n")
    for flight in sorted(flights.found, key=lambda each: each.node):
        if flight.offset != OUR_CLOCK:
            click.echo(_about_clock(flight), err=True)
    left_out = f", without the {len(ops) - len(kept)} oldest" if len(kept) < len(ops) else ""
    place = "standard output" if output == _STANDARD_OUTPUT else output
    nodes = counted(len(flights.found), "node")
    different = counted(len({op.key for op in kept}), "op")
    click.echo(
        f"{different} on {nodes}{left_out}: {place}; open it at https://ui.perfetto.dev", err=True
    )


def _about_clock(flight: NodeFlight) -> str:
    ahead, sure = flight.wall_ahead, flight.offset.uncertainty
    how = "ahead of" if ahead >= 0 else "behind"
    return (
        f"node {flight.node}: its clock is {abs(ahead) * 1e3:.3f} ms {how} this machine's; its ops "
        f"are placed to within {sure * 1e3:.3f} ms"
    )


def _write_dumps(flights: Flights, group: str, folder: Path, our_wall: float) -> None:
    dumps = group_dumps(flights.found, our_wall)
    if not dumps:
        raise LocalError(_nothing(flights.found, group, None))
    for dump, place in zip(dumps, write(dumps, folder), strict=True):
        command = f"torchfrtrace {place}"
        if dump.without_dump:
            missing = ", ".join(map(str, dump.without_dump))
            command += f" --allow-incomplete-ranks  (nothing is known of ranks {missing})"
        left_out = f"; {counted(dump.left_out, 'op')} left out" if dump.left_out else ""
        ranks = counted(len(dump.ranks), "rank")
        click.echo(f"group {dump.group!r}: {ranks}{left_out}: {command}", err=True)


def _nothing(flights: Sequence[NodeFlight], group: str, seconds: float | None) -> str:
    names = sorted({each["name"] for flight in flights for each in flight.groups})
    if group and group not in names:
        return f"no node has a group {group!r}, and had none of late: leave --group out to see all"
    if seconds is not None:
        return (
            f"no op was in flight in the last {seconds:g} s: leave --seconds out to see older ones"
        )
    return "no group has done any op yet: run a job, then ask again"
