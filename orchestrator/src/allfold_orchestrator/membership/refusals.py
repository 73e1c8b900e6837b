"""The errors of ranks that a group refuses. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    MultipleRegister,
    MultipleUnregister,
    RegisterParamsMismatch,
)
from allfold_core.verdict import counted, numbering
from allfold_orchestrator.membership.group_state import (
    GroupParams,
    GroupState,
    Join,
    Leave,
    params_of,
)
from allfold_orchestrator.membership.joining import holders

_NAMED = 8  # so many nodes are listed
_NAMING = "init(group=) or ALLFOLD_GROUP"
_OPENS_NOTHING = (
    ". The group is not open: start min_world ranks or more together to open it; fewer may join it "
    "once it runs"
)


def rank_out_of_range(group: str, join: Join) -> AllfoldError:
    """Return the error of a rank that the group does not have."""
    world_size = join.params.world_size
    return InvalidArgument(
        f"rank {join.rank} cannot be in group {group}: with world_size={world_size} the "
        f"{numbering(world_size)}",
        group=group,
        rank=join.rank,
        world_size=world_size,
    )


def world_out_of_range(group: str, join: Join, field: str, rule: str) -> AllfoldError:
    """Return the error of a rank whose ``min_world`` or ``max_world`` breaks a rule."""
    options, world_size = join.params.options, join.params.world_size
    value = getattr(options, field)
    may_join = options.is_elastic and options.min_world > world_size
    return InvalidArgument(
        f"rank {join.rank} came to group {group} with {field}={value}: {rule}, which is "
        f"{world_size}{_OPENS_NOTHING if may_join else ''}",
        group=group,
        rank=join.rank,
        field=field,
        world_size=world_size,
        **{field: value},
    )


def rank_is_taken(group: str, opening: int, holder: str, join: Join, why: str = "") -> AllfoldError:
    """Return the error of a rank that another process has, on the node ``holder``."""
    return MultipleRegister(
        f"rank {join.rank} of group {group} is registered already, by another process on node "
        f"{holder} (the request came from node {join.seat.node.node}){why}; give every process its "
        f"own rank, another job another group ({_NAMING}), or end the other process first",
        group=group,
        epoch=opening,
        rank=join.rank,
        holder=holder,
        requester=join.seat.node.node,
    )


def group_is_full(state: GroupState, join: Join) -> AllfoldError:
    """Return the error of a rank that comes to a group which runs with all of its ranks."""
    params, opening, seats = *_opening(state), holders(state)
    if params.options.key != join.params.options.key:
        return _wrong_key(state.group, opening, join)
    holder = None if join.rank is None else seats.get(join.rank)
    if holder is None:
        return params_mismatch(state.group, opening, params, join)
    why = f": the group runs, with {counted(len(seats), 'rank')} on {_listed(seats.values())}"
    return rank_is_taken(state.group, opening, holder, join, why)


def _opening(state: GroupState) -> tuple[GroupParams, int]:
    """Return the parameters of a group that runs, and the number of its opening."""
    if state.current is not None:
        return state.current.params, state.current.plan.opening
    assert state.term is not None and state.term.plan is not None, "it runs"
    return params_of(state.term.plan), state.term.opening


def _listed(names: Iterable[str]) -> str:
    nodes = [*dict.fromkeys(names)]
    more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    return f"node{'s' * (len(nodes) != 1)} {', '.join(nodes[:_NAMED])}{more}"


def _wrong_key(group: str, opening: int, join: Join) -> AllfoldError:
    """Return the error of a rank that may not join; it learns nothing else of the group."""
    came = "another one" if join.params.options.key else "none"
    has = "has a key, and the rank came with " + came if join.params.options.key else "needs a key"
    return RegisterParamsMismatch(
        f"a rank on node {join.seat.node.node} may not join group {group}: the group {has}; give "
        "all ranks of a group the same ALLFOLD_GROUP_KEY, and groups of others another name",
        group=group,
        epoch=opening,
        node=join.seat.node.node,
        differing=["key"],
    )


def params_mismatch(group: str, opening: int, params: GroupParams, join: Join) -> AllfoldError:
    """Return the error of a rank that comes with other parameters than the group has."""
    if params.options.key != join.params.options.key:
        return _wrong_key(group, opening, join)
    expected, got = params.to_dict(), join.params.to_dict()
    differing = {
        name: {"expected": expected[name], "got": got[name]}
        for name in expected
        if expected[name] != got[name]
    }
    listed = "; ".join(
        f"{name}: the group has {values['expected']}, rank {join.rank} came with {values['got']}"
        for name, values in differing.items()
    )
    return RegisterParamsMismatch(
        f"rank {join.rank} on node {join.seat.node.node} does not fit group {group}: {listed}; "
        "all ranks of a group must register with the same parameters",
        group=group,
        epoch=opening,
        rank=join.rank,
        node=join.seat.node.node,
        differing={name: {**values} for name, values in differing.items()},
    )


def not_registered(group: str, leave: Leave) -> AllfoldError:
    """Return the error of a process that leaves a group in which it has no rank."""
    return MultipleUnregister(
        f"rank {leave.rank} of group {group} is not registered by this process (any more); "
        "a rank can be unregistered once",
        group=group,
        rank=leave.rank,
    )
