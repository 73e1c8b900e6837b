"""The content of ``allfold status``: gathered from the orchestrator and all agents at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from allfold.cli._asking import SECONDS, Failure, ask_agents, ask_replicas, entries, is_older
from allfold.cli._showing import age
from allfold_cluster.http import NoAnswer, get_json
from allfold_core.agent_answers import STATUS, Json, Status
from allfold_core.errors import (
    AgentUnreachable,
    LocalError,
    OrchestratorUnreachable,
    ServiceError,
)
from allfold_core.in_flight import Activity, OpInFlight, activity
from allfold_core.incident import Incident

_LATEST = 100
_SHOWN_ENDED = 3
"""So many of the incidents that are over are shown."""


@dataclass
class StatusReport:
    """The state of everything that answered.

    Attributes:
        orchestrator: its address; empty when only agents were asked.
        nodes: as ``GET /v1/nodes`` has them.
        groups: as ``GET /v1/groups`` has them.
        agents: the agents' own status, by their control URL.
        activity: what goes on in groups, as the agents that answer know it.
        problems: why an agent did not answer, by its control URL.
        failure: why there is nothing of the orchestrator, although it was asked.
        logs: the files of a job's own services, where it is one on this machine.
    """

    orchestrator: str
    nodes: list[Json] = field(default_factory=list)
    groups: list[Json] = field(default_factory=list)
    agents: dict[str, Status] = field(default_factory=dict)
    activity: Activity = field(default_factory=Activity)
    problems: dict[str, str] = field(default_factory=dict)
    failure: ServiceError | None = None
    logs: list[str] = field(default_factory=list)

    def other_ops(self) -> list[OpInFlight]:
        """The ops in flight of which no open incident speaks."""
        spoken_of = {(each.group, each.seq) for each in self.activity.incidents if each.is_open}
        return [op for op in self.activity.ops if (op.group, op.seq) not in spoken_of]

    def traffic(self) -> list[str]:
        """The caps to which agents keep, and the groups whose class is not the usual one."""
        limits = {each for agent in self.agents.values() for each in agent.get("limits", ())}
        classes = [
            f"group {each['group']!r} is {each['traffic']} traffic"
            for each in self.groups
            if each.get("traffic") not in (None, "normal")
        ]
        return [*classes, *sorted(limits)]

    def all_problems(self) -> dict[str, str]:
        """By URL, why a service has told nothing."""
        failed = {} if self.failure is None else {self.orchestrator: self.failure.message}
        return failed | self.problems

    def to_dict(self) -> Json:
        return {
            "schema": 1,
            "orchestrator": self.orchestrator,
            "nodes": self.nodes,
            "groups": self.groups,
            "agents": self.agents,
            "memberships": [asdict(each) for each in self.activity.memberships],
            **self.activity.to_dict(),
            "problems": self.all_problems(),
            "logs": self.logs,
        }


def gather(
    orchestrators: Sequence[str], agent_urls: Sequence[str], token: str, *, needs_all: bool = True
) -> StatusReport:
    """Ask the orchestrator, the agents that it knows, and those given.

    Where agents are given, they are asked whatever is wrong with the orchestrator.

    Args:
        orchestrators: its replicas, of which one that answers is enough; none: agents only.
        needs_all: raise where somebody does not answer who was named; else the report says so.

    Raises:
        OrchestratorUnreachable: it alone was to be asked and does not answer.
        ServiceError: it answered that it cannot tell, because its state store is down.
        AgentUnreachable: an agent that was given does not answer.
    """
    report, kept = StatusReport(orchestrator=""), list[Json]()
    if orchestrators:
        try:
            _ask_orchestrator(report, orchestrators, token)
            kept = _known_incidents(report.orchestrator, token)
        except ServiceError as error:
            if needs_all and not agent_urls:
                raise _with_advice(error) from None
            report.failure = error
    answers = ask_agents([*agent_urls, *_present(report)], STATUS, token)
    report.agents = answers.found
    report.problems = {url: _problem(url, error) for url, error in answers.failed.items()}
    lost = [report.problems[url] for url in agent_urls if url in report.problems]
    if lost and needs_all:
        raise AgentUnreachable(f"no agent answers: tried {'; '.join(lost)}")
    report.activity = activity(list(report.agents.values()), kept)
    return report


def agents_to_ask(orchestrators: Sequence[str], agent_urls: Sequence[str], token: str) -> list[str]:
    """Return the control URLs of the agents that are given, and of those the orchestrator knows.

    Raises:
        OrchestratorUnreachable: it was to be asked and does not answer.
        ServiceError: it answered that it cannot tell.
    """
    report = StatusReport(orchestrator="")
    if orchestrators:
        try:
            _ask_orchestrator(report, orchestrators, token)
        except ServiceError as error:
            raise _with_advice(error) from None
    return list(dict.fromkeys([*agent_urls, *_present(report)]))


def _present(report: StatusReport) -> list[str]:
    return [node["control_url"] for node in report.nodes if node["state"] != "gone"]


def _ask_orchestrator(report: StatusReport, urls: Sequence[str], token: str) -> None:
    def ask(url: str) -> None:
        report.orchestrator = url
        try:
            report.nodes = list(entries(url, "nodes", token))
            report.groups = list(entries(url, "groups", token))
        except ServiceError as error:
            raise _cannot_tell(url, error) from None

    ask_replicas(urls, ask)


def _known_incidents(orchestrator: str, token: str) -> list[Json]:
    """Return the incidents that the orchestrator keeps; an earlier version keeps none."""
    url = f"{orchestrator}/v1/incidents?limit={_LATEST}"
    try:
        return list(get_json(url, token, seconds=SECONDS).get("incidents", ()))
    except LocalError as error:
        if not is_older(error):
            raise
        return []
    except NoAnswer as error:  # it has answered before: it has ended since, or stands still
        raise OrchestratorUnreachable(f"the orchestrator answers no more: {error}") from None


def _cannot_tell(orchestrator: str, error: ServiceError) -> ServiceError:
    """The error of an orchestrator that answers, but has no state to show."""
    problem = error.message
    if error.details.get("component") == "store":
        problem = (
            f"its state store is down ({error.details.get('cause')}). Running jobs are not "
            "affected; new ranks can join when it is back"
        )
    return ServiceError(f"the orchestrator at {orchestrator} answers, but {problem}.")


def _with_advice(error: ServiceError) -> ServiceError:
    return type(error)(f"{error.message} To see what runs, ask an agent with --agent-url.")


def _problem(url: str, error: Failure) -> str:
    if isinstance(error, NoAnswer):
        return str(error)
    if isinstance(error, ServiceError):
        return f"{url}: {error.message}"
    raise error  # it has refused us, as others would: a wrong token


def incident_lines(incidents: Iterable[Incident], now: float) -> list[str]:
    """Return a line for each open incident, and for the latest ones that are over for good.

    Args:
        now: seconds since 1970.
    """
    all_of_them = list(incidents)
    open_ones = [each for each in all_of_them if each.is_open]
    again = {_matter(each) for each in open_ones}
    ended = (each for each in all_of_them if not each.is_open and _matter(each) not in again)
    return [_incident_line(each, now) for each in [*open_ones, *islice(ended, _SHOWN_ENDED)]]


def _incident_line(incident: Incident, now: float) -> str:
    """``hang, for 12 s: rank 3 on node b ...`` or ``slow, until 40 s ago: ...``."""
    when = f"for {age(now - incident.began)}"
    if incident.ended is not None:
        when = f"until {age(now - incident.ended)} ago"
    return f"{incident.effect.value}, {when}: {incident.sentence}"


def _matter(incident: Incident) -> tuple[object, ...]:
    """Return the key by which repetitions of one incident are recognised."""
    return incident.cause, incident.culprit, incident.group, incident.opening
