"""The checks between nodes: each asks for both ports of every other one, and measures the link.

Nodes are paired by rounds, as teams in a league: no node has a part in two checks at once, so that
measurements do not disturb each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlencode

from allfold.cli._doctor.findings import CheckFinding, Json, LinkSpeed, fail, ok, skipped, warn
from allfold.cli._doctor.nodes import LISTEN_WIDELY, is_loopback
from allfold.cli._showing import duration, rate
from allfold_cluster.http import NoAnswer, post
from allfold_core.errors import AllfoldError

_AT_ONCE = 64
_SECONDS = 20.0
# A link is slow if it carries less than a tenth of Gigabit Ethernet; or less than a quarter of the
# best one, unless even that is more than Gigabit Ethernet has.
_SLOW, _FAST, _SHARE = 12.5e6, 125e6, 0.25
_LONG_SECONDS = 5e-3
_LONG_FACTOR = 10.0
_PORTS = {"control": "control port", "data": "data port"}
_ADVICE = {
    "refused": "nothing listens there, or a firewall rejects it: see that the agent listens at an "
    "address that the others reach (--control and --data with 0.0.0.0, not 127.0.0.1) and "
    "advertises it (--advertise), and let TCP port {port} through",
    "silent": "packets are dropped, or the process is stopped: let TCP port {port} through the "
    "firewalls of that node and between the nodes",
    "stalled": "single bytes pass and many do not: the MTU of an interface on the way is smaller "
    "than both ends believe (overlay networks, tunnels); find it with 'ping -M do -s 1472 HOST', "
    "and set it at both ends",
    "no_route": "there is no route: have the node advertise another of its addresses (--advertise)",
    "no_name": "the name is not known there: have the node advertise an IP address (--advertise)",
    "token": "start all agents with the same ALLFOLD_TOKEN",
    "wrong_node": "the address leads to another node: each must advertise an address of its own "
    "(--advertise)",
    "stranger": "something else listens there, or an agent of another version: see what does, and "
    "install the same version everywhere",
    "broken": "the connection breaks: see whether a proxy or NAT stands between, and the log of "
    "that agent",
}


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node and where it is.

    Attributes:
        asked_at: where this command reaches its agent; "" if it does not.
    """

    node: str
    control_url: str
    data_address: str
    asked_at: str


@dataclass(frozen=True, slots=True)
class PairCheck:
    """The result of one node's check of another; ``answer`` is a sentence if it could not check."""

    source: NodePlace
    target: NodePlace
    answer: Json | str


def rounds(places: Sequence[NodePlace]) -> Iterator[list[tuple[NodePlace, NodePlace]]]:
    """Yield every ordered pair once; no node is in two pairs of a round.

    One place stays, the others go round it; of an odd number, one waits in each round.
    """
    circle: list[NodePlace | None] = [*places, *([None] if len(places) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairs = [(one, other) for one, other in met if one is not None and other is not None]
        yield pairs
        yield [(other, one) for one, other in pairs]
        circle.insert(1, circle.pop())


def check_pairs(
    places: Sequence[NodePlace], token: str, *, thorough: bool, deadline: float
) -> list[PairCheck]:
    """Ask every node that we reach to check every other one, until the deadline (monotonic)."""

    def check(pair: tuple[NodePlace, NodePlace]) -> PairCheck:
        source, target = pair
        if not source.asked_at:
            return PairCheck(source, target, f"the agent of node {source.node} was not reached")
        if time.monotonic() > deadline:
            return PairCheck(source, target, "the time was over; --timeout gives more")
        return PairCheck(source, target, _ask(source, target, token, thorough=thorough))

    outcomes: list[PairCheck] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for pairs in rounds(places):
            outcomes += pool.map(check, pairs)
        slow = {id(each) for each in outcomes if _is_slow(each, outcomes)}
        again = [(each.source, each.target) for each in outcomes if id(each) in slow]
        better = {(each.source, each.target): each for each in map(check, again)}
    return [_faster(each, better.get((each.source, each.target), each)) for each in outcomes]


def _ask(source: NodePlace, target: NodePlace, token: str, *, thorough: bool) -> Json | str:
    query = urlencode(
        {
            "node": target.node,
            "control_url": target.control_url,
            "data_address": target.data_address,
            "thorough": str(thorough).lower(),
        }
    )
    try:
        return post(f"{source.asked_at}/v1/checks/peer?{query}", token, seconds=_SECONDS)
    except NoAnswer as error:
        return f"no answer: {error}"
    except AllfoldError as error:
        return error.message


def _is_slow(outcome: PairCheck, others: Iterable[PairCheck]) -> bool:
    link = speed(outcome)
    if link is None or link.path == "machine":
        return False
    return any(_slow_links([link], [each for o in others if (each := speed(o)) is not None]))


def _faster(one: PairCheck, other: PairCheck) -> PairCheck:
    first, second = speed(one), speed(other)
    if first is None or second is None:
        return one
    return other if second.bandwidth > first.bandwidth else one


def speed(outcome: PairCheck) -> LinkSpeed | None:
    """Return the speed of a link that was measured. The one who checks is the one who receives."""
    if isinstance(outcome.answer, str) or not outcome.answer["data"]["ok"]:
        return None
    data = outcome.answer["data"]
    source, target = outcome.target.node, outcome.source.node
    return LinkSpeed(source, target, data["latency"], data["bandwidth"], data["path"])


def judge_pairs(outcomes: Sequence[PairCheck]) -> Iterator[CheckFinding]:
    """Yield what is wrong between nodes, or how good it is."""
    unchecked: dict[str, list[str]] = {}
    for each in outcomes:
        if isinstance(each.answer, str):
            pair = f"{each.source.node} -> {each.target.node}"
            unchecked.setdefault(each.answer, []).append(pair)
    for why, pairs in unchecked.items():
        yield skipped("ports", f"{', '.join(pairs[:8])}{' ...' if len(pairs) > 8 else ''}", why)
    checked = [each for each in outcomes if not isinstance(each.answer, str)]
    for port in _PORTS:
        yield from _judge_port(port, checked)
    yield from _judge_links([link for each in checked if (link := speed(each)) is not None])


def _judge_port(port: str, outcomes: Sequence[PairCheck]) -> Iterator[CheckFinding]:
    """One finding for each node that others do not reach, by the kind of the failure."""
    failures: dict[tuple[str, str, str], list[PairCheck]] = {}
    for each in outcomes:
        assert isinstance(each.answer, dict)
        found = each.answer[port]
        if not found["ok"]:
            address = _address(port, each.target)
            failures.setdefault((each.target.node, address, found["kind"]), []).append(each)
    for (node, address, kind), those in failures.items():
        assert isinstance(those[0].answer, dict)
        sources = ", ".join(each.source.node for each in those)
        text = those[0].answer[port]["problem"]
        everybody = sum(each.target.node == node for each in outcomes) == len(those)
        who = (
            f"no other node (asked: {sources}) reaches" if everybody else f"{sources} cannot reach"
        )
        advice = _ADVICE[kind].format(port=address.rpartition(":")[2])
        if is_loopback(f"//{address}"):
            advice = LISTEN_WIDELY
        yield fail(_PORTS[port], f"node {node}", f"{who} {address}: {text}", advice)
    if outcomes and not failures:
        yield ok(_PORTS[port], "all nodes", f"reached in all {len(outcomes)} directions")


def _address(port: str, target: NodePlace) -> str:
    return target.data_address if port == "data" else target.control_url.partition("://")[2]


def _judge_links(links: Sequence[LinkSpeed]) -> Iterator[CheckFinding]:
    slow = list(_slow_links(links, links))
    long = list(_long_links(links))
    yield from slow
    yield from long
    if links and not slow and not long:
        yield ok("links", "all nodes", in_words(links))


def _slow_links(
    links: Sequence[LinkSpeed], all_links: Sequence[LinkSpeed]
) -> Iterator[CheckFinding]:
    over_network = [each for each in all_links if each.path == "network"]
    best = max((each.bandwidth for each in over_network), default=0.0)
    for link in links:
        is_slow = link.bandwidth < max(_SLOW, min(_SHARE * best, _FAST))
        if link.path == "network" and is_slow:
            found = f"carries {rate(link.bandwidth)}; the fastest link carries {rate(best)}"
            advice = (
                "see the link's rate (ethtool), its losses (ip -s link) and who else uses it; "
                "--thorough measures with 16 MiB; wire='bfloat16' or 'int8' sends fewer bytes"
            )
            yield warn("link speed", f"node {link.source} -> node {link.target}", found, advice)


def _long_links(links: Sequence[LinkSpeed]) -> Iterator[CheckFinding]:
    least = min((each.latency for each in links if each.path == "network"), default=0.0)
    for link in links:
        if link.latency > max(_LONG_SECONDS, _LONG_FACTOR * least) and link.path == "network":
            found = f"takes {duration(link.latency)}; the shortest link takes {duration(least)}"
            advice = (
                "give nodes that are near each other one ALLFOLD_ZONE, so that they are neighbours "
                "in rings and trees; if they are near, see what delays packets"
            )
            yield warn("link latency", f"node {link.source} -> node {link.target}", found, advice)


def in_words(links: Sequence[LinkSpeed]) -> str:
    """``6 directions, 40 to 80 us, 1.1 to 1.2 GB/s``."""
    latencies = sorted(each.latency for each in links)
    rates = sorted(each.bandwidth for each in links)
    times = f"{duration(latencies[0])} to {duration(latencies[-1])}"
    return f"{len(links)} directions, {times}, {rate(rates[0])} to {rate(rates[-1])}"
