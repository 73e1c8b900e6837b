"""Lives of groups on one fleet, one after the other, under a schedule of faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

from allfold_cluster.http import NoAnswer
from allfold_cluster.processes import wait_for, wait_until
from allfold_core.errors import AllfoldError
from chaos.churn import Churn, Terms
from chaos.churn_judge import judge_churn
from chaos.faults import SILENCES_A_NODE, Kind, leaves_enough, schedule
from chaos.fleet import Fleet, NewCluster, checked_cluster, fleet
from chaos.injector import Injector
from chaos.judge import FINDINGS, HANG, RAISE, SHRINK, Finding, Life, Loss, judge
from chaos.leaks import Held, settled_leaks
from chaos.report import Tally
from chaos.service_logs import exceptions

# A life that loses nobody ends after this, so that the logs stay short.
_LIFE_SECONDS = 60.0
_CHURN_SECONDS = 30.0
_WARM_UP_SECONDS = 1.0
_END_SECONDS = 30.0
_CLOSE_SECONDS = 10.0
_TOLD = 8
_WAYS = [(joins, on_loss) for on_loss in (SHRINK, RAISE) for joins in ("any", "commit")]


@dataclass(frozen=True)
class Plan:
    """The settings of a run.

    Attributes:
        seconds: the approximate length of the run.
        timeout: of every op. While nodes wait for the orchestrator, its deadline is suspended for
            at most as long again; an op that takes longer than both together hangs.
        churn: True for elastic groups alone, False for others alone, None for one after the other.
        joins: where ranks come into elastic groups; by default each way in turn.
        logs: a folder for the logs of all processes; by default they are removed.
    """

    seconds: float
    seed: int
    nodes: int
    ranks: int
    kinds: Sequence[Kind]
    on_loss: str = RAISE
    timeout: float = 20.0
    churn: bool | None = False
    joins: str | None = None
    logs: Path | None = None


def run(
    plan: Plan, tell: Callable[[str], None], new_cluster: NewCluster = checked_cluster
) -> Tally:
    """Play, and judge every life; ``tell`` gets a line for each, and each broken promise."""
    tally = Tally()
    with fleet(plan.nodes, plan.ranks, logs=plan.logs, new_cluster=new_cluster) as found:
        _live(plan, found, 0, _WARM_UP_SECONDS, (), tally, tell)
        before = {node: _held(found, node) for node in found.nodes}
        until, number = monotonic() + plan.seconds, 0
        while (left := until - monotonic()) > 0:
            number += 1
            if plan.churn or (plan.churn is None and number % 2 == 0):
                _churn(plan, found, number, min(left, _CHURN_SECONDS), tally, tell)
                continue
            _live(plan, found, number, min(left, _LIFE_SECONDS), plan.kinds, tally, tell)
        found.start_agents()
        last = [
            each
            for node in found.nodes
            for each in settled_leaks(node, before[node], partial(_held, found, node))
        ]
        for finding in (*last, *exceptions(found.cluster.folder)):
            tell(str(finding))
            tally.findings.append(finding)
        tell(_through_the_proxy(found))
    return tally


def _live(
    plan: Plan,
    found: Fleet,
    number: int,
    seconds: float,
    kinds: Sequence[Kind],
    tally: Tally,
    tell: Callable[[str], None],
) -> None:
    """One group from its opening to its end, and its judgement."""
    seed, name = plan.seed * 1000 + number, f"life{number}"
    found.start_agents()
    found.start_ranks(name, seed, plan.timeout, plan.on_loss)
    injector = Injector(found)
    _play(found, injector, seed, seconds, kinds)
    injector.end_all()
    found.stop_file.touch()
    losses = [done.loss for done in injector.done if done.loss is not None]
    lost = frozenset[int]().union(*(loss.seats for loss in losses))
    logs = found.await_end(lost, 2 * plan.timeout + _END_SECONDS)
    life = Life(name, logs, losses, plan.on_loss, 2 * plan.timeout + 1.0)
    findings = judge(life)
    tally.add(life, injector.done, findings)
    counts = [len(log.records) for log in life.survivors]
    tell(f"# {name}: {len(injector.done)} faults, {min(counts, default=0)} ops per survivor")
    for line in _some_of_each_kind(findings):
        tell(line)


def _churn(
    plan: Plan,
    found: Fleet,
    number: int,
    seconds: float,
    tally: Tally,
    tell: Callable[[str], None],
) -> None:
    """Run one elastic group from its opening to its end, and judge it."""
    joins, on_loss = _elastic(plan, number)
    seed, name = plan.seed * 1000 + number, f"churn{number}"
    found.start_agents()
    injector = Injector(found)
    churn = Churn(found, Terms(name, seed, plan.timeout, on_loss, joins), plan.kinds, injector)
    began = monotonic()
    churn.play(seconds)
    injector.end_all()
    if churn.hanging:
        tell(f"hanging: {churn.hanging}; {_states(found, name)}")
    found.stop_file.touch()
    logs = found.await_end(churn.lost, 2 * plan.timeout + _END_SECONDS)
    churn.end()
    losses = [Loss(began, churn.lost)]
    life = Life(name, logs, losses, on_loss, 2 * plan.timeout + 1.0)
    life.findings.extend(
        Finding(HANG, f"{name}, seat {seat}: no op for long") for seat in churn.hanging
    )
    findings = judge_churn(life)
    tally.add_churn(life, churn.counts, injector.done, findings)
    ops = sum(len(log.records) for log in life.survivors)
    counts = dict(churn.counts)
    tell(f"# {name} (joins {joins}, on_loss {on_loss}): {counts}, {ops} ops of all survivors")
    for line in _some_of_each_kind(findings):
        tell(line)


def _elastic(plan: Plan, number: int) -> tuple[str, str]:
    """Return the way in which ranks join a group, and what becomes of ops that a loss stops."""
    ways = [each for each in _WAYS if plan.joins in (None, each[0])]
    return ways[(number - 1) // (2 if plan.churn is None else 1) % len(ways)]


def _states(found: Fleet, name: str) -> str:
    """Return what the agents say of a group in which somebody hangs."""
    states = {}
    for node in found.nodes:
        with suppress(NoAnswer, AllfoldError):  # it is being started again
            groups = found.cluster.status(node)["groups"]
            states[node] = [each for each in groups if each["name"] == name]
    return json.dumps(states)


def _some_of_each_kind(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the first findings of each kind: one mistake may break the promises of many ops."""
    for kind in FINDINGS:
        found = [finding for finding in findings if finding.kind == kind]
        yield from map(str, found[:_TOLD])
        if len(found) > _TOLD:
            yield f"{kind}: {len(found) - _TOLD} more like these"


def _play(
    found: Fleet, injector: Injector, seed: int, seconds: float, kinds: Sequence[Kind]
) -> None:
    """Let faults happen until time is up, or fewer than half of the ranks are left."""
    until = monotonic() + seconds
    faults = schedule(seed, kinds)
    fault = next(faults, None)
    due = monotonic() + fault.after if fault else until
    while (now := monotonic()) < until and len(found.living) * 2 >= found.world:
        injector.end_due(now)
        if fault and now >= due:
            if leaves_enough(fault.kind, found.living_nodes, _silent(found, injector)):
                injector.inject(fault)
            fault = next(faults)
            due = monotonic() + fault.after
        wake = min(until, due, injector.next_ending)
        wait_for([rank.child for rank in found.living], max(0.0, wake - monotonic()))


def _silent(found: Fleet, injector: Injector) -> int:
    """Return how many nodes were silenced, unless the group goes on without them already."""
    silenced = [done for done in injector.done if done.kind in SILENCES_A_NODE]
    is_decided = not silenced or found.members <= len(found.living)
    return 0 if is_decided else len(silenced)


def _held(found: Fleet, node: str) -> Held:
    """Return what an agent holds once it has closed its groups, or has not in time."""
    with suppress(TimeoutError):
        wait_until(lambda: not found.cluster.status(node)["groups"], "closed", _CLOSE_SECONDS)
    return Held.of(found.cluster.agents[node].pid)


def _through_the_proxy(found: Fleet) -> str:
    """Return how much there was of it, so that one sees if agents find a way past it."""
    return f"# {found.proxy.ask('bytes') >> 20} MiB went through the proxy"
