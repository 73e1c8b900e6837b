"""``allfold limit``: caps on what agents send to other machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from allfold.cli._asking import SECONDS, ask_replicas
from allfold.cli._parameters import orchestrator_option, orchestrators, token
from allfold_cluster.http import get_json, put
from allfold_core.errors import InvalidArgument
from allfold_core.protocol.traffic import NO_LIMIT, Cap, parse_rate

Json = dict[str, Any]


@click.command(short_help="Cap what agents send.")
@orchestrator_option
@click.option("--node", default="", metavar="NODE", help="Of this node alone.")
@click.option("--group", default="", metavar="GROUP", help="For this group.")
@click.option("--zones", nargs=2, metavar="A B", help="Between these two zones.")
@click.argument("rate", required=False)
def limit(
    rate: str | None, orchestrator: str | None, node: str, group: str, zones: tuple[str, ...] | None
) -> None:
    """Cap what each agent sends at RATE per second, such as 200Mbit or 25MB; none: no cap.

    Without RATE, list the caps. Each agent keeps to each of them by itself, within a second, also
    while ops run: where n nodes send over one line, give each its part. What stays on a machine
    does not count. A cap that an agent was started with (allfold agent --limit) holds besides.

    To set one, ALLFOLD_ADMIN_TOKEN must hold the orchestrator's admin token; to list them,
    ALLFOLD_TOKEN the join token.
    """
    urls, cap = orchestrators(orchestrator), Cap(node, group, tuple(zones or ()))
    if rate is None:
        if cap != Cap():
            raise InvalidArgument("say what the limit is: a rate such as 200Mbit, or none")
        found = ask_replicas(
            urls, lambda url: get_json(f"{url}/v1/limits", token(), seconds=SECONDS)
        )
        click.echo("\n".join(each["text"] for each in found["limits"]) or "no limits are set")
        return
    wanted = None if rate == NO_LIMIT else parse_rate(rate)
    body: Json = {**cap.to_dict(), "rate": wanted}
    admin = token("ALLFOLD_ADMIN_TOKEN")
    ask_replicas(urls, lambda url: put(f"{url}/v1/limits", body, admin))
    click.echo(replace(cap, rate=wanted) if wanted else f"{cap.scope}: no limit")
