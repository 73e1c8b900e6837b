"""``GET /metrics``: what Prometheus reads. The state is read at each request; ops pay nothing."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from time import monotonic

from fastapi import FastAPI, Response

from allfold_agent import __version__
from allfold_agent.agent import NodeAgent
from allfold_agent.control import catalogue
from allfold_agent.control.status import edge_counters, problem_of, sent_to_zones
from allfold_agent.groups.deadlines import waiting_ops
from allfold_agent.groups.group import NodeGroup
from allfold_agent.observation.link_observer import sending
from allfold_core.errors import error_classes
from allfold_core.incident import Cause
from allfold_service.metrics import CONTENT_TYPE, Exposition, Values

MOST_GROUPS = 64
OTHERS = "(others)"
"""The label of all groups beyond the first 64; no group can have this name."""
MOST_PEERS = 32


def add_metrics(app: FastAPI, agent: NodeAgent) -> None:
    exposition = Exposition(catalogue.CATALOGUE, lambda: look_at(agent))

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """The metrics of this agent for Prometheus; docs/metrics.md has all of them."""
        return Response(exposition.text(), media_type=CONTENT_TYPE)


def look_at(agent: NodeAgent) -> Values:
    """Return the values of all metrics."""
    values, groups = Values(catalogue.CATALOGUE), agent.registry.all()
    _look_at_node(values, agent)
    values.put(catalogue.GROUPS, len(groups))
    errors = agent.errors.by_code()
    for label, members in _labelled(groups):
        _look_at_groups(values, label, members)
    for code in sorted(error_classes().keys() | errors.keys()):
        values.put(catalogue.ERRORS, errors[code], code)
    _look_at_traffic(values, agent)
    connections = (connected for group in groups for _, connected in sending(group))
    values.put(catalogue.RETRANSMITTED, agent.retransmits.count(connections))
    _look_at_peers(values, agent)
    _look_at_incidents(values, agent)
    return values


def _look_at_node(values: Values, agent: NodeAgent) -> None:
    build = __version__, platform.python_version(), agent.device_type
    values.put(catalogue.BUILD, 1, *build)
    values.put(catalogue.REGISTERED, agent.registration.problem is None)
    if (tls := agent.settings.credentials.tls) is not None:
        values.put(catalogue.CERTIFICATE_END, tls.expires)
    values.put(catalogue.READY, problem_of(agent) is None)
    values.put(catalogue.DRAINING, agent.draining.reason is not None)
    values.put(catalogue.RANKS, len(agent.local_server.processes))
    values.put(catalogue.RETAIN_LIMIT, agent.retention.limit)
    values.put(catalogue.ARENA, agent.local_server.arena_bytes)
    values.put(catalogue.BUFFERS, agent.buffers.held_bytes, "held")
    values.put(catalogue.BUFFERS, agent.buffers.idle_bytes, "idle")
    for loop, meter in agent.lags.items():
        values.put(catalogue.LAG, meter.longest(), loop)


def _labelled(groups: Iterable[NodeGroup]) -> Iterator[tuple[str, list[NodeGroup]]]:
    """Yield groups by the name under which they are shown: those of one name together."""
    named: dict[str, list[NodeGroup]] = {}
    for group in groups:
        label = group.name if group.name in named or len(named) < MOST_GROUPS else OTHERS
        named.setdefault(label, []).append(group)
    yield from named.items()


def _look_at_groups(values: Values, label: str, groups: list[NodeGroup]) -> None:
    if label != OTHERS:
        newest = groups[-1].current
        values.put(catalogue.GROUP_RANKS, len(newest.record.seats), label)
        values.put(catalogue.GROUP_EPOCH, newest.ordinal, label)
    now, oldest = monotonic(), 0.0
    for group in groups:
        _look_at_ops(values, label, group)
        waiting = waiting_ops(group)
        values.add(catalogue.IN_FLIGHT, len(waiting), label)
        oldest = max([oldest, *(now - each.since for each in waiting)])
        values.add(catalogue.RETAINED, group.results.nbytes, label)
        _look_at_edges(values, label, group)
    values.put(catalogue.OLDEST, oldest, label)


def _look_at_ops(values: Values, label: str, group: NodeGroup) -> None:
    records, tally, current = group.lanes.records, group.outcomes.tally, group.current
    records.harvest()
    seats = [seat for seat in current.record.seats if seat.node == group.node]
    first = min((seat.since for seat in seats), default=0)
    last = max(records.last_called().values(), default=-1)
    values.add(catalogue.COLLECTIVES, tally.called(first, last), label)
    for (op, strategy, dtype, lane), seconds in tally.seconds.copy().items():
        values.observe(catalogue.SECONDS, seconds, label, op, strategy, dtype, lane)
    for lane, skews in tally.skews.items():
        values.observe(catalogue.SKEW, skews, label, lane)
    values.add(catalogue.ROUNDS, tally.round_count, label)
    values.add(catalogue.LATE_RANKS, tally.late_ranks, label)


def _look_at_edges(values: Values, label: str, group: NodeGroup) -> None:
    for kind, direction, _, counters in edge_counters(group):
        values.add(catalogue.EDGE_BYTES, counters.payload_bytes, label, direction, kind.value)


def _look_at_traffic(values: Values, agent: NodeAgent) -> None:
    for zone, nbytes in sent_to_zones(agent).items():
        values.put(catalogue.ZONE_BYTES, nbytes, agent.settings.zone, zone)
    for cap in agent.pacer.caps:
        values.put(catalogue.LIMIT, cap.rate, cap.scope)


def _look_at_peers(values: Values, agent: NodeAgent) -> None:
    found = agent.links.round_trips()
    linked = {node: seconds for node, seconds in found.items() if seconds is not None}
    values.put(catalogue.PEERS, len(linked), "linked")
    values.put(catalogue.PEERS, len(found) - len(linked), "unlinked")
    values.put(catalogue.RTT_MAXIMUM, max(linked.values(), default=0.0))
    for node, seconds in [*linked.items()][:MOST_PEERS]:
        values.put(catalogue.RTT, seconds, node)


def _look_at_incidents(values: Values, agent: NodeAgent) -> None:
    for cause in Cause:
        values.put(catalogue.INCIDENTS_TOTAL, 0, cause.value)
    for (cause, effect), (found, lasting) in agent.incidents.counts().items():
        values.put(catalogue.INCIDENTS, lasting, cause.value, effect.value)
        values.add(catalogue.INCIDENTS_TOTAL, found, cause.value)
