"""``allfold doctor``: check this machine, the services and every pair of nodes."""

from __future__ import annotations

import json
import os
import sys
import time

import click

from allfold.cli._doctor.findings import Diagnosis, Level
from allfold.cli._doctor.here import check_machine
from allfold.cli._doctor.services import Services
from allfold.cli._doctor.show import show
from allfold.cli._parameters import (
    Seconds,
    orchestrator_option,
    services_to_ask,
    token,
)

_FAILED = 1


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
    diagnosis.add(check_machine())
    if not local:
        asked = services_to_ask(orchestrator, agent_urls)
        named = bool(orchestrator or os.environ.get("ALLFOLD_ORCHESTRATOR_URL"))
        services = Services(diagnosis, token())
        services.check(*asked, expected=named)
        services.check_pairs(thorough=thorough, deadline=time.monotonic() + timeout)
    if as_json:
        click.echo(json.dumps(diagnosis.to_dict()))
    else:
        show(diagnosis)
    sys.exit(_FAILED if diagnosis.level == Level.FAIL else 0)
