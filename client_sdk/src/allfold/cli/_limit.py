"""``allfold limit``: caps on what agents send, and limits on what is open for a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import quote

import click

from allfold.cli._asking import SECONDS, ask_replicas
from allfold.cli._parameters import orchestrator_option, orchestrators, token
from allfold_cluster.http import get_json, put
from allfold_core.errors import InvalidArgument
from allfold_core.protocol.traffic import NO_LIMIT, Cap, parse_rate

Json = dict[str, Any]
_COUNT = click.IntRange(min=0)


@click.command(short_help="Cap what agents send.")
@orchestrator_option
@click.option("--node", default="", metavar="NODE", help="Of this node alone.")
@click.option("--group", default="", metavar="GROUP", help="For this group.")
@click.option("--zones", nargs=2, metavar="A B", help="Between these two zones.")
@click.option("--token-name", default="", metavar="NAME", help="The name of a token.")
@click.option("--groups", type=_COUNT, metavar="N", help="Groups open at once, for that token.")
@click.option("--ranks", type=_COUNT, metavar="N", help="Ranks in all of them together.")
@click.argument("rate", required=False)
def limit(rate: str | None, orchestrator: str | None, token_name: str, **given: Any) -> None:
    """Cap what each agent sends at RATE per second, such as 200Mbit or 25MB; none: no cap.

    Without RATE, list the limits. Each agent keeps to each of them by itself, within a second, also
    while ops run: where n nodes send over one line, give each its part. What stays on a machine
    does not count. A cap that an agent was started with (allfold agent --limit) holds besides.

    With --token-name, limit what the agents with a token of this name have open, to so many
    --groups and --ranks, in place of what was set; none removes that. Then list all limits.

    To set one, ALLFOLD_ADMIN_TOKEN must hold the orchestrator's admin token; to list them,
    ALLFOLD_TOKEN the join token.
    """
    urls, counts = orchestrators(orchestrator), {kind: given[kind] for kind in ("groups", "ranks")}
    cap = Cap(given["node"], given["group"], tuple(given["zones"] or ()))
    is_count, admin = set(counts.values()) != {None}, token("ALLFOLD_ADMIN_TOKEN")
    if token_name or is_count:
        if not token_name or cap != Cap() or rate != (None if is_count else NO_LIMIT):
            raise InvalidArgument("with --token-name give --groups, --ranks or both; or none")
        path = f"/v1/limits/tokens/{quote(token_name, safe='')}"
        found = ask_replicas(urls, lambda url: put(url + path, counts, admin))
    elif rate is None:
        if cap != Cap():
            raise InvalidArgument("say what the limit is: a rate such as 200Mbit, or none")
        found = ask_replicas(
            urls, lambda url: get_json(f"{url}/v1/limits", token(), seconds=SECONDS)
        )
    else:
        wanted = None if rate == NO_LIMIT else parse_rate(rate)
        body: Json = {**cap.to_dict(), "rate": wanted}
        ask_replicas(urls, lambda url: put(f"{url}/v1/limits", body, admin))
        click.echo(replace(cap, rate=wanted) if wanted else f"{cap.scope}: no limit")
        return
    listed = [each["text"] for each in found["limits"]]
    listed += [
        f"token {each['token']}: {_use(each, 'groups')}, {_use(each, 'ranks')}"
        for each in found.get("tokens", ())
    ]
    click.echo("\n".join(listed) or "no limits are set")


def _use(limit: Json, kind: str) -> str:
    most = "" if limit[kind] is None else f" of {limit[kind]}"
    return f"{kind} {limit['open_' + kind]}{most}"
