"""``allfold status``: who is there, and what the ops in flight wait for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import click
from rich.table import Table

from allfold.cli._parameters import job_here, orchestrator_option, services_to_ask, token
from allfold.cli._report import StatusReport, gather, incident_lines
from allfold.cli._showing import console, table
from allfold_core.agent_answers import GroupStatus, Json, Status
from allfold_core.in_flight import GroupMembers, kept_results


@click.command(short_help="Show nodes, groups, and what ops wait for.")
@orchestrator_option
@click.option("--agent-url", "agent_urls", multiple=True, metavar="URL", help="Ask this agent.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(orchestrator: str | None, agent_urls: tuple[str, ...], as_json: bool) -> None:
    """Show nodes, groups with their ranks, incidents, and what the ops in flight wait for.

    An incident says what keeps ops from going on, or slows them down, and who causes it. Of a job
    with services of its own, the last lines name their logs.

    With --agent-url alone, the orchestrator is left out: it may be down while a job runs. With
    --orchestrator as well, the agents are shown before the error that says what is wrong with it.
    ALLFOLD_TOKEN must hold the join token.

    \b
    Exit codes:
      0    the services have answered, whatever the incidents
      1    a service has refused, e.g. the token; or its state store is down
      2    wrong usage
      3    the orchestrator, or an agent that was named, cannot be reached
    """
    report = gather(*services_to_ask(orchestrator, agent_urls), token())
    if not agent_urls and (job := job_here(orchestrator)) is not None:
        report.logs = [str(file) for file in job.log_files()]
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        _show(report)
    if report.failure is not None:
        raise report.failure


def _show(report: StatusReport) -> None:
    out, seen = console(), report.activity
    if report.orchestrator and report.failure is None:
        out.print(_node_table(report.nodes))
        out.print(_group_table(report.groups, seen.memberships))
    else:
        out.print(_agent_table(report.agents.values()))
    for line in incident_lines(seen.incidents, time.time()):
        out.print(line, soft_wrap=True, style="bold")
    lines = [op.sentence() for op in report.other_ops()]
    lines += [message.sentence() for message in seen.messages]
    if not seen.ops and not seen.messages:
        lines = ["no op is in flight"]
    lines += report.traffic()
    lines += kept_results(report.agents.values())
    lines += [line for group in report.groups for line in _about_term(group)]
    lines += [loss for group in seen.memberships for loss in group.losses]
    lines += [line for group in seen.memberships for line in (*group.links, *group.lanes)]
    lines += [f"no answer: {problem}" for problem in report.problems.values()]
    lines += [f"logs: {file}" for file in report.logs]
    for line in lines:
        out.print(line, soft_wrap=True)


def _node_table(nodes: Iterable[Json]) -> Table:
    columns = ("node", "state", "heartbeat", "device", "zone", "control", "data")
    rows = (
        (
            node["node"],
            f"{node['state']}, drains" if node.get("draining") else node["state"],
            "-" if node["heartbeat_age"] is None else f"{node['heartbeat_age']:.1f} s ago",
            node["device_type"],
            node["zone"] or "-",
            node["control_url"],
            node["data_address"],
        )
        for node in nodes
    )
    return table("Nodes", columns, rows)


def _group_table(groups: Iterable[Json], known: Iterable[GroupMembers]) -> Table:
    """The groups. The orchestrator does not know their epochs, which are the agents' to make."""
    columns = ("group", "phase", "term", "epoch", "ranks", "present", "missing", "left", "lost")
    running = {(each.group, each.opening): each for each in known}
    rows = (
        (
            group["group"],
            group["phase"],
            *_term_and_epoch(running.get((group["group"], group["epoch"]))),
            _how_many(group),
            _by_node(group["present"]),
            ", ".join(map(str, group["missing"])) or "-",
            _by_node(group["left"]),
            _by_node(group["lost"]),
        )
        for group in groups
    )
    return table("Groups", columns, rows)


def _term_and_epoch(known: GroupMembers | None) -> tuple[object, object]:
    return ("-", "-") if known is None else (known.term, known.epoch)


def _about_term(group: Json) -> Iterable[str]:
    """Yield a line for each node that the newest term of a group leaves out, and how that is known.

    A line more says so while the orchestrator may lack a newer term.
    """
    term, name = group.get("term"), group["group"]
    if term is None:
        return
    for lost in term["lost"]:
        went_on = f"group {name!r}: term {term['number']} goes on without node {lost['node']}"
        yield f"{went_on}, which {lost['how']}"
    if not term["trusted"]:
        yield (
            f"group {name!r}: the orchestrator lost its record, or was away, and waits until the "
            "agents have reported theirs; until then no node is left out for silence"
        )


def _agent_table(agents: Iterable[Status]) -> Table:
    rows = (
        (
            agent["node"],
            "ready" if agent["ready"] else f"not ready: {agent['waiting_for']}",
            "; ".join(_ranks_here(group) for group in agent["groups"]) or "-",
        )
        for agent in agents
    )
    return table("Agents", ("node", "state", "groups: ranks here"), rows)


def _ranks_here(group: GroupStatus) -> str:
    ranks = ", ".join(map(str, group["ranks"])) or "none"
    return f"{group['name']}: {ranks} (term {group['term']}, epoch {group['epoch']})"


def _how_many(group: Json) -> str:
    """``4``, or ``3 of 4`` of a group that goes on without some.

    Of a group whose record was lost only those are known who are there.
    """
    size, present = group["world_size"], len(group["present"])
    if group["phase"] == "reduced":
        return f"{present} of {size}"
    return str(size or present or "-")


def _by_node(places: Iterable[Json]) -> str:
    """``0, 1 on a; 2, 3 on b``."""
    nodes: dict[str, list[str]] = {}
    for place in places:
        nodes.setdefault(place["node"], []).append(str(place["rank"]))
    return "; ".join(f"{', '.join(ranks)} on {node}" for node, ranks in nodes.items()) or "-"
