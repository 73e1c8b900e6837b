"""The judgement of a life, from the logs of its ranks alone: pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from chaos.contents import MOST_SEATS
from chaos.records import (
    AGENT_LOST,
    BROKEN,
    CRASHED,
    EVICTED,
    FINISHED,
    HUNG,
    KILLED,
    RankLog,
    Record,
)
from chaos.script import CONTROL, FOLDED, WORLD

WRONG = "wrong value"
DIFFERENT = "different outcomes"
CHANGED = "changed input"
HANG = "hang"
MISSING = "missing op"
ERROR = "error without a reason"
STUCK = "not recovered"
CRASH = "crash"
LEAK = "leak"
FINDINGS = (WRONG, DIFFERENT, CHANGED, HANG, MISSING, ERROR, STUCK, CRASH, LEAK)

RAISE, SHRINK = "raise", "shrink"

_LOSSES = ("PeerLost", "WorldChanged", "RootLost", "BelowMinWorld")
_REDOABLE = ("all_reduce", "barrier", CONTROL)
_MESSAGES = ("send", "recv")
# Kinds whose result is the same on every rank.
_REPLICATED = ("all_reduce", "all_gather", "broadcast", CONTROL)

Key = tuple[int, str, str]


@dataclass(frozen=True)
class Loss:
    """Ranks that a fault took away, for good."""

    at: float
    seats: frozenset[int]


@dataclass(frozen=True)
class Finding:
    """One broken promise."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Life:
    """One group from its opening to its end.

    Attributes:
        name: the group's name.
        logs: of every rank, also of those that died.
        losses: in the order in which they happened.
        hang_seconds: longer than this no op may take.
    """

    name: str
    logs: Sequence[RankLog]
    losses: Sequence[Loss] = ()
    on_loss: str = RAISE
    hang_seconds: float = 60.0
    findings: list[Finding] = field(default_factory=list)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset().union(*(loss.seats for loss in self.losses))

    @property
    def survivors(self) -> list[RankLog]:
        """The ranks to whom everything is promised."""
        gone = (KILLED, EVICTED)
        return [log for log in self.logs if log.seat not in self.lost and log.ending not in gone]


def judge(life: Life) -> list[Finding]:
    """Return every promise that was broken, of survivors alone."""
    found = [*life.findings]
    for log in life.survivors:
        found += of_rank(life, log)
    for key, records in sorted(by_op(life.survivors).items()):
        found += _of_op(life, key, records)
    return found


def by_op(logs: Iterable[RankLog]) -> dict[Key, dict[int, Record]]:
    found: dict[Key, dict[int, Record]] = defaultdict(dict)
    for log in logs:
        for record in log.records:
            found[record.number, record.group, record.kind][log.seat] = record
    return found


def of_rank(life: Life, log: RankLog) -> Iterator[Finding]:
    endings = {HUNG: HANG, CRASHED: CRASH, BROKEN: STUCK, AGENT_LOST: ERROR}
    if log.ending in endings:
        last = log.records[-1] if log.records else None
        told = f"; last: {name(last)}, {last.text or 'ok'}" if last else ""
        yield Finding(endings[log.ending], f"{life.name}, {log}: {log.ending}{told}")
    for record in log.records:
        yield from _of_record(life, log, record)
    for record in _with_falling_epochs(log.records):
        yield Finding(DIFFERENT, f"{life.name}, {log}: epoch falls at {name(record)}")


def _with_falling_epochs(records: Iterable[Record]) -> Iterator[Record]:
    """Yield ops of an epoch below one that the rank knew of when it called them.

    Of ops that are in flight together a later one may have an older epoch: it was done already,
    while an earlier one had to be done again.
    """
    known: dict[str, int] = defaultdict(int)
    in_flight: list[Record] = []
    for record in records:
        if record.epoch is None or record.kind in _MESSAGES:
            continue
        for each in in_flight:
            if each.ended <= record.called:
                known[each.group] = max(known[each.group], each.epoch or 0)
        in_flight = [each for each in in_flight if each.ended > record.called]
        if record.epoch < known[record.group]:
            yield record
        in_flight.append(record)


def _of_record(life: Life, log: RankLog, record: Record) -> Iterator[Finding]:
    where = f"{life.name}, {log}, {name(record)}"
    if record.before != record.after:
        yield Finding(CHANGED, f"{where}: {record.before} became {record.after}")
    if record.ended - record.called > life.hang_seconds or record.code == "PeerMissing":
        took = record.ended - record.called
        yield Finding(HANG, f"{where}: {took:.1f} s; {record.text or 'ok'}")
    elif record.ok:
        yield from _of_value(where, log, record)
    elif not _is_explained(life, record):
        yield Finding(ERROR, f"{where}: {record.code}: {record.text}")


def _of_value(where: str, log: RankLog, record: Record) -> Iterator[Finding]:
    if not record.exact:
        yield Finding(WRONG, f"{where}: elements are wrong (mask {record.mask:b})")
    elif record.kind in FOLDED:
        count = record.mask.bit_count()
        if not record.mask >> log.seat % MOST_SEATS & 1:
            yield Finding(WRONG, f"{where}: lacks the rank's own input (mask {record.mask:b})")
        elif record.participants is not None and record.participants != count:
            told = f"{record.participants} participants, the result has {count}"
            yield Finding(WRONG, f"{where}: {told}")


def _is_explained(life: Life, record: Record) -> bool:
    """Return True if a loss before the op's end lets it fail."""
    if record.code not in _LOSSES or not any(loss.at < record.ended for loss in life.losses):
        return False
    return not (life.on_loss == SHRINK and record.kind in _REDOABLE)


def _of_op(life: Life, key: Key, records: dict[int, Record]) -> Iterator[Finding]:
    number, group, kind = key
    where = f"{life.name}, op {number} ({kind}, {group})"
    missing = [
        log.seat
        for log in life.survivors
        if log.seat not in records and _calls(log.seat, group) and log.ending == FINISHED
    ]
    if missing:
        yield Finding(MISSING, f"{where}: seats {missing} did not call it; {sorted(records)} did")
    if kind in _MESSAGES:
        return
    outcomes = {seat: outcome(record) for seat, record in records.items()}
    if len(set(outcomes.values())) > 1:
        told = ", ".join(f"{seat}: {outcome}" for seat, outcome in sorted(outcomes.items()))
        yield Finding(DIFFERENT, f"{where}: {told}")
    ranks = [record.rank for _, record in sorted(records.items())]
    if ranks != sorted(set(ranks)) or any(each.rank >= each.world for each in records.values()):
        yield Finding(DIFFERENT, f"{where}: seats {sorted(records)} have the ranks {ranks}")


def outcome(record: Record) -> tuple[object, ...]:
    """Return what must be the same on all survivors of an op."""
    if not record.ok:
        return record.code, record.text, record.epoch, record.world
    digest = record.digest if record.kind in _REPLICATED else ""
    return digest, record.mask, record.epoch, record.world, record.participants


def _calls(seat: int, group: str) -> bool:
    return group == WORLD or group == ("even", "odd")[seat % 2]


def name(record: Record) -> str:
    return f"op {record.number} ({record.kind}, {record.group})"
