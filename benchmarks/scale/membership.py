"""The membership of a group alone: no network, no store, one process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.schedules.compiler import compile_program
from allfold_core.schedules.registry import candidates
from allfold_orchestrator.http.plan_bodies import GZIP_LEVEL, encode
from allfold_orchestrator.membership.group_state import (
    GroupParams,
    GroupState,
    Join,
    Leave,
    NodeInfo,
    NodesLost,
    PlanReady,
    RankSeat,
    Reason,
)
from allfold_orchestrator.membership.membership import step
from benchmarks.scale.cluster import GROUP, ImaginaryCluster

T = TypeVar("T")
REPEATS = 3


def measure(cluster: ImaginaryCluster) -> dict[str, Any]:
    """Seconds of each thing that happens to a group, and the size of its plan in bytes."""
    complete, joining = _timed(lambda: _joined(GroupState(GROUP), cluster))
    before_last, planning = _planning(cluster)
    plan = complete.current.plan if complete.current else None
    assert plan is not None and before_last.forming is not None, "the group is complete"
    body, encoding = _best(lambda: encode(plan))
    packed, packing = _best(lambda: gzip.compress(body, GZIP_LEVEL))
    _, reading = _best(lambda: Plan.from_dict(json.loads(gzip.decompress(packed))["plan"]))
    node = cluster.node(0)
    lost = NodesLost({(node["node"], node["incarnation"]): "refused"})
    (broken, _), losing = _best(lambda: step(complete, lost))
    survivors = cluster.without_the_first()
    _, replanning = _planning(survivors, _left(broken, cluster))
    return {
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "join_all_seconds": joining,
        "plan_seconds": planning,
        "encode_seconds": encoding,
        "compress_seconds": packing,
        "plan_bytes": len(body),
        "compressed_bytes": len(packed),
        "read_plan_seconds": reading,
        "node_lost_seconds": losing,
        "replan_seconds": replanning,
        "compile_program_seconds": _compile_times(cluster, plan),
    }


def _joined(state: GroupState, cluster: ImaginaryCluster, leave_out: int = 0) -> GroupState:
    """The state after all ranks but the last few have joined."""
    nodes = [NodeInfo(**cluster.node(index)) for index in range(cluster.nodes)]
    params = GroupParams(cluster.world_size, GroupOptions(30.0))
    for rank in range(cluster.world_size - leave_out):
        seat = RankSeat(nodes[rank // cluster.ranks_per_node], cluster.session(rank))
        state, _ = step(state, Join(rank, seat, params))
    return state


def _left(state: GroupState, cluster: ImaginaryCluster) -> GroupState:
    """The state after all ranks have left, so that the name is free again."""
    for rank in range(cluster.world_size):
        state, _ = step(state, Leave(rank, cluster.session(rank), Reason.FINISHED))
    return state


def _planning(
    cluster: ImaginaryCluster, state: GroupState | None = None
) -> tuple[GroupState, float]:
    """The state before the last join, and the seconds of that join, which makes the plan."""
    rank = cluster.world_size - 1
    before = _joined(state or GroupState(GROUP), cluster, leave_out=1)
    seat = RankSeat(NodeInfo(**cluster.node(cluster.nodes - 1)), cluster.session(rank))
    join = Join(rank, seat, GroupParams(cluster.world_size, GroupOptions(30.0)))
    (_, instructions), seconds = _best(lambda: step(before, join))
    assert isinstance(instructions[-1], PlanReady), instructions
    return before, seconds


def _compile_times(cluster: ImaginaryCluster, plan: Plan) -> dict[str, float]:
    """Seconds in which one agent makes its own program of an all-reduce, by strategy."""
    times = {}
    for strategy in candidates(Kind.ALL_REDUCE):
        compiled = partial(
            compile_program,
            Kind.ALL_REDUCE,
            strategy,
            nodes=cluster.nodes,
            numel=1 << 24,
            node=cluster.nodes // 2,
            tree_order=plan.tree_order,
        )
        _, times[strategy] = _best(compiled)
    return times


def _timed(action: Callable[[], T]) -> tuple[T, float]:
    begun = perf_counter()
    result = action()
    return result, perf_counter() - begun


def _best(action: Callable[[], T]) -> tuple[T, float]:
    """The fastest of a few: what else the machine does only makes it slower."""
    return min((_timed(action) for _ in range(REPEATS)), key=lambda each: each[1])
