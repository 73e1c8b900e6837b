"""The content of ``allfold status``: gathered from the orchestrator and all agents at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from allfold_cluster.http import NoAnswer, get_json
from allfold_core.errors import (
    AgentUnreachable,
    LocalError,
    OrchestratorUnreachable,
    ServiceError,
)
from allfold_core.in_flight import (
    Membership,
    MessageInFlight,
    OpInFlight,
    memberships,
    messages_in_flight,
    ops_in_flight,
)
from allfold_core.incident import Incident, merged

_SECONDS = 3.0
_AT_ONCE = 32
_PAGE = 1000
_LATEST = 100

Json = dict[str, Any]


@dataclass
class Report:
    """The state of everything that answered.

    Attributes:
        orchestrator: its address; empty when only agents were asked.
        nodes: as ``GET /v1/nodes`` has them.
        groups: as ``GET /v1/groups`` has them.
        agents: the agents' own status, by their control URL.
        memberships: the groups as the agents that answer know them.
        ops: the collectives in flight.
        messages: the sends and receives that wait.
        incidents: what is wrong in groups; open ones first.
        problems: why an agent did not answer, by its control URL.
        failure: why there is nothing of the orchestrator, although it was asked.
    """

    orchestrator: str
    nodes: list[Json] = field(default_factory=list)
    groups: list[Json] = field(default_factory=list)
    agents: dict[str, Json] = field(default_factory=dict)
    memberships: list[Membership] = field(default_factory=list)
    ops: list[OpInFlight] = field(default_factory=list)
    messages: list[MessageInFlight] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    failure: ServiceError | None = None

    def other_ops(self) -> list[OpInFlight]:
        """The ops in flight of which no open incident speaks."""
        spoken_of = {(each.group, each.seq) for each in self.incidents if each.is_open}
        return [op for op in self.ops if (op.group, op.seq) not in spoken_of]

    def to_dict(self) -> Json:
        failed = {} if self.failure is None else {self.orchestrator: self.failure.message}
        return {
            "schema": 1,
            "orchestrator": self.orchestrator,
            "nodes": self.nodes,
            "groups": self.groups,
            "agents": self.agents,
            "memberships": [asdict(each) for each in self.memberships],
            "ops_in_flight": [op.to_dict() for op in self.ops],
            "messages_in_flight": [message.to_dict() for message in self.messages],
            "incidents": [each.to_dict() for each in self.incidents],
            "problems": failed | self.problems,
        }


def gather(
    orchestrators: Sequence[str], agent_urls: Sequence[str], token: str, *, needs_all: bool = True
) -> Report:
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
    report, told = Report(orchestrator=""), list[Json]()
    if orchestrators:
        try:
            _ask_orchestrator(report, orchestrators, token)
            told += _known_incidents(report.orchestrator, token)
        except ServiceError as error:
            if needs_all and not agent_urls:
                raise _with_advice(error) from None
            report.failure = error
    _ask_agents(report, dict.fromkeys([*agent_urls, *_present(report)]), token)
    lost = [report.problems[url] for url in agent_urls if url in report.problems]
    if lost and needs_all:
        raise AgentUnreachable(f"no agent answers: tried {'; '.join(lost)}")
    report.memberships = memberships(report.agents.values())
    report.ops = ops_in_flight(report.agents.values())
    report.messages = messages_in_flight(report.agents.values())
    told += (each for status in report.agents.values() for each in status.get("incidents", ()))
    report.incidents = merged(told)
    return report


def agents_to_ask(orchestrators: Sequence[str], agent_urls: Sequence[str], token: str) -> list[str]:
    """Return the control URLs of the agents that are given, and of those the orchestrator knows.

    Raises:
        OrchestratorUnreachable: it was to be asked and does not answer.
        ServiceError: it answered that it cannot tell.
    """
    report = Report(orchestrator="")
    if orchestrators:
        try:
            _ask_orchestrator(report, orchestrators, token)
        except ServiceError as error:
            raise _with_advice(error) from None
    return list(dict.fromkeys([*agent_urls, *_present(report)]))


def _present(report: Report) -> list[str]:
    return [node["control_url"] for node in report.nodes if node["state"] != "gone"]


def _ask_orchestrator(report: Report, urls: Sequence[str], token: str) -> None:
    silent: list[str] = []
    for url in urls:
        report.orchestrator = url
        try:
            report.nodes = list(entries(url, "nodes", token))
            report.groups = list(entries(url, "groups", token))
        except NoAnswer as error:
            silent.append(str(error))
        except ServiceError as error:
            raise _cannot_tell(url, error) from None
        else:
            return
    raise OrchestratorUnreachable(
        f"no orchestrator answers: tried {'; '.join(silent)}. Choose another with --orchestrator "
        "or ALLFOLD_ORCHESTRATOR_URL; 'allfold doctor' finds out what is wrong."
    )


def _known_incidents(orchestrator: str, token: str) -> list[Json]:
    """Return the incidents that the orchestrator keeps; an earlier version keeps none."""
    url = f"{orchestrator}/v1/incidents?limit={_LATEST}"
    try:
        return list(get_json(url, token, seconds=_SECONDS).get("incidents", ()))
    except LocalError as error:
        if error.details.get("http_status") != HTTPStatus.NOT_FOUND:
            raise
        return []
    except NoAnswer as error:  # it has answered before: it has ended since, or stands still
        raise OrchestratorUnreachable(f"the orchestrator answers no more: {error}") from None


def entries(orchestrator: str, what: str, token: str) -> Iterator[Json]:
    """Yield all entries of a list of the orchestrator, page by page."""
    after = ""
    while True:
        query = urlencode({"limit": _PAGE} | ({"after": after} if after else {}))
        page = get_json(f"{orchestrator}/v1/{what}?{query}", token, seconds=_SECONDS)
        yield from page[what]
        following = page.get("next")
        if following is None:
            return
        if following <= after:
            raise ServiceError(f"the pages of /v1/{what} go in circles at '{following}'")
        after = following


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


def _ask_agents(report: Report, urls: Iterable[str], token: str) -> None:
    def ask(url: str) -> Json | str:
        try:
            answer = get_json(f"{url}/v1/status", token, seconds=_SECONDS)
        except NoAnswer as error:
            return str(error)
        except ServiceError as error:
            return f"{url}: {error.message}"
        is_agent = "node" in answer and isinstance(answer.get("groups"), list)
        return answer if is_agent else f"{url} answers, but not as an agent does"

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for url, answer in zip(urls, pool.map(ask, urls), strict=True):
            if isinstance(answer, str):
                report.problems[url] = answer
            else:
                report.agents[url] = answer
