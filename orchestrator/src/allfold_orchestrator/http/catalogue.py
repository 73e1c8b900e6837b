"""The metrics of the orchestrator. What is said of them elsewhere is made of this catalogue."""

from __future__ import annotations

from allfold_service.metrics import Metric, counter, gauge, histogram

BUILD = gauge(
    "allfold_orchestrator_build_info",
    "Always 1; the labels say what runs, and whether the store is redis or embedded.",
    "version",
    "python",
    "store",
)
CERTIFICATE_END = gauge(
    "allfold_orchestrator_certificate_end_time_seconds",
    "Time at which its certificate ends, in seconds since 1970; without TLS it has no series.",
)
STORE_UP = gauge(
    "allfold_orchestrator_store_up",
    "1 if the store answers and takes writes, else 0; then what is read from it has no series.",
)
STORE_SECONDS = histogram(
    "allfold_orchestrator_store_seconds",
    "Seconds of commands to the store, with the wait for a connection; failures among them.",
)
STORE_FAILURES = counter(
    "allfold_orchestrator_store_failures_total", "Commands to the store that have failed."
)
GENERATION = gauge(
    "allfold_orchestrator_generation",
    "Number of the store's generation; it grows when the store has lost what it knew.",
)
NODES = gauge(
    "allfold_orchestrator_nodes",
    "Nodes by state: alive, late (silent for longer than its lease) or gone (in the last hour).",
    "state",
)
NODES_DRAINING = gauge("allfold_orchestrator_nodes_draining", "Nodes that drain.")
HEARTBEAT_AGE = gauge(
    "allfold_orchestrator_node_heartbeat_age_seconds",
    "Seconds since the last heartbeat of each node that is not gone.",
    "node",
)
NODES_ENDED = counter(
    "allfold_orchestrator_nodes_ended_total",
    "Lives of nodes that this replica has ended, by reason; those of evicted, lease_ended and "
    "abandoned were lost.",
    "reason",
)
GROUPS = gauge(
    "allfold_orchestrator_groups",
    "Groups by phase: forming, ready (all ranks are there), reduced (some are not), recalled (the "
    "store has lost its record), gone or unreadable.",
    "phase",
)
RANKS_MISSING = gauge(
    "allfold_orchestrator_ranks_missing",
    "Ranks that groups which are forming still wait for.",
)
TOKEN_OPEN = gauge(
    "allfold_orchestrator_token_open", "Open groups, or ranks, of a token's name.", "token", "of"
)
TOKEN_LIMIT = gauge(
    "allfold_orchestrator_token_limit", "As many as there may be, if limited.", "token", "of"
)
LINKS = gauge("allfold_orchestrator_control_links", "Agents that are linked to this replica.")
REQUESTS = counter(
    "allfold_orchestrator_requests_total",
    "HTTP requests by route and status; the route of a request that none serves is other.",
    "method",
    "route",
    "status",
)
REQUEST_SECONDS = histogram(
    "allfold_orchestrator_request_seconds",
    "Seconds of HTTP requests by route; those for plans wait for their group.",
    "route",
)
LAG = gauge(
    "allfold_orchestrator_event_loop_lag_seconds",
    "By how much a timer of the event loop was late at most, in the last 15 s.",
)
INCIDENTS = gauge(
    "allfold_orchestrator_incidents",
    "Open incidents that agents, or this replica, have reported; a cause that was never reported "
    "to this replica may have no series.",
    "cause",
    "effect",
)
INCIDENT_INFO = gauge(
    "allfold_orchestrator_incident_info",
    "Always 1, for each of the latest open incidents (64 at most): who causes it, and the sentence "
    "that allfold status shows. It has no series for an incident that is over.",
    "cause",
    "effect",
    "group",
    "culprit",
    "sentence",
)
INCIDENTS_TOTAL = counter(
    "allfold_orchestrator_incidents_total",
    "Incidents that were reported to this replica, by cause.",
    "cause",
)

CATALOGUE = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))
"""All of the above, in their order."""
