"""The cost of an op for all nodes together if they share one machine."""

from __future__ import annotations

import pytest

from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.pricing.predict import closed_form, predict
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import candidates
from allfold_core.schedules.schedule import Send, wire_chunk
from allfold_core.topology import LinkModel, Member

CORES = 2
SHARED = LinkModel(shared_cores=2)
KIB, MIB = 1 << 10, 1 << 20


def plan_of(nodes: int, links: LinkModel) -> Plan:
    members = tuple(Member(f"node{i}", "", "", (i,)) for i in range(nodes))
    return Plan("g", 1, nodes, members, tuple(range(nodes)), links, GroupOptions(30.0))


def chosen(nodes: int, nbytes: int, links: LinkModel, kind: Kind = Kind.ALL_REDUCE) -> str:
    return choose(kind, plan_of(nodes, links), nbytes)


def shared(kind: Kind, strategy: str, nodes: int, nbytes: int) -> float:
    """Return the additional seconds of an op whose nodes share a machine."""
    alone = closed_form(kind, strategy, nodes, nbytes, SHARED)
    return predict(kind, strategy, nodes, nbytes, SHARED) - alone


def busy(messages: int, nbytes: float) -> float:
    """Seconds for which so many messages of so many bytes together keep the cores busy."""
    return (messages * SHARED.latency + nbytes * SHARED.seconds_per_byte) / CORES


@pytest.mark.parametrize("nodes", [2, 3, 4, 11, 16])
@pytest.mark.parametrize("nbytes", [20, 100_000, 73_891_840, 500 * MIB])
def test_every_message_of_every_node_counts_and_every_chunk_of_it(nodes: int, nbytes: int) -> None:
    """Counted by hand: in a mesh everybody sends all to all others, in a ring a slice a step."""
    chunk = wire_chunk(nbytes, nodes, SHARED)
    whole, part = chunks_of(nbytes, chunk), chunks_of(nbytes, nodes * chunk)
    mesh, ring = nodes * (nodes - 1), nodes * 2 * (nodes - 1)
    seconds = {
        "direct": busy(mesh * whole, mesh * nbytes),
        "ring": busy(ring * part, ring * nbytes / nodes),
    }
    for name, right in seconds.items():
        got = shared(Kind.ALL_REDUCE, name, nodes, nbytes)
        assert got == pytest.approx(right), name


def chunks_of(nbytes: int, size: int) -> int:
    """Rounded up; nothing is a message too."""
    return max(1, -(-nbytes // size))


def test_a_slice_of_whole_chunks_is_not_rounded_up_to_one_more() -> None:
    """A slice of 9/11 of this tensor has 72 chunks, and a little more in floating point."""
    nodes, nbytes = 11, 73_891_840
    chunk = wire_chunk(nbytes, nodes, SHARED)
    assert 9 * nbytes == 72 * 11 * chunk
    assert 9 / 11 * nbytes / chunk > 72
    messages = moved = 0
    schedule = compile_schedule(Kind.ALL_GATHER, "halving_doubling", nodes=nodes, numel=nodes)
    for step in (step for program in schedule.programs for step in program):
        if isinstance(step, Send):
            part = len(step.slice) * nbytes
            messages += chunks_of(part, nodes * chunk)
            moved += part
    got = shared(Kind.ALL_GATHER, "halving_doubling", nodes, nbytes)
    assert got == pytest.approx(busy(messages, moved / nodes))


def test_a_hub_has_two_messages_for_each_of_the_others_also_of_a_tensor_of_nothing() -> None:
    for nbytes in (0, 4 * KIB):
        got = shared(Kind.ALL_REDUCE, "centralized", 5, nbytes)
        assert got == pytest.approx(busy(8, 8 * nbytes))


@pytest.mark.parametrize("nodes", [3, 8, 16])
@pytest.mark.parametrize("nbytes", [0, 1, 2])
def test_what_is_priced_is_the_schedule_that_runs(nodes: int, nbytes: int) -> None:
    """A ring without a slice for every node is a binary tree, and costs what that one costs."""
    ring = predict(Kind.ALL_REDUCE, "ring", nodes, nbytes, SHARED)
    assert ring == predict(Kind.ALL_REDUCE, "tree(2)", nodes, nbytes, SHARED)


def test_more_cores_do_the_same_work_in_less_time() -> None:
    def extra(cores: int) -> float:
        links = LinkModel(shared_cores=cores)
        alone = closed_form(Kind.ALL_REDUCE, "ring", 4, MIB, links)
        return predict(Kind.ALL_REDUCE, "ring", 4, MIB, links) - alone

    assert extra(32) == pytest.approx(extra(2) / 16)


def test_many_cores_leave_the_choice_to_the_closed_forms() -> None:
    assert chosen(8, 4 * KIB, SHARED) == "centralized"
    assert chosen(8, 4 * KIB, LinkModel(shared_cores=64)) == "direct"


def test_signals_count_as_messages() -> None:
    assert shared(Kind.BARRIER, "direct", 4, 0) == pytest.approx(busy(12, 0))


def test_one_node_costs_nothing() -> None:
    for kind in Kind:
        for name in candidates(kind):
            assert shared(kind, name, 1, MIB) == 0.0


@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_nodes_of_one_machine_take_strategies_of_few_messages_for_short_tensors(nodes: int) -> None:
    for nbytes in (4, 4 * KIB, 64 * KIB):
        few = chosen(nodes, nbytes, SHARED)
        assert few in ("centralized", "tree(2)", "tree(4)", "tree(8)")
        assert few != chosen(nodes, nbytes, LinkModel())
    assert chosen(nodes, 4 * KIB, LinkModel()) == "direct"


def test_two_nodes_of_one_machine_choose_as_two_machines_do() -> None:
    for nbytes in (4, 64 * KIB, MIB, 16 * MIB, 256 * MIB):
        assert chosen(2, nbytes, SHARED) == chosen(2, nbytes, LinkModel())


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("nodes", [2, 3, 5, 16])
def test_on_one_machine_the_cheapest_is_that_by_the_prediction(kind: Kind, nodes: int) -> None:
    for nbytes in (0, 4 * KIB, MIB, 64 * MIB):
        times = {name: predict(kind, name, nodes, nbytes, SHARED) for name in candidates(kind)}
        best = times[chosen(nodes, nbytes, SHARED, kind)]
        assert best == pytest.approx(min(times.values()), rel=1e-8)
