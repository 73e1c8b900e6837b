"""The verdict on an op that cannot go on: one error, the same for every rank.

Pure: the evidence is what each rank of the group called; the outcome is an error that names the
odd ranks and shows both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allfold_core.errors import MismatchError, PeerMissing, PeerRefused
from allfold_core.operations import Fingerprint, Kind

_NAMED = 8


@dataclass(frozen=True)
class OpEvidence:
    """The facts that are known about one op of a group.

    Attributes:
        seq: the op.
        arrivals: the fingerprint of each rank that has called the op.
        last_seq: the last op that each rank did call (-1 for none); from an op on that is over for
            a rank there are no arrivals any more.
        silent: the nodes that did not answer when they were asked.
        held: the ranks that have called the op, but whose GPU has not come to it.
        hindered: what is known of what ranks do instead, a phrase for each.
        links: a sentence on each link between nodes that is slow.
    """

    seq: int
    arrivals: Mapping[int, Fingerprint]
    last_seq: Mapping[int, int]
    silent: tuple[str, ...] = ()
    held: frozenset[int] = frozenset()
    hindered: Mapping[int, str] = field(default_factory=dict)
    links: tuple[str, ...] = ()


LEFT = "left the group"
"""The reason of a rank that leaves by ``shutdown``: a phrase to follow its name."""


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 1, 2``; a long list is cut."""
    shown = ", ".join(str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def counted(number: int, one: str) -> str:
    """``1 rank`` or ``3 ranks``."""
    return f"{number} {one}{'s' * (number != 1)}"


def numbering(world_size: int) -> str:
    """``ranks are 0 to 3``, or ``only rank is 0``: to follow "its"."""
    return f"ranks are 0 to {world_size - 1}" if world_size > 1 else "only rank is 0"


def judge_mismatch(group: str, nodes: Sequence[str], evidence: OpEvidence) -> MismatchError | None:
    """The error where the arrivals disagree, ``None`` where they are all the same.

    The side with most ranks is taken for right; in a tie it is the side of the lowest rank.

    Args:
        group: its name.
        nodes: the node of each rank.
    """
    sides: dict[Fingerprint, list[int]] = defaultdict(list)
    for rank in sorted(evidence.arrivals):
        sides[evidence.arrivals[rank].common].append(rank)
    if len(sides) < 2:
        pair = unmatched_pair(evidence.arrivals)
        return None if pair is None else _mismatch_of_pair(group, nodes, evidence, *pair)
    expected = min(sides, key=lambda side: (-len(sides[side]), sides[side][0]))
    odd = {side: ranks for side, ranks in sides.items() if side != expected}
    more = f"; and {counted(len(odd) - _NAMED, 'other call')}" if len(odd) > _NAMED else ""
    named = "; ".join(
        f"{_name_with_nodes(nodes, ranks)} called {side.describe()}, "
        f"which differs in {', '.join(side.differences(expected))}"
        for side, ranks in list(odd.items())[:_NAMED]
    )
    return MismatchError(
        f"op {evidence.seq} of group '{group}': {named}{more}; "
        f"expected, as {name_ranks(sides[expected])} called it: {expected.describe()}. "
        "No tensor was changed and the group is usable; make the calls of all ranks agree.",
        seq=evidence.seq,
        group=group,
        odd_ranks=sorted(rank for ranks in odd.values() for rank in ranks),
        expected=expected.describe(),
        got={
            str(rank): side.describe()
            for side, ranks in list(odd.items())[:_NAMED]
            for rank in ranks[:_NAMED]
        },
    )


def refused_by(
    group: str, seq: int, rank: int, node: str, reason: str, call: str = "it"
) -> PeerRefused:
    """The error of an op that a rank cannot call, for all the others.

    Args:
        group: its name.
        rank: which one, on this node.
        reason: what its own error says.
        call: what it wanted to call, where that is known.
    """
    return PeerRefused(
        f"op {seq} of group '{group}' cannot be done: rank {rank} (node {node}) could not call "
        f"{call}: {reason.rstrip('.')}. No input was changed and the group is usable; look at the "
        f"arguments of rank {rank}.",
        seq=seq,
        group=group,
        rank=rank,
        node=node,
        reason=reason,
    )


def unmatched_pair(arrivals: Mapping[int, Fingerprint]) -> tuple[int, int] | None:
    """Two ranks of an all-to-all, the first of which sends what the second does not expect."""
    for giver, call in arrivals.items():
        for taker, other in arrivals.items():
            if call.kind is Kind.ALL_TO_ALL and call.sent()[taker] != other.received()[giver]:
                return giver, taker
    return None


def _mismatch_of_pair(
    group: str, nodes: Sequence[str], evidence: OpEvidence, giver: int, taker: int
) -> MismatchError:
    """In an all-to-all each pair has to agree, so no majority can say which of the two is right."""
    gives, takes = evidence.arrivals[giver], evidence.arrivals[taker]
    return MismatchError(
        f"op {evidence.seq} of group '{group}': {_name_with_nodes(nodes, [giver])} sends "
        f"{counted(gives.sent()[taker], 'row')} to {_name_with_nodes(nodes, [taker])}, which "
        f"expects {takes.received()[giver]}: {gives.describe()} against {takes.describe()}. "
        "Nothing was moved and the group is usable; make the sizes of both ranks agree.",
        seq=evidence.seq,
        group=group,
        odd_ranks=sorted({giver, taker}),
        expected=gives.describe(),
        got={str(taker): takes.describe()},
    )


def judge_deadline(
    group: str, nodes: Sequence[str], evidence: OpEvidence, waited: float
) -> PeerMissing:
    """The error for a deadline that has passed, naming who did not come.

    Args:
        group: its name.
        nodes: the node of each rank.
        waited: the timeout, in seconds.
    """
    absent = [
        rank
        for rank in range(len(nodes))
        if rank not in evidence.arrivals
        and (rank in evidence.held or evidence.last_seq.get(rank, -1) < evidence.seq)
    ]
    called = next(iter(evidence.arrivals.values()), None)
    what = f"op {evidence.seq} of group '{group}'" + (f", {called.describe()}," if called else "")
    if absent:
        reason = "; ".join(
            _describe_absent(nodes[rank], evidence, rank) for rank in absent[:_NAMED]
        )
        more = f"; and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
        advice = f"Look at what {name_ranks(absent)} did instead, or give the op more time."
        reason = f"{reason}{more}"
    else:
        reason = "every rank has called it, but the data did not arrive in time"
        if evidence.links:
            reason = f"{reason}: {'; '.join(evidence.links[:_NAMED])}"
        advice = "Look at the links between the nodes, or give the op more time."
    return PeerMissing(
        f"{what} timed out after its timeout of {waited:g} s: {reason}. {advice}",
        seq=evidence.seq,
        group=group,
        missing_ranks=absent,
        silent_nodes=list(evidence.silent),
        timeout=waited,
    )


def _describe_absent(node: str, evidence: OpEvidence, rank: int) -> str:
    if node in evidence.silent:
        return f"rank {rank} on node {node} is unknown, its agent does not answer"
    if rank in evidence.held:
        return f"the GPU of rank {rank} on node {node} is busy with what it was given before"
    last = evidence.last_seq.get(rank, -1)
    before = f"its last op was {last}" if last >= 0 else "it has called no op yet"
    does = f": {evidence.hindered[rank]}" if rank in evidence.hindered else ""
    return f"rank {rank} on node {node} has not called it ({before}){does}"


def _name_with_nodes(nodes: Sequence[str], ranks: Sequence[int]) -> str:
    if len(ranks) > _NAMED:
        return name_ranks(ranks)
    return ", ".join(f"rank {rank} (node {nodes[rank]})" for rank in ranks)
