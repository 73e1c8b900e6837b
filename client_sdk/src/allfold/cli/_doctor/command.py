"""``allfold doctor``: check this machine, the services and every pair of nodes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allfold.cli._doctor.findings import CheckFinding, Diagnosis, Level, LinkSpeed
from allfold.cli._doctor.machine import check_machine
from allfold.cli._doctor.services import Services
from allfold.cli._parameters import (
    Seconds,
    job_here,
    orchestrator_option,
    services_to_ask,
    token,
)
from allfold.cli._showing import console, duration, rate, table
from allfold_cluster.job import running_jobs

_FAILED = 1
_STYLES = {
    Level.OK: "green",
    Level.WARN: "yellow",
    Level.FAIL: "bold red",
    Level.SKIPPED: "dim",
}
_ORDER = (Level.OK, Level.SKIPPED, Level.WARN, Level.FAIL)
_SHOWN_ALIKE = 4
_SHOWN_LINKS = 12


@click.command(short_help="Find out what is wrong, and what to do.")
@orchestrator_option
@click.option("--agent-url", "agent_urls", multiple=True, metavar="URL", help="Check this agent.")
@click.option("--local", is_flag=True, help="Check this machine alone, without any service.")
@click.option("--thorough", is_flag=True, help="Measure links with 16 MiB, not with 1 MiB.")
@click.option(
    "--timeout",
    type=Seconds(positive=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Begin no check between nodes after S.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(
    orchestrator: str | None,
    agent_urls: tuple[str, ...],
    local: bool,
    thorough: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Check this machine, the services, and both ports and the link between every pair of nodes.

    Every warning and every failure comes with what to do next. Checks of a link send 1 MiB, so a
    job that runs hardly notices them. With --agent-url alone the orchestrator is left out.
    ALLFOLD_TOKEN must hold the join token.

    \b
    Exit codes:
      0    nothing failed; there may be warnings
      1    a check failed
      2    wrong usage
    """
    diagnosis = Diagnosis()
    job = None if local or agent_urls else job_here(orchestrator)
    diagnosis.add(check_machine(running_jobs() if job is None else [job]))
    if not local:
        asked = services_to_ask(orchestrator, agent_urls)
        named = bool(job or orchestrator or os.environ.get("ALLFOLD_ORCHESTRATOR_URL"))
        services = Services(diagnosis, token())
        services.check(*asked, expected=named)
        services.check_pairs(thorough=thorough, deadline=time.monotonic() + timeout)
    if as_json:
        click.echo(json.dumps(diagnosis.to_dict()))
    else:
        _show(diagnosis)
    sys.exit(_FAILED if diagnosis.level == Level.FAIL else 0)


def _show(diagnosis: Diagnosis) -> None:
    """Print the findings, the worst last, where a terminal shows them; then the links."""
    out = console()
    for level in _ORDER:
        for finding in _shortened([each for each in diagnosis.findings if each.level == level]):
            _print(out, finding)
    if diagnosis.links:
        out.print(_link_table(diagnosis.links))
    out.print(Text(f"doctor: {diagnosis.summary()}", style=_STYLES[diagnosis.level]))


def _print(out: Console, finding: CheckFinding) -> None:
    head = Text(f"{finding.level.value:<8}", style=_STYLES[finding.level])
    out.print(
        head + Text(f"{finding.check}, {finding.where}: {finding.found}", style=""), soft_wrap=True
    )
    if finding.advice:
        out.print(Text(f"        next: {finding.advice}"), soft_wrap=True)


def _shortened(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Of many that are fine in the same check, show the first, and say how many more there are."""
    shown: list[CheckFinding] = []
    counts: dict[str, int] = {}
    for each in findings:
        counts[each.check] = counts.get(each.check, 0) + 1
        if each.level != Level.OK or counts[each.check] <= _SHOWN_ALIKE:
            shown.append(each)
    for check, count in counts.items():
        if count > _SHOWN_ALIKE and shown and shown[0].level == Level.OK:
            more = f"{count - _SHOWN_ALIKE} more are fine (--json has them)"
            shown.append(CheckFinding(Level.OK, check, "others", more))
    return shown


def _link_table(links: Iterable[LinkSpeed]) -> Table:
    """The slowest links; all of them where there are few."""
    slowest = sorted(links, key=lambda each: each.bandwidth)
    title = "Links"
    if len(slowest) > _SHOWN_LINKS:
        title = f"The {_SHOWN_LINKS} slowest of {len(slowest)} links"
    rows = (
        (
            link.source,
            link.target,
            duration(link.latency),
            rate(link.bandwidth),
            "memory" if link.path == "machine" else "network",
        )
        for link in slowest[:_SHOWN_LINKS]
    )
    return table(title, ("from", "to", "latency", "speed", "by"), rows)
