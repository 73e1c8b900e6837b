"""The names of everything that the orchestrator keeps in Redis."""

from __future__ import annotations

PREFIX = "allfold:"

# Channel: names of groups whose waiters should look again, lives to be probed or drained, LIMITS.
CHANGES = f"{PREFIX}changes"
# String, JSON: the generation of the store, and the server's name for its present life.
STORE = f"{PREFIX}store"
# String, for a moment: the replica that decides whose life is over.
DETECTOR = f"{PREFIX}detector"
# Set: groups with a record.
GROUPS = f"{PREFIX}groups"
# Sorted set, life -> expiry: the nodes that are alive.
LEASES = f"{PREFIX}leases"
# String: "1", written by each sweep, which shows that the store takes writes.
SWEPT = f"{PREFIX}swept"
# Sorted set, life -> time: lives that are over, whose seats are not all freed yet.
EVICTIONS = f"{PREFIX}evictions"
# Sorted set, node -> time: nodes that are gone, kept for people to see.
DEPARTED = f"{PREFIX}departed"
# Sorted set, group -> time: groups with a record in which nobody sits.
IDLE = f"{PREFIX}idle"
# Sorted set, group -> time: idle groups with a tombstone.
TOMBSTONES = f"{PREFIX}tombstones"
# Hash, incident -> JSON: what agents have reported last, and when it was heard.
INCIDENTS = f"{PREFIX}incidents"
# Sorted set, incident -> when it was found.
INCIDENT_TIMES = f"{PREFIX}incident_times"

# Hash, what it is on -> JSON: the caps on what agents send. On the channel: they have changed.
LIMITS = f"{PREFIX}limits"
# Hash, name of tokens -> JSON: what those may have open who have one of them.
TOKEN_LIMITS = f"{PREFIX}token_limits"
# Hash, group -> JSON: what each open group takes of the limit of its token's name.
SHARES = f"{PREFIX}shares"


def group(name: str) -> str:
    """Hash: the record of a group, see :mod:`allfold_orchestrator.store.codec`."""
    return f"{PREFIX}group:{name}"


def log(group_name: str) -> str:
    """List: the last changes of a group's record, the newest first."""
    return f"{PREFIX}log:{group_name}"


def tombstone(group_name: str) -> str:
    """String, JSON: the last openings; outlives the record, so that no opening is used twice."""
    return f"{PREFIX}tombstone:{group_name}"


def node(name: str) -> str:
    """String: the JSON record of a node."""
    return f"{PREFIX}node:{name}"


def progress(name: str) -> str:
    """String: what the node last said about its ops, as JSON."""
    return f"{PREFIX}progress:{name}"


def life(node_name: str, incarnation: str) -> str:
    """A node in one incarnation, as a member of a set. Names cannot hold a slash."""
    return f"{node_name}/{incarnation}"


def drain(node_life: str) -> str:
    """The request that a life of a node drains."""
    return f"{node_life}/drain"


def is_drain(text: str) -> bool:
    """Return True for the request that a node drains."""
    return text.count("/") == 2


def is_life(text: str) -> bool:
    """Return True for a life of a node, also with what is asked of it; False for a group's name."""
    return "/" in text


def parse_life(text: str) -> tuple[str, str]:
    """The inverse of :func:`life`, and of :func:`drain`."""
    node_name, incarnation, *_ = text.split("/")
    return node_name, incarnation


def groups_of(node_life: str) -> str:
    """Set: the groups in which this life of a node has a seat or a vote, or had one lately."""
    return f"{PREFIX}seats:{node_life}"
