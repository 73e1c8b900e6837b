"""``allfold config``: the settings of ranks, commands, agent and orchestrator, as found here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
from rich.table import Table

from allfold.cli._config import sdk, services
from allfold.cli._config.services import strays
from allfold.cli._config.setting import DEFAULT, Setting
from allfold.cli._showing import console, table

_WRONG_VALUE = 1
_TITLES = {"sdk": "Ranks", "cli": "The allfold command", "agent": "Agent"}
_TITLES["orchestrator"] = "Orchestrator"

Json = dict[str, Any]


@click.command(
    short_help="Show every setting and where it comes from.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--sources", is_flag=True, help="Show where each value comes from, and its default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("service", required=False, type=click.Choice(list(services.MODULES)))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def config(sources: bool, as_json: bool, service: str | None, options: tuple[str, ...]) -> None:
    """Show the settings of ranks, commands, agent and orchestrator as they would be here.

    With SERVICE, agent or orchestrator, those of this one alone, as it would start with OPTIONS:
    allfold config --sources agent --data 0.0.0.0:7412. A flag or argument wins over the
    environment, that over a file (ALLFOLD_TOKEN_FILE), and that over the default. Secrets and
    passwords are shown as ****. Variables that begin with ALLFOLD_ and that nobody reads are named.

    \b
    Exit codes:
      0    every value can be used
      1    some value cannot: the service or init would refuse it
      2    wrong usage
    """
    missing = [each for each in services.MODULES if not services.is_installed(each)]
    shown = list(_settings(service, options, missing))
    unread = strays(os.environ)
    if as_json:
        click.echo(json.dumps(_as_json(shown, unread, missing)))
    else:
        _show(shown, unread, missing, with_sources=sources)
    sys.exit(_WRONG_VALUE if any(each.problem for each in shown) else 0)


def _settings(
    service: str | None, options: Sequence[str], missing: Sequence[str]
) -> Iterator[Setting]:
    if service is None:
        yield from sdk.settings(os.environ)
    for each in services.MODULES if service is None else [service]:
        if each not in missing:
            yield from services.settings(each, os.environ, options)


def _as_json(
    shown: Iterable[Setting], unread: Mapping[str, str], missing: Sequence[str]
) -> dict[str, Any]:
    return {
        "schema": 1,
        "settings": [each.to_dict() for each in shown],
        "unknown": [
            {"variable": name, "did_you_mean": meant or None} for name, meant in unread.items()
        ],
        "not_installed": [services.MODULES[each] for each in missing],
    }


def _show(
    shown: Sequence[Setting],
    unread: Mapping[str, str],
    missing: Sequence[str],
    *,
    with_sources: bool,
) -> None:
    out = console()
    for reader, title in _TITLES.items():
        settings = [each for each in shown if each.reader == reader]
        if settings:
            out.print(_table(title, settings, with_sources=with_sources))
    for each in shown:
        if each.problem:
            problem = f"cannot be used ({each.reader}): {each.variable}: {each.problem}"
            out.print(problem, soft_wrap=True)
    for name, meant in unread.items():
        hint = f"; did you mean {meant}?" if meant else ""
        out.print(f"nobody reads {name}{hint}", soft_wrap=True)
    for service in missing:
        module = services.MODULES[service].replace("_", "-")
        absent = "is not installed here: its settings are not shown, its variables not known"
        out.print(f"{module} {absent}", soft_wrap=True)


def _table(title: str, settings: Iterable[Setting], *, with_sources: bool) -> Table:
    columns = ["variable", "or", "value"] + (["source", "default"] if with_sources else [])
    made = table(title, columns)
    for each in settings:
        cells = [each.variable, each.argument, "-" if each.value is None else each.value]
        if with_sources:
            cells += [each.source, "-" if each.default is None else each.default]
        made.add_row(*cells, style="bold" if each.source != DEFAULT else "")
    return made
