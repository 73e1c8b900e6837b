"""The metrics of an agent. What is said of them elsewhere is made of this catalogue."""

from __future__ import annotations

from allfold_service.metrics import Metric, counter, gauge, histogram

_SAMPLED = (
    "lane=short has those between nodes of more than 64 KiB, and a sample of the others, which on "
    "one node end with their last call; lane=long has all."
)

BUILD = gauge(
    "allfold_agent_build_info",
    "Always 1; the labels say what runs.",
    "version",
    "python",
    "device_type",
)
REGISTERED = gauge(
    "allfold_agent_registered",
    "1 while the agent has a control link to an orchestrator, else 0.",
)
READY = gauge("allfold_agent_ready", "1 while ranks can join on this node, else 0.")
DRAINING = gauge("allfold_agent_draining", "1 while the node drains, else 0.")
CERTIFICATE_END = gauge(
    "allfold_agent_certificate_end_time_seconds",
    "Time at which its certificate ends, in seconds since 1970; without TLS it has no series.",
)
RANKS = gauge("allfold_agent_connected_ranks", "Processes that are connected to the agent.")
GROUPS = gauge("allfold_agent_groups", "Groups that are open on this node.")

GROUP_RANKS = gauge("allfold_agent_group_ranks", "Ranks of a group, on all its nodes.", "group")
GROUP_EPOCH = gauge(
    "allfold_agent_group_epoch",
    "Number of a group's epoch; it grows whenever the members change.",
    "group",
)
COLLECTIVES = counter(
    "allfold_agent_collectives_total",
    "Collectives that ranks of this node have called, in both lanes, counted by the numbers that "
    "ops have in their group.",
    "group",
)
SECONDS = histogram(
    "allfold_agent_collective_seconds",
    f"Seconds from the first local call of a collective until its outcome. {_SAMPLED}",
    "group",
    "op",
    "strategy",
    "dtype",
    "lane",
)
SKEW = histogram(
    "allfold_agent_arrival_skew_seconds",
    f"Seconds from the first to the last local call of a collective. {_SAMPLED}",
    "group",
    "lane",
)
ROUNDS = counter(
    "allfold_agent_rounds_total",
    "Weighted means (rounds) that are done.",
    "group",
)
LATE_RANKS = counter(
    "allfold_agent_round_late_ranks_total",
    "Ranks of this node that rounds did not wait for, since a quorum had called: one for each "
    "rank and round.",
    "group",
)
IN_FLIGHT = gauge(
    "allfold_agent_collectives_in_flight",
    "Collectives that ranks of this node have called and that are not done.",
    "group",
)
OLDEST = gauge(
    "allfold_agent_oldest_collective_seconds",
    "Age of the oldest collective in flight; 0 where none is.",
    "group",
)
EDGE_BYTES = counter(
    "allfold_agent_edge_bytes_total",
    "Bytes of tensors on the edges to and from other nodes, without headers and without what is "
    "sent again; lane is ops, short or pairs (send and receive).",
    "group",
    "direction",
    "lane",
)
ZONE_BYTES = counter(
    "allfold_agent_zone_bytes_total",
    "Bytes of tensors sent to nodes of each zone, on all edges; of groups that are over up to the "
    "last scrape or status.",
    "source_zone",
    "target_zone",
)
LIMIT = gauge(
    "allfold_agent_send_limit_bytes",
    "Caps to which the agent keeps, in bytes per second; scope says what each is on.",
    "scope",
)
RETAINED = gauge(
    "allfold_agent_retained_bytes",
    "Memory of results that are kept until every node has them.",
    "group",
)

RETAIN_LIMIT = gauge(
    "allfold_agent_retained_limit_bytes",
    "What the results of all groups may keep; an op waits where its group has more than its share.",
)
ERRORS = counter(
    "allfold_agent_collective_errors_total",
    "Collectives that have failed for the ranks of this node, by the code of the error.",
    "code",
)
ARENA = gauge(
    "allfold_agent_arena_bytes",
    "Memory that ranks share with the agent: their arenas, in the host's memory.",
)
BUFFERS = gauge(
    "allfold_agent_buffer_bytes",
    "Work buffers of the agent; state is held (by ops, or kept results) or idle.",
    "state",
)
RTT = gauge(
    "allfold_agent_peer_rtt_seconds",
    "Seconds to the answer of the last ping, to each of at most 32 agents that share a group.",
    "peer",
)
RTT_MAXIMUM = gauge(
    "allfold_agent_peer_rtt_maximum_seconds",
    "The longest of the seconds to the answers of the last pings, over all agents.",
)
PEERS = gauge(
    "allfold_agent_peers",
    "Agents that share a group with this one; state is linked or unlinked.",
    "state",
)
RETRANSMITTED = counter(
    "allfold_agent_retransmitted_segments_total",
    "TCP segments sent again on edges; of closed connections up to the last scrape.",
)
LAG = gauge(
    "allfold_agent_event_loop_lag_seconds",
    "By how much a timer was late at most, in the last 15 s; loop is control (this port) or "
    "reactor (ranks and links).",
    "loop",
)
INCIDENTS = gauge(
    "allfold_agent_incidents",
    "Open incidents that this agent has found; a cause that was never found has no series.",
    "cause",
    "effect",
)
INCIDENTS_TOTAL = counter(
    "allfold_agent_incidents_total", "Incidents that this agent has found, by cause.", "cause"
)

CATALOGUE = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))
"""All of the above, in their order."""
