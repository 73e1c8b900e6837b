"""The dumps of torch's own flight recorder, made of ours: one file per rank. Pure but for writing.

``torchfrtrace`` matches them across ranks. It cannot know that a ring of records is a sample, so an
op goes into the dumps only where it is known of every rank that it has called it, or has not.
"""

from __future__ import annotations

# torch's analyser reads no other format. What is written is plain data of our own, and Allfold
# reads no pickle, ever.
import pickle  # noqa: TID251
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from allfold.cli._trace.asking import NodeFlight, Opening, SeenOp, ops_of_group
from allfold_core.agent_answers import Json, RecordedCall, RecordingAnswer
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.schedules.parts import input_numel, output_numel

# Of torch's format; the analyser compares it between ranks, and reads entries by it.
VERSION = "2.10"
PREFIX = "rank_"
# An op that is younger may just be under way: no rank is said not to have called it.
_SETTLED_SECONDS = 1.0

Sizes = list[list[int]]

# torch's analyser knows no backend of other people; Gloo is the one that moves tensors as we do.
_BACKEND = "gloo"
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_UNEQUAL = {"all_gather": "all_gather_v", "reduce_scatter": "reduce_scatter_v"}
_KINDS = {kind.label: kind for kind in Kind}
_REDUCE_OPS = {op.label: op for op in ReduceOp}


@dataclass(frozen=True, slots=True)
class GroupDump:
    """The dumps of one group: of its newest opening, in the newest epoch that has ops.

    Attributes:
        world_size: of that epoch.
        ranks: the dump of each rank whose node has answered.
        left_out: how many ops are not there, because too little is known of them.
    """

    group: str
    world_size: int
    ranks: Mapping[int, Json]
    left_out: int

    @property
    def without_dump(self) -> list[int]:
        """The ranks whose node has not answered."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]


@dataclass(frozen=True, slots=True)
class _NodeView:
    """One node's records of a group in one epoch.

    Attributes:
        last_seq: the last op that each of its ranks has called; empty where that is not known.
    """

    answered: float
    ranks: frozenset[int]
    last_seq: Mapping[int, int]
    ops: Mapping[int, SeenOp]

    def has_called(self, rank: int, seq: int, began: float) -> bool | None:
        """Return if a rank of the node has called an op; ``None`` where that is not known.

        Args:
            began: when the first rank of any node called it.
        """
        op = self.ops.get(seq)
        if op is not None and rank in op.arrivals:
            return True
        if op is not None and op.is_over:
            return False
        if self.last_seq.get(rank, seq) >= seq:
            return None
        return False if self.answered - began >= _SETTLED_SECONDS else None


def group_dumps(flights: Iterable[NodeFlight], our_wall: float) -> list[GroupDump]:
    """Return the dumps of all groups, by name."""
    by_opening: dict[Opening, list[tuple[NodeFlight, RecordingAnswer]]] = {}
    for flight in flights:
        for group in flight.groups:
            if group["ops"]:
                opening = (group["name"], group["opening"])
                by_opening.setdefault(opening, []).append((flight, group))
    newest = dict(sorted(by_opening))
    return [_dump(name, by_opening[name, each], our_wall) for name, each in newest.items()]


def write(dumps: Iterable[GroupDump], folder: Path) -> list[Path]:
    """Write the dumps of each group into a folder of its own; return these folders."""
    written = []
    for dump in dumps:
        place = folder / _folder_name(dump.group)
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob(f"{PREFIX}*"):
            if old.name.removeprefix(PREFIX).isdecimal():
                old.unlink()
        for rank, content in dump.ranks.items():
            with (place / f"{PREFIX}{rank}").open("wb") as file:
                pickle.dump(content, file)
        written.append(place)
    return written


def _folder_name(group: str) -> str:
    """Return the name of a group's folder: never a way out, though a group may be called ``..``."""
    name = Path(group).name
    return name if name.strip(".") else f"_{name}"


def _dump(name: str, views: list[tuple[NodeFlight, RecordingAnswer]], our_wall: float) -> GroupDump:
    epoch = max(op["epoch"] for _, group in views for op in group["ops"])
    nodes = [_view(flight, group, epoch) for flight, group in views]
    world_size = max(op.record["world_size"] for node in nodes for op in node.ops.values())
    seqs = sorted({seq for node in nodes for seq in node.ops})
    known = [seq for seq in seqs if _is_known(nodes, seq)]
    dumps = {
        rank: _rank_dump(name, rank, world_size, list(_entries(name, rank, nodes, known, our_wall)))
        for node in nodes
        for rank in node.ranks
    }
    return GroupDump(name, world_size, dict(sorted(dumps.items())), len(seqs) - len(known))


def _view(flight: NodeFlight, group: RecordingAnswer, epoch: int) -> _NodeView:
    ops = {op.seq: op for op in ops_of_group(flight, group) if op.record["epoch"] == epoch}
    is_current = group["open"] and group["epoch"] == epoch
    last_seq = {int(rank): last for rank, last in group["last_seq"].items()} if is_current else {}
    called = {rank for op in ops.values() for rank in (*op.arrivals, *op.missing)}
    return _NodeView(flight.answered, frozenset(called | last_seq.keys()), last_seq, ops)


def _first_call(nodes: Iterable[_NodeView], seq: int) -> float:
    return min(node.ops[seq].start for node in nodes if seq in node.ops)


def _is_known(nodes: list[_NodeView], seq: int) -> bool:
    began = _first_call(nodes, seq)
    return all(
        node.has_called(rank, seq, began) is not None for node in nodes for rank in node.ranks
    )


def _entries(
    group: str, rank: int, nodes: list[_NodeView], seqs: Iterable[int], our_wall: float
) -> Iterator[Json]:
    """Yield the entries of a rank. The number of a record is that of its op among those known."""
    (own,) = (node for node in nodes if rank in node.ranks)
    for number, seq in enumerate(seqs):
        op = own.ops.get(seq)
        if op is not None and rank in op.arrivals:
            state = _state([node.ops[seq] for node in nodes if seq in node.ops])
            yield _entry(group, rank, op, number, state, our_wall)


def _state(views: Iterable[SeenOp]) -> str:
    """Return the state of an op on all nodes, as an op has one outcome: it fails on all alike."""
    states = {view.record["state"] for view in views}
    if "completed" in states:
        return "completed"
    return "started" if "started" in states else "scheduled"


def _entry(group: str, rank: int, op: SeenOp, number: int, state: str, our_wall: float) -> Json:
    record = op.record
    call = record["other_calls"].get(str(rank), record)
    inputs, outputs = sizes_of(call, rank, record["world_size"])
    began, called = op.phase("began"), op.arrivals[rank]
    done = op.end if state == "completed" and op.is_over else None
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (group, "allfold"),
        "collective_seq_id": op.seq,
        "p2p_seq_id": 0,
        "op_id": op.seq,
        "is_p2p": False,
        "profiling_name": profiling_name(call),
        "input_sizes": inputs,
        "input_dtypes": [torch_dtype(call)],
        "output_sizes": outputs,
        "output_dtypes": [torch_dtype(call)],
        "state": state,
        "time_created_ns": _nanoseconds(called, our_wall),
        "time_discovered_started_ns": _nanoseconds(began, our_wall),
        "time_discovered_completed_ns": _nanoseconds(done, our_wall),
        "duration_ms": None if done is None else (done - called) * 1e3,
        "retired": op.is_over,
        "frames": [],
    }


def _nanoseconds(at: float | None, our_wall: float) -> int | None:
    return None if at is None else round((our_wall + at) * 1e9)


def _rank_dump(group: str, rank: int, world_size: int, entries: list[Json]) -> Json:
    def last(*states: str) -> int:
        return max((e["collective_seq_id"] for e in entries if e["state"] in states), default=-1)

    return {
        "version": VERSION,
        "entries": entries,
        "pg_config": {
            group: {"name": group, "desc": "allfold", "ranks": str(list(range(world_size)))}
        },
        "pg_status": {
            group: {
                "last_enqueued_collective": last("scheduled", "started", "completed"),
                "last_started_collective": last("started", "completed"),
                "last_completed_collective": last("completed"),
            }
        },
        "rank": rank,
    }


def profiling_name(call: RecordedCall) -> str:
    """Return the name of a call: ``gloo:all_reduce``."""
    kind = call["kind"]
    return f"{_BACKEND}:{_UNEQUAL.get(kind, kind) if call['counts'] else kind}"


def torch_dtype(call: RecordedCall) -> str:
    """Return the name that torch's recorder has for the type of the elements."""
    return _DTYPES.get(call["dtype"], call["dtype"])


def sizes_of(call: RecordedCall, rank: int, world_size: int) -> tuple[Sizes, Sizes]:
    """Return the sizes of a rank's inputs and outputs; ``[[]]`` where it has none.

    With unequal blocks the analyser would take sizes that differ between ranks for a mismatch, so
    these are the blocks of all ranks, on which all have to agree.
    """
    kind, shape = _KINDS[call["kind"]], call["shape"]
    if kind is Kind.BARRIER:
        return [[]], [[]]
    if not kind.has_blocks:
        return [shape], [shape]
    if call["counts"] and kind is not Kind.ALL_TO_ALL:
        blocks = [[count, *shape] for count in call["counts"]]
        return blocks, blocks
    asked = Fingerprint(
        kind,
        _REDUCE_OPS.get(call["reduce_op"] or ""),
        DType.UINT8,  # whatever it is, the sizes are in the caller's elements
        tuple(shape),
        call["root"],
        AUTO,
        counts=tuple(call["counts"]),
    )
    brings, gets = (numel(asked, rank, world_size) for numel in (input_numel, output_numel))
    return [[brings] if brings else []], [[gets] if gets else []]
