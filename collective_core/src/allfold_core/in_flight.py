"""The ops in flight and what they wait for, from the agents' status. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allfold_core.agent_answers import GroupStatus, OpStatus, Status
from allfold_core.incident import Incident, merged

_SHOWN_RANKS = 8

Json = dict[str, Any]


@dataclass(frozen=True)
class MissingRank:
    """A rank that has not called the op."""

    rank: int
    node: str


@dataclass(frozen=True)
class OpInFlight:
    """One op, seen over all nodes.

    Attributes:
        epoch: how often its ranks had changed before; ranks are numbered as in that epoch.
        what: the call, e.g. ``all_reduce(sum, float32[1024])``.
        age: seconds since the first arrival that any node saw.
        missing: the ranks that have not called it.
        silent_nodes: nodes from which others await data, or that do not answer us.
    """

    group: str
    epoch: int
    seq: int
    what: str
    strategy: str
    age: float
    missing: tuple[MissingRank, ...]
    silent_nodes: tuple[str, ...]

    def sentence(self) -> str:
        """``op 7 of group 'dp', barrier(), waits for rank 3 on node b, for 1.2 s``.

        Up to the culprit this is what an incident says.
        """
        op = f"op {self.seq} of group '{self.group}', {self.what}"
        return f"{op}, {self._waits()}, for {self.age:.1f} s"

    def to_dict(self) -> Json:
        return {**asdict(self), "sentence": self.sentence()}

    def _waits(self) -> str:
        if self.missing:
            return f"waits for {_places(self.missing)}"
        if self.silent_nodes:
            nodes = "nodes" if len(self.silent_nodes) > 1 else "node"
            return f"waits for data from {nodes} {', '.join(self.silent_nodes)}"
        return "is being worked on"


@dataclass(frozen=True)
class MessageInFlight:
    """A send or receive that waits for its other side.

    Attributes:
        what: the call, e.g. ``recv(float32[12], from rank 1, tag 0)``.
        age: seconds since the call.
    """

    group: str
    rank: int
    node: str
    what: str
    age: float

    def sentence(self) -> str:
        """``rank 3 of group 'dp' on node b waits in send(...), for 1.2 s``."""
        place = f"rank {self.rank} of group '{self.group}' on node {self.node}"
        return f"{place} waits in {self.what}, for {self.age:.1f} s"

    def to_dict(self) -> Json:
        return {**asdict(self), "sentence": self.sentence()}


def messages_in_flight(statuses: Iterable[Status]) -> list[MessageInFlight]:
    """The sends and receives that wait, oldest first."""
    messages = [
        MessageInFlight(
            group["name"], message["rank"], status["node"], message["what"], message["age"]
        )
        for status in statuses
        for group in status["groups"]
        for message in group["messages"]
    ]
    return sorted(messages, key=lambda message: -message.age)


def ops_in_flight(statuses: Iterable[Status]) -> list[OpInFlight]:
    """The ops in flight of every group, oldest first.

    Args:
        statuses: the agents' answers to ``GET /v1/status``.
    """
    ops: list[OpInFlight] = []
    for nodes in _by_opening(statuses).values():
        flights = [op for group in nodes.values() for op in group["in_flight"]]
        seqs = sorted({op["seq"] for op in flights})
        ops += (_merged(nodes, [op for op in flights if op["seq"] == seq]) for seq in seqs)
    return sorted(ops, key=lambda op: -op.age)


def kept_results(statuses: Iterable[Status]) -> list[str]:
    """Results kept for others: ``node a keeps 12.0 MiB of results of group 'dp', until ...``."""
    return [
        f"node {status['node']} keeps {_size(nbytes)} of results of group '{group['name']}', "
        "until every node has them"
        for status in statuses
        for group in status["groups"]
        if (nbytes := group.get("retained_bytes"))
    ]


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count / 1024:.1f} KiB"


@dataclass(frozen=True)
class GroupMembers:
    """The members of a running group, as reported by the agent with the newest term and epoch.

    Attributes:
        opening: distinguishes the group from earlier groups of the same name.
        epoch: how often its ranks have changed.
        term: the number of the term, that is, of the current set of nodes.
        losses: the reason for each epoch after the first, or why the group no longer works; newest
            last.
        links: lines about slow links, and what was done about them.
        lanes: lines about its short lane.
    """

    group: str
    opening: int
    epoch: int
    term: int
    losses: tuple[str, ...]
    links: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()


def memberships(statuses: Iterable[Status]) -> list[GroupMembers]:
    """The groups that the agents are in, by name."""
    found = []
    for (name, opening), nodes in sorted(_by_opening(statuses).items()):
        newest = max(nodes.values(), key=lambda group: (group["term"], group["epoch"]))
        evicted = {group["evicted"]: None for group in nodes.values() if group["evicted"]}
        losses = (*newest["losses"], *evicted)
        links = tuple(_about_links(name, newest, nodes.values()))
        lanes = tuple(_about_lanes(name, nodes))
        found.append(
            GroupMembers(name, opening, newest["epoch"], newest["term"], losses, links, lanes)
        )
    return found


@dataclass(frozen=True)
class Activity:
    """Everything that goes on in all groups, from the answers of the agents.

    Attributes:
        memberships: the groups, by name.
        ops: the collectives in flight, oldest first.
        messages: the sends and receives that wait, oldest first.
        incidents: what is wrong in groups; open ones first.
    """

    memberships: Sequence[GroupMembers] = ()
    ops: Sequence[OpInFlight] = ()
    messages: Sequence[MessageInFlight] = ()
    incidents: Sequence[Incident] = ()

    def to_dict(self) -> Json:
        """Return the JSON form of what is in flight and wrong."""
        return {
            "ops_in_flight": [op.to_dict() for op in self.ops],
            "messages_in_flight": [message.to_dict() for message in self.messages],
            "incidents": [each.to_dict() for each in self.incidents],
        }


def activity(statuses: Sequence[Status], incidents: Iterable[Json]) -> Activity:
    """Return what goes on.

    Args:
        incidents: those that the orchestrator keeps; those of the agents are added.
    """
    told = [*incidents, *(each for status in statuses for each in status.get("incidents", ()))]
    return Activity(
        memberships(statuses), ops_in_flight(statuses), messages_in_flight(statuses), merged(told)
    )


def _about_lanes(name: str, nodes: Mapping[str, GroupStatus]) -> Iterable[str]:
    """Yield a line for each state of a group's short lane, with the nodes that report it.

    Agents of earlier versions do not report any.
    """
    states: dict[str, list[str]] = {}
    for node, group in sorted(nodes.items()):
        states.setdefault(group.get("short_lane", ""), []).append(node)
    states.pop("", None)
    for state, where in states.items():
        place = f" on node {', '.join(where)}" if len(states) > 1 else ""
        yield f"group {name!r}: short lane: {state}{place}"


def _about_links(name: str, newest: GroupStatus, nodes: Iterable[GroupStatus]) -> Iterable[str]:
    """Yield a line about the changed order of the nodes, or else about slow links.

    Agents of earlier versions do not report this.
    """
    if layout := newest.get("layout"):
        yield f"group {name!r} epoch {newest['epoch']}: {layout}"
        return
    for slow in sorted({node.get("slow_links", "") for node in nodes} - {""}):
        yield f"group {name!r} epoch {newest['epoch']}: {slow}"


def _by_opening(statuses: Iterable[Status]) -> dict[tuple[str, int], dict[str, GroupStatus]]:
    """(group, opening) -> node -> what the node says of the group."""
    found: dict[tuple[str, int], dict[str, GroupStatus]] = {}
    for status in statuses:
        for group in status["groups"]:
            found.setdefault((group["name"], group["opening"]), {})[status["node"]] = group
    return found


def _merged(every: Mapping[str, GroupStatus], views: Sequence[OpStatus]) -> OpInFlight:
    """Merge the nodes' reports of an op; ranks have their numbers of the newest reported epoch."""
    seq, epoch = views[0]["seq"], max(group["epoch"] for group in every.values())
    nodes = {node: group for node, group in every.items() if group["epoch"] == epoch}
    name = next(iter(nodes.values()))["name"]
    missing = sorted(_missing(nodes, seq), key=lambda each: each.rank)
    awaited = {node for view in views for node in view["waiting_for_nodes"]}
    unheard = {node for group in nodes.values() for node in group["nodes"]} - every.keys()
    return OpInFlight(
        group=name,
        epoch=epoch,
        seq=seq,
        what=views[0]["what"],
        strategy=views[0]["strategy"],
        age=max(view["age"] for view in views),
        missing=tuple(missing),
        silent_nodes=tuple(sorted(unheard or awaited)),
    )


def _missing(nodes: Mapping[str, GroupStatus], seq: int) -> Iterator[MissingRank]:
    """Ranks that have not come so far. A node where none has come does not know of the op."""
    for node, group in nodes.items():
        for rank, last in group["last_seq"].items():
            if last < seq:
                yield MissingRank(int(rank), node)


def _places(missing: Sequence[MissingRank]) -> str:
    """``rank 3 on node b and ranks 5, 6 on node c``."""
    by_node: dict[str, list[int]] = {}
    for each in missing[:_SHOWN_RANKS]:
        by_node.setdefault(each.node, []).append(each.rank)
    parts = [f"{ranks_in_words(ranks)} on node {node}" for node, ranks in by_node.items()]
    if len(missing) > _SHOWN_RANKS:
        parts.append(f"{len(missing) - _SHOWN_RANKS} more")
    return " and ".join(parts)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 5, 6``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
