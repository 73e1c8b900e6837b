"""A group's state as the fields of a Redis hash, and back.

    meta                 the numbers, and the parameters of the formation
    plan:<epoch>         the plan of a completed epoch
    seat:<epoch>:<rank>  who sits there; a seat keeps its field when its formation completes
    left:<epoch>:<rank>  why the rank left

One field per seat, so that a join writes one seat, and :func:`changes` costs no JSON for the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from allfold_core.plan import LinkModel, Plan
from allfold_orchestrator.group_state import (
    Epoch,
    Formation,
    GroupParams,
    GroupState,
    NodeInfo,
    RankSeat,
    Reason,
)

Entry = TypeVar("Entry", RankSeat, Reason)


@dataclass(slots=True)
class Changes:
    """The fields to write and the fields to delete."""

    write: dict[str, str] = field(default_factory=dict)
    delete: list[str] = field(default_factory=list)


def changes(old: GroupState, new: GroupState) -> Changes:
    """What turns the record of ``old`` into that of ``new``."""
    result = Changes(write={"meta": _meta(new)})
    before, after = _tables(old), _tables(new)
    for name in before.keys() - after.keys():
        result.delete.extend(f"{name}:{key}" for key in before[name])
    for name, table in after.items():
        _table_changes(result, name, before.get(name, {}), table)
    known = {epoch.plan.epoch for epoch in old.epochs}
    for epoch in new.epochs:
        if epoch.plan.epoch not in known:
            result.write[f"plan:{epoch.plan.epoch}"] = _dump(epoch.plan.to_dict())
    gone = known - {epoch.plan.epoch for epoch in new.epochs}
    result.delete.extend(f"plan:{number}" for number in gone)
    return result


_Table = Mapping[int, RankSeat] | Mapping[int, Reason]


def _tables(state: GroupState) -> dict[str, _Table]:
    tables: dict[str, _Table] = {}
    if state.forming:
        tables[f"seat:{state.forming.epoch}"] = state.forming.seats
        tables[f"left:{state.forming.epoch}"] = state.forming.departed
    for epoch in state.epochs:
        tables[f"seat:{epoch.plan.epoch}"] = epoch.seats
        tables[f"left:{epoch.plan.epoch}"] = epoch.departed
    return tables


def _table_changes(result: Changes, name: str, before: _Table, after: _Table) -> None:
    if before is after:
        return
    result.delete.extend(f"{name}:{rank}" for rank in before.keys() - after.keys())
    for rank, entry in after.items():
        if before.get(rank) is not entry:  # states share what they have in common
            result.write[f"{name}:{rank}"] = _dump_entry(entry)


def _dump_entry(entry: RankSeat | Reason) -> str:
    return entry.value if isinstance(entry, Reason) else _dump(asdict(entry))


def _meta(state: GroupState) -> str:
    forming = state.forming
    return _dump(
        {
            "last_epoch": state.last_epoch,
            "recalled": state.recalled,
            "current": state.current.plan.epoch if state.current else None,
            "older": [epoch.plan.epoch for epoch in state.older],
            "forming": forming
            and {
                "epoch": forming.epoch,
                "params": asdict(forming.params),
                "links": asdict(forming.links),
            },
        }
    )


def decode(group: str, record: Mapping[str, str]) -> GroupState:
    """The state that a whole record holds."""
    return patch(GroupState(group), Changes(write=dict(record)))


def patch(state: GroupState, made: Changes) -> GroupState:
    """The state after changes to its record; the inverse of :func:`changes`.

    Costs no JSON for what did not change, and shares it with ``state``.
    """
    seats: _Tables[RankSeat] = _Tables({epoch.plan.epoch: epoch.seats for epoch in state.epochs})
    left: _Tables[Reason] = _Tables({epoch.plan.epoch: epoch.departed for epoch in state.epochs})
    if state.forming is not None:
        seats.tables[state.forming.epoch] = state.forming.seats
        left.tables[state.forming.epoch] = state.forming.departed
    plans = {epoch.plan.epoch: epoch.plan for epoch in state.epochs}
    for kind, epoch, rank, _ in _entries(dict.fromkeys(made.delete, "")):
        match kind:
            case "seat":
                seats.edit(epoch).pop(rank, None)
            case "left":
                left.edit(epoch).pop(rank, None)
    for kind, epoch, rank, value in _entries(made.write):
        match kind:
            case "seat":
                seats.edit(epoch)[rank] = _load_seat(value)
            case "left":
                left.edit(epoch)[rank] = Reason(value)
            case "plan":
                plans[epoch] = Plan.from_dict(json.loads(value))
    return _assemble(state.group, json.loads(made.write["meta"]), seats.tables, left.tables, plans)


def _assemble(
    group: str,
    meta: dict[str, Any],
    seats: Mapping[int, Mapping[int, RankSeat]],
    left: Mapping[int, Mapping[int, Reason]],
    plans: Mapping[int, Plan],
) -> GroupState:
    def epoch(number: int) -> Epoch:
        return Epoch(plans[number], seats.get(number, {}), left.get(number, {}))

    return GroupState(
        group=group,
        last_epoch=meta["last_epoch"],
        recalled=meta["recalled"],
        forming=_formation(meta["forming"], seats, left) if meta["forming"] else None,
        current=None if meta["current"] is None else epoch(meta["current"]),
        older=tuple(epoch(number) for number in meta["older"]),
    )


def _formation(
    meta: dict[str, Any],
    seats: Mapping[int, Mapping[int, RankSeat]],
    left: Mapping[int, Mapping[int, Reason]],
) -> Formation:
    epoch = meta["epoch"]
    params, links = GroupParams(**meta["params"]), LinkModel(**meta["links"])
    return Formation(epoch, params, links, seats.get(epoch, {}), left.get(epoch, {}))


class _Tables(Generic[Entry]):
    """Tables by epoch, each copied before it is edited for the first time."""

    def __init__(self, tables: dict[int, Mapping[int, Entry]]) -> None:
        self.tables: dict[int, Mapping[int, Entry]] = tables
        self._copies: dict[int, dict[int, Entry]] = {}

    def edit(self, epoch: int) -> dict[int, Entry]:
        if epoch not in self._copies:
            self._copies[epoch] = dict(self.tables.get(epoch, {}))
            self.tables[epoch] = self._copies[epoch]
        return self._copies[epoch]


def _entries(record: Mapping[str, str]) -> Iterator[tuple[str, int, int, str]]:
    for name, value in record.items():
        table, _, key = name.partition(":")
        if key:
            epoch, _, rank = key.partition(":")
            yield table, int(epoch), int(rank or -1), value


def _load_seat(text: str) -> RankSeat:
    data = json.loads(text)
    return RankSeat(NodeInfo(**data["node"]), data["session"])


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
