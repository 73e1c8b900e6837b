"""The checks of agents: they answer, at addresses that lead others to them, with what they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import version
from ipaddress import ip_address
from urllib.parse import urlsplit

from allfold.cli._asking import OUR_CLOCK, Answers, Offset, why_silent
from allfold.cli._doctor.asking import ServiceAnswer, refusal
from allfold.cli._doctor.findings import HERE, CheckFinding, Diagnosis, Json, fail, ok, warn
from allfold.cli._doctor.machine import judge_machine
from allfold_cluster.http import NoAnswer

LISTEN_WIDELY = (
    "start the agent with --control 0.0.0.0:7411 --data 0.0.0.0:7412, and with --advertise HOST if "
    "others reach its machine at an address that it cannot find out"
)
_SKEW_SECONDS = 0.1
_SETTING = "ALLFOLD_AGENT_ADVERTISE or --advertise of the agent"


def check_answers(
    names: Mapping[str, str], answers: Answers[ServiceAnswer], astray: Collection[str], token: str
) -> Iterator[CheckFinding]:
    """Yield a finding for each agent that does not answer, or is not the one that it should be.

    Args:
        names: by URL the node that is said to be there; "" where nobody has said so.
        astray: nodes whose addresses lead others elsewhere, of which it is said already.
    """
    for url, node in names.items():
        if node in astray:
            continue
        where = f"node {node}" if node else url
        error = answers.failed.get(url)
        if isinstance(error, NoAnswer):
            advice = why_silent(error, "its agent", _SETTING)
            advice += "; or run 'allfold doctor' on a node, if agents need not be reached from here"
            yield fail("agent", where, f"no answer from here: {error}", advice)
        elif error is not None:
            yield refusal("agent", where, url, error, token)
        elif node and (there := answers.found[url].facts["node"]) != node:
            found = f"its address {url} leads from here to node {there}"
            yield fail("addresses", where, found, LISTEN_WIDELY)


def judge_nodes(diagnosis: Diagnosis, astray: Collection[str]) -> Iterator[CheckFinding]:
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


def _readiness(node: str, facts: Json) -> Iterator[CheckFinding]:
    if not facts["ready"]:
        advice = (
            f"new ranks cannot join there; see that {facts['orchestrator']}, its "
            "ALLFOLD_ORCHESTRATOR_URL, leads to the orchestrator, and that both have one token"
        )
        yield fail("registration", f"node {node}", facts["waiting_for"], advice)


def _address(node: str, facts: Json) -> CheckFinding:
    """Judge the addresses that the node advertises."""
    told, where = facts["addresses"], f"node {node}"
    if not told["control_url"]:
        found = "it advertises no address yet, as it has not registered"
        return warn("addresses", where, found, "see the finding on its registration")
    found = f"advertises {told['control_url']} and {told['data_address']}: {told['why']}"
    return ok("addresses", where, found)


def is_loopback(url: str) -> bool:
    """Return True if a URL leads every machine to itself."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def leading_astray(urls: Mapping[str, str]) -> set[str]:
    """Return the nodes whose addresses lead others elsewhere.

    Loopback is fine where all nodes are on one machine: then all advertise it, each with ports of
    its own.

    Args:
        urls: what each node advertises.
    """
    shared = Counter(urls.values())
    on_loopback = {node for node, url in urls.items() if is_loopback(url)}
    twice = {node for node, url in urls.items() if shared[url] > 1}
    is_one_machine = len(on_loopback) == len(urls) and not twice
    return twice | (set() if is_one_machine else on_loopback)


def judge_addresses(urls: Mapping[str, str], astray: Iterable[str]) -> Iterator[CheckFinding]:
    """Yield a failure for each node whose address leads others elsewhere."""
    for node in sorted(astray):
        found = f"advertises {urls[node]}, which leads every other machine to itself"
        if not is_loopback(urls[node]):
            others = sorted(other for other in urls if urls[other] == urls[node] and other != node)
            found = f"advertises {urls[node]}, as does node {', '.join(others)}"
        yield fail("addresses", f"node {node}", found, LISTEN_WIDELY)


def _gpu(node: str, gpu: Json) -> CheckFinding:
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


def _versions(diagnosis: Diagnosis) -> CheckFinding:
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


def judge_clocks(clock: Offset | None, clocks: Mapping[str, Offset]) -> Iterator[CheckFinding]:
    """Yield a finding for each node whose clock is off, or one for all.

    Args:
        clock: the orchestrator's; without one nodes are compared with this machine.
        clocks: those of the nodes, by name.
    """
    base = clock or OUR_CLOCK
    reference = "the orchestrator's" if clock else "this machine's"
    worst = 0.0
    bad = []
    for node, each in clocks.items():
        offset, doubt = each.ahead - base.ahead, each.uncertainty + base.uncertainty
        worst = max(worst, abs(offset))
        if abs(offset) - doubt > _SKEW_SECONDS:
            found = f"is {abs(offset):.3g} s {'ahead of' if offset > 0 else 'behind'} {reference}"
            advice = "run chrony or another NTP client there: traces of several nodes do not match"
            bad.append(warn("clock", f"node {node}", found, advice))
    yield from bad
    if clocks and not bad:
        yield ok("clock", "all nodes", f"at most {worst * 1e3:.1f} ms off {reference}")
