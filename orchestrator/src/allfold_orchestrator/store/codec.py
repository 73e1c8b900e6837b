"""A group's state as the fields of a Redis hash, and back.

    meta                   the numbers, and the parameters of the formation
    plan:<opening>         the plan of a completed opening
    seat:<opening>:<rank>  the holder of a seat; it keeps its field when the formation completes
    left:<opening>:<rank>  the reason for which a rank left
    term                   the nodes that decide together

One field per seat, so that a join writes one seat, and :func:`changes` costs no JSON for the rest.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from allfold_control.records import read_record, record_fields
from allfold_core.plan import Plan
from allfold_core.schema import UnknownSchema
from allfold_orchestrator.membership.group_state import (
    Formation,
    GroupParams,
    GroupState,
    LinkSettings,
    NodeInfo,
    Opening,
    RankSeat,
    Reason,
)
from allfold_orchestrator.membership.rank_map import RankMap
from allfold_orchestrator.store import schemas

Entry = TypeVar("Entry", RankSeat, Reason)


@dataclass(slots=True)
class Changes:
    """The fields to write and the fields to delete."""

    write: dict[str, str] = field(default_factory=dict)
    delete: list[str] = field(default_factory=list)


def changes(old: GroupState, new: GroupState) -> Changes:
    """Return the changes that turn the record of ``old`` into that of ``new``."""
    result = Changes(write={"meta": _meta(new)})
    before, after = _tables(old), _tables(new)
    for name in before.keys() - after.keys():
        result.delete.extend(f"{name}:{key}" for key in before[name])
    for name, table in after.items():
        _table_changes(result, name, before.get(name, _NONE), table)
    known, current = old.current and old.current.plan.opening, new.current
    number = current and current.plan.opening
    if current is not None and number != known:
        result.write[f"plan:{number}"] = _dump(current.plan.to_dict())
    if known not in (None, number):
        result.delete.append(f"plan:{known}")
    if new.term != old.term:
        if new.term is None:
            result.delete.append("term")
        else:
            result.write["term"] = _dump(record_fields(new.term))
    return result


_Table = RankMap[RankSeat] | RankMap[Reason]
_NONE: RankMap[Any] = RankMap()


def _tables(state: GroupState) -> dict[str, _Table]:
    tables: dict[str, _Table] = {}
    if state.forming:
        tables[f"seat:{state.forming.opening}"] = state.forming.seats
        tables[f"left:{state.forming.opening}"] = state.forming.departed
    if state.current:
        tables[f"seat:{state.current.plan.opening}"] = state.current.seats
        tables[f"left:{state.current.plan.opening}"] = state.current.departed
    return tables


def _table_changes(
    result: Changes, name: str, before: RankMap[Entry], after: RankMap[Entry]
) -> None:
    for rank in after.changed_since(before):
        entry = after.get(rank)
        if entry is None:
            result.delete.append(f"{name}:{rank}")
        else:
            result.write[f"{name}:{rank}"] = _dump_entry(entry)


def _dump_entry(entry: RankSeat | Reason) -> str:
    if isinstance(entry, Reason):
        return entry.value
    # A group has a seat for each rank: a general dataclass-to-dict costs ten times as much.
    return _dump({"node": entry.node.to_dict(), "session": entry.session})


def _meta(state: GroupState) -> str:
    forming = state.forming
    return schemas.dump(
        schemas.GROUP,
        {
            "last_epoch": state.last_opening,
            "recalled": state.recalled,
            "current": state.current.plan.opening if state.current else None,
            "token": state.token,
            "forming": forming
            and {
                "epoch": forming.opening,
                "params": forming.params.to_dict(),
                "links": asdict(forming.links),
                "generation": forming.generation,
                "refused": forming.refused,
            },
        },
    )


def decode(group: str, record: Mapping[str, str]) -> GroupState:
    """Return the state in a whole record."""
    return patch(GroupState(group), Changes(write=dict(record)))


def patch(state: GroupState, made: Changes) -> GroupState:
    """Return the state after changes to its record; the inverse of :func:`changes`.

    Costs no JSON for what did not change, and shares it with ``state``.

    Raises:
        UnknownSchema: the changes were written by another version.
        KeyError, TypeError, ValueError: they are damaged.
    """
    meta = schemas.load(schemas.GROUP, made.write["meta"])
    seats: dict[int, RankMap[RankSeat]] = {}
    left: dict[int, RankMap[Reason]] = {}
    plans: dict[int, Plan] = {}
    if state.forming is not None:
        seats[state.forming.opening] = state.forming.seats
        left[state.forming.opening] = state.forming.departed
    if state.current is not None:
        number = state.current.plan.opening
        seats[number], left[number] = state.current.seats, state.current.departed
        plans[number] = state.current.plan
    new_seats: _ByOpening[RankSeat] = defaultdict(dict)
    new_left: _ByOpening[Reason] = defaultdict(dict)
    for table, opening, rank, value in _entries(made.write):
        match table:
            case "seat":
                new_seats[opening][rank] = _load_seat(value)
            case "left":
                new_left[opening][rank] = Reason(value)
            case "plan":
                plans[opening] = Plan.from_dict(json.loads(value))
    gone: dict[str, dict[int, list[int]]] = {"seat": defaultdict(list), "left": defaultdict(list)}
    for table, opening, rank, _ in _entries(dict.fromkeys(made.delete, "")):
        if table in gone:
            gone[table][opening].append(rank)
    _edit(seats, new_seats, gone["seat"])
    _edit(left, new_left, gone["left"])
    term = None if "term" in made.delete else state.term
    if "term" in made.write:
        term = read_record(json.loads(made.write["term"]))
    return replace(_assemble(state.group, meta, seats, left, plans), term=term)


_ByOpening = dict[int, dict[int, Entry]]


def _edit(
    tables: dict[int, RankMap[Entry]], new: _ByOpening[Entry], gone: Mapping[int, list[int]]
) -> None:
    for opening in new.keys() | gone.keys():
        table = tables.get(opening, _NONE)
        tables[opening] = table.without(gone.get(opening, ())).updated(new.get(opening, {}))


def _assemble(
    group: str,
    meta: dict[str, Any],
    seats: Mapping[int, RankMap[RankSeat]],
    left: Mapping[int, RankMap[Reason]],
    plans: Mapping[int, Plan],
) -> GroupState:
    def opening(number: int) -> Opening:
        return Opening(plans[number], seats.get(number, _NONE), left.get(number, _NONE))

    return GroupState(
        group=group,
        last_opening=meta["last_epoch"],
        recalled=meta["recalled"],
        forming=_formation(meta["forming"], seats, left) if meta["forming"] else None,
        current=None if meta["current"] is None else opening(meta["current"]),
        token=meta.get("token", ""),
    )


def _formation(
    meta: dict[str, Any],
    seats: Mapping[int, RankMap[RankSeat]],
    left: Mapping[int, RankMap[Reason]],
) -> Formation:
    opening = meta["epoch"]
    params, links = _params(meta["params"]), LinkSettings(**meta["links"])
    tables = seats.get(opening, _NONE), left.get(opening, _NONE)
    more = {name: meta[name] for name in ("generation", "refused") if name in meta}
    return Formation(opening, params, links, *tables, **more)


def _params(data: dict[str, Any]) -> GroupParams:
    """Return the parameters of a formation; ``UnknownSchema`` where it has others than are known.

    Ranks that join here would be held to none of those, and the next write would drop them.
    """
    params = GroupParams.from_dict(data)
    known = params.to_dict().keys()
    if unknown := sorted(data.keys() - known):
        raise UnknownSchema(
            f"its ranks agree on {', '.join(unknown)}, of which this version of the orchestrator "
            f"knows nothing: it expected only {', '.join(known)}"
        )
    return params


def _entries(record: Mapping[str, str]) -> Iterator[tuple[str, int, int, str]]:
    for name, value in record.items():
        table, _, key = name.partition(":")
        if key:
            opening, _, rank = key.partition(":")
            yield table, int(opening), int(rank or -1), value


def _load_seat(text: str) -> RankSeat:
    data = json.loads(text)
    return RankSeat(NodeInfo(**data["node"]), data["session"])


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
