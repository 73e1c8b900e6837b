"""``allfold drain``: a node takes no more ranks, and those that it has leave."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import click

from allfold.cli._asking import ask_replicas
from allfold.cli._parameters import Seconds, orchestrator_option, orchestrators, token
from allfold_cluster.http import post
from allfold_core.in_flight import ranks_in_words

_PAUSE_SECONDS = 0.5
_NOT_DRAINED = 1
_CANNOT_LEAVE = ", which is not elastic, to end"

Json = dict[str, Any]


@click.command(short_help="Have the ranks of a node leave.")
@orchestrator_option
@click.option("--timeout", type=Seconds(positive=True), metavar="S", help="Wait no longer than S.")
@click.argument("node")
def drain(node: str, orchestrator: str | None, timeout: float | None) -> None:
    """Drain NODE: it takes no more ranks; wait until those that it has are gone.

    Ranks of elastic groups (init(max_world=)) leave in order at their group's next boundary, and
    end with status 0: the others go on without them, and nothing is done again. Ranks of other
    groups cannot leave; the command waits for their end. It says whom it waits for. The node drains
    until its agent is restarted, also when this command has ended.

    ALLFOLD_ADMIN_TOKEN must hold the orchestrator's admin token. The status is 1 if ranks are left
    after --timeout.
    """
    urls, admin = orchestrators(orchestrator), token("ALLFOLD_ADMIN_TOKEN")
    deadline = None if timeout is None else time.monotonic() + timeout
    shown = ""
    while (waits := awaited(answer := _ask(urls, node, admin))) is not None:
        if waits != shown:
            click.echo(f"node {answer['node']} waits for {waits}")
            shown = waits
        if deadline is not None and time.monotonic() > deadline:
            click.echo(f"allfold: after {timeout:g} s, node {node} waits for {waits}", err=True)
            sys.exit(_NOT_DRAINED)
        time.sleep(_PAUSE_SECONDS)
    click.echo(f"node {node} has no rank left")


def awaited(answer: Json) -> str | None:
    """Return what a node that drains waits for, in words; ``None`` once it is done."""
    if not answer["draining"]:
        return "its agent, which has not answered yet"
    ranks: dict[tuple[str, bool], list[int]] = {}
    for each in answer["ranks"]:
        ranks.setdefault((each["group"], each["can_leave"]), []).append(each["rank"])
    waits = [
        f"{ranks_in_words(some)} of group {group}{'' if can_leave else _CANNOT_LEAVE}"
        for (group, can_leave), some in ranks.items()
    ]
    return "; ".join(waits) or None


def _ask(urls: Sequence[str], node: str, admin_token: str) -> Json:
    """Ask the orchestrator to drain the node; return how far it is."""
    path = f"/v1/nodes/{quote(node, safe='')}/drain"
    return ask_replicas(urls, lambda url: post(url + path, admin_token))
