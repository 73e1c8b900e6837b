"""The checks of agents: they answer, at addresses that lead others to them, with what they need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from allfold.cli._doctor.addresses import LISTEN_WIDELY, is_loopback
from allfold.cli._doctor.asking import (
    AGENT,
    Answer,
    ask,
    is_older,
    refused_token,
    token_finding,
    why_silent,
)
from allfold.cli._doctor.findings import HERE, Diagnosis, Finding, Json, fail, ok, warn
from allfold.cli._doctor.limits import judge_machine
from allfold_cluster.http import NoAnswer
from allfold_core.errors import AllfoldError

_AT_ONCE = 32
_SKEW_SECONDS = 0.1
_SETTING = "ALLFOLD_AGENT_ADVERTISE or --advertise of the agent"
Outcome = Answer | NoAnswer | AllfoldError


def ask_agents(urls: Iterable[str], token: str) -> dict[str, Outcome]:
    """Ask all agents at once for their facts; return the answer or the failure of each."""

    def attempt(url: str) -> Outcome:
        try:
            return ask(url, token, AGENT)
        except (NoAnswer, AllfoldError) as error:
            return error

    wanted = list(dict.fromkeys(urls))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(wanted, pool.map(attempt, wanted), strict=True))


def check_answers(
    names: Mapping[str, str], outcomes: Mapping[str, Outcome], astray: Collection[str], token: str
) -> Iterator[Finding]:
    """Yield a finding for each agent that does not answer, or is not the one that it should be.

    Args:
        names: by URL the node that is said to be there; "" where nobody has said so.
        astray: nodes whose addresses lead others elsewhere, of which it is said already.
    """
    for url, node in names.items():
        if node in astray:
            continue
        outcome, where = outcomes[url], f"node {node}" if node else url
        if isinstance(outcome, NoAnswer):
            advice = why_silent(outcome, "its agent", _SETTING)
            advice += "; or run 'allfold doctor' on a node, if agents need not be reached from here"
            yield fail("agent", where, f"no answer from here: {outcome}", advice)
        elif isinstance(outcome, AllfoldError):
            yield _refusal(where, url, outcome, token)
        elif node and outcome.facts["node"] != node:
            found = f"its address {url} leads from here to node {outcome.facts['node']}"
            yield fail("addresses", where, found, LISTEN_WIDELY)


def _refusal(where: str, url: str, error: AllfoldError, token: str) -> Finding:
    if refused_token(error):
        return token_finding(where, url, token)
    if is_older(error):
        found = f"the agent at {url} is of another version: it does not know /v1/facts"
        return fail("versions", where, found, "install the same version of Allfold everywhere")
    return fail("agent", where, f"{url}: {error.message}", "see its log")


def judge_nodes(diagnosis: Diagnosis, astray: Collection[str]) -> Iterator[Finding]:
    """Yield what the facts of the agents that answer mean.

    Args:
        astray: the nodes whose addresses lead others elsewhere.
    """
    for node, facts in diagnosis.nodes.items():
        yield from _readiness(node, facts)
        if node not in astray:
            yield _address(node, facts)
        yield from judge_machine(f"node {node}", facts["machine"], facts["memfd"])
        yield _gpu(node, facts["gpu"])
    if diagnosis.nodes:
        yield _versions(diagnosis)


def _readiness(node: str, facts: Json) -> Iterator[Finding]:
    if not facts["ready"]:
        advice = (
            f"new ranks cannot join there; see that {facts['orchestrator']}, its "
            "ALLFOLD_ORCHESTRATOR_URL, leads to the orchestrator, and that both have one token"
        )
        yield fail("registration", f"node {node}", facts["waiting_for"], advice)


def _address(node: str, facts: Json) -> Finding:
    """Judge the addresses that the node advertises."""
    told, where = facts["addresses"], f"node {node}"
    if not told["control_url"]:
        found = "it advertises no address yet, as it has not registered"
        return warn("addresses", where, found, "see the finding on its registration")
    found = f"advertises {told['control_url']} and {told['data_address']}: {told['why']}"
    return ok("addresses", where, found)


def judge_addresses(urls: Mapping[str, str], astray: Iterable[str]) -> Iterator[Finding]:
    """Yield a failure for each node whose address leads others elsewhere."""
    for node in sorted(astray):
        found = f"advertises {urls[node]}, which leads every other machine to itself"
        if not is_loopback(urls[node]):
            others = sorted(other for other in urls if urls[other] == urls[node] and other != node)
            found = f"advertises {urls[node]}, as does node {', '.join(others)}"
        yield fail("addresses", f"node {node}", found, LISTEN_WIDELY)


def _gpu(node: str, gpu: Json) -> Finding:
    where = f"node {node}"
    if gpu["names"]:
        names = ", ".join(f"{name} ({uuid})" for uuid, name in gpu["names"].items())
        return ok("GPU", where, f"reduces on {names}, whose memory ranks can share with it")
    if gpu["driver"] and gpu["setting"] != "off":
        advice = (
            "install the agent with [cuda13] or [cuda12], and give its container the GPUs; "
            "docs/gpu.md#installation. Until then tensors on GPUs go by way of the host"
        )
        return warn("GPU", where, f"there is an NVIDIA driver, but {gpu['reason']}", advice)
    return ok("GPU", where, f"reduces on the CPU alone: {gpu['reason']}")


def _versions(diagnosis: Diagnosis) -> Finding:
    """Judge versions: those of Allfold must be the same everywhere."""
    services = {f"node {node}": facts["versions"] for node, facts in diagnosis.nodes.items()}
    ours = {HERE: version("allfold")}
    ours |= {where: found["allfold"] for where, found in services.items()}
    ours |= {url: facts["version"] for url, facts in diagnosis.orchestrators.items()}
    if len(set(ours.values())) > 1:
        found = "; ".join(f"{where}: {number}" for where, number in ours.items())
        return fail("versions", "services", found, "install the same version everywhere")
    words = [f"allfold {next(iter(ours.values()))}"]
    for name in ("python", "numpy", "torch"):
        numbers = sorted({found[name] for found in services.values()})
        words.append(f"{name} {' and '.join(numbers)}")
    return ok("versions", "services", ", ".join(words))


def judge_clocks(clock: Answer | None, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Yield a finding for each node whose clock is off, or one for all.

    Args:
        clock: the orchestrator's; without one nodes are compared with this machine.
        answers: of the agents, by node.
    """
    base, slack = (clock.offset, clock.uncertainty) if clock else (0.0, 0.0)
    reference = "the orchestrator's" if clock else "this machine's"
    worst = 0.0
    bad = []
    for node, answer in answers.items():
        offset, doubt = answer.offset - base, answer.uncertainty + slack
        worst = max(worst, abs(offset))
        if abs(offset) - doubt > _SKEW_SECONDS:
            found = f"is {abs(offset):.3g} s {'ahead of' if offset > 0 else 'behind'} {reference}"
            advice = "run chrony or another NTP client there: traces of several nodes do not match"
            bad.append(warn("clock", f"node {node}", found, advice))
    yield from bad
    if answers and not bad:
        yield ok("clock", "all nodes", f"at most {worst * 1e3:.1f} ms off {reference}")
