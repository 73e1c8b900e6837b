"""A strategy is one module and one line of the registry: proved with one of the tests' own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allfold_core.errors import InvalidArgument
from allfold_core.group_options import GroupOptions
from allfold_core.operations import MAX_STRATEGY_LABEL, Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.pricing.predict import INCAST, closed_form, predict
from allfold_core.pricing.price import price
from allfold_core.schedules.closed_form import PricedOp, heap_depth
from allfold_core.schedules.compiler import compile_program, compile_schedule
from allfold_core.schedules.registry import (
    SPELLING,
    STRATEGIES,
    candidates,
    parse_overrides,
    parse_strategy,
    strategies_for,
    strategy_of,
)
from allfold_core.schedules.schedule import Fold, Step
from allfold_core.schedules.strategies import direct
from allfold_core.schedules.strategies.phases import (
    copy_down,
    fold_up,
    place_in_heap,
    two_waves,
)
from allfold_core.schedules.strategy import (
    Description,
    Parameter,
    Problem,
    Strategy,
    in_tree_order,
)
from allfold_core.schedules.verify import verify
from allfold_core.topology import LinkModel, Member
from tests.core.cases import names_for

# What would stand in strategies/relay.py: up a tree, and down a line.


def program(problem: Problem, me: int) -> Iterator[Step]:
    up = place_in_heap(problem.nodes, problem.parameter, me)
    if problem.kind is Kind.BARRIER:
        yield from two_waves(problem.kind, up, me, problem.whole)
        return
    yield from fold_up(up, me, problem.whole)
    yield from copy_down(place_in_heap(problem.nodes, 1, me), problem.whole)


def seconds(op: PricedOp) -> float:
    up = heap_depth(op.nodes, op.parameter) * op.burst(op.parameter)
    if op.kind is Kind.BARRIER:
        return 2 * up
    up += heap_depth(op.nodes, op.parameter) * op.parameter * op.nbytes * (op.beta + op.gamma)
    return up + (op.nodes - 1) * (op.alpha + op.nbytes * op.beta)


DESCRIPTION = Description("up a tree, down a line", "P", "m", "α", "nothing")


def relay(name: str = "relay", **changes: Any) -> Strategy:
    fields: dict[str, Any] = {
        "kinds": frozenset({Kind.ALL_REDUCE, Kind.BARRIER}),
        "compile": program,
        "predict": seconds,
        "parameter": Parameter("width", "w", default=3, alternatives=(5,)),
        "positions": in_tree_order,
        "description": DESCRIPTION,
    }
    return Strategy(name=name, **fields | changes)


Register = Callable[[Strategy], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """The line of the registry."""
    return lambda strategy: monkeypatch.setitem(STRATEGIES, strategy.name, strategy)


def plan_of(nodes: int, links: LinkModel | None = None, **strategies: str) -> Plan:
    members = tuple(Member(f"node{i}", "", "", (i,)) for i in range(nodes))
    order = tuple(range(nodes))
    return Plan("g", 1, nodes, members, order, links or LinkModel(), GroupOptions(30.0, strategies))


def free(op: PricedOp) -> float:
    """A closed form that beats every other one."""
    return op.alpha / 100


def chosen(plan: Plan) -> list[str]:
    return [choose(Kind.ALL_REDUCE, plan, nbytes) for nbytes in (0, 4096, 1 << 30)]


def test_it_is_compiled_and_proved(register: Register) -> None:
    register(relay())
    assert names_for(Kind.ALL_REDUCE, 1, 4)[-2:] == ("relay(1)", "relay(4)")
    for kind in (Kind.ALL_REDUCE, Kind.BARRIER):
        for name in ("relay", "relay(1)", "relay(4)"):
            for nodes in (1, 2, 3, 8, 13):
                for numel in (0, 1, 50):
                    verify(compile_schedule(kind, name, nodes=nodes, numel=numel))


def test_its_nodes_are_placed_as_it_says(register: Register) -> None:
    register(relay())
    order = (4, 2, 0, 3, 1)
    placed = compile_schedule(Kind.ALL_REDUCE, "relay", nodes=5, numel=7, tree_order=order)
    verify(placed)
    fold = placed.programs[4][0]
    assert isinstance(fold, Fold)
    assert fold.operands == (4, 2, 0, 3)
    register(relay(positions=None))
    alike = compile_schedule(Kind.ALL_REDUCE, "relay(4)", nodes=5, numel=7, tree_order=order)
    assert alike == compile_schedule(Kind.ALL_REDUCE, "relay(4)", nodes=5, numel=7)


def test_blocks_of_pairs_are_placed_too(register: Register) -> None:
    everything = frozenset({Kind.ALL_TO_ALL, Kind.ALL_GATHER})
    register(relay("mesh", kinds=everything, compile=direct.program, parameter=None))
    for kind in everything:
        verify(compile_schedule(kind, "mesh", nodes=4, numel=35, tree_order=(2, 3, 1, 0)))


@pytest.mark.parametrize("nodes", [2, 4, 5])
def test_it_is_priced_and_the_simulated_clock_agrees(register: Register, nodes: int) -> None:
    register(relay())
    links = LinkModel()
    schedule = compile_schedule(Kind.ALL_REDUCE, "relay(1)", nodes=nodes, numel=1000)
    formula = closed_form(Kind.ALL_REDUCE, "relay(1)", nodes, 4000, links, 1)
    assert price(schedule, links) == pytest.approx(formula)
    assert predict(Kind.ALL_REDUCE, "relay(1)", nodes, 4000, links) == pytest.approx(formula)


def test_what_its_closed_form_leaves_out_is_added(register: Register) -> None:
    register(relay(senders=lambda kind, nodes: 1, parallel_kinds=frozenset({Kind.ALL_REDUCE})))
    near, far = LinkModel(), LinkModel(latency=20e-3, seconds_per_byte=1 / 70e6)
    crowded = LinkModel(shared_cores=4)

    def ratio(links: LinkModel) -> float:
        real = predict(Kind.ALL_REDUCE, "relay(1)", 5, 1 << 20, links)
        return real / closed_form(Kind.ALL_REDUCE, "relay(1)", 5, 1 << 20, links)

    assert ratio(near) == pytest.approx(1 + INCAST)
    assert ratio(far) < 1  # several connections add up
    assert ratio(crowded) > 1


def test_auto_takes_it_where_it_is_cheapest_and_not_once_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(8)
    before = chosen(plan)
    with monkeypatch.context() as patched:
        patched.setitem(STRATEGIES, "relay", relay(predict=free))
        assert candidates(Kind.ALL_REDUCE)[-1] == "relay(5)"
        assert chosen(plan) == ["relay(3)"] * 3
        assert choose(Kind.BROADCAST, plan, 100) in candidates(Kind.BROADCAST)
    assert chosen(plan) == before


def test_auto_leaves_it_out_where_it_would_round_differently(register: Register) -> None:
    register(relay(predict=free, joins_slices=True))
    assert choose(Kind.ALL_REDUCE, plan_of(8), 100) == "relay(3)"
    assert choose(Kind.ALL_REDUCE, plan_of(8), 100, feedback=True) == "direct"
    with pytest.raises(InvalidArgument, match=r"relay\(2\) cannot run with feedback=.*another"):
        choose(Kind.ALL_REDUCE, plan_of(8), 100, asked="relay(2)", feedback=True)


def test_an_override_names_it(register: Register) -> None:
    register(relay())
    assert parse_overrides("all_reduce = Relay; barrier=relay(7)") == {
        "all_reduce": "relay(3)",
        "barrier": "relay(7)",
    }
    assert choose(Kind.ALL_REDUCE, plan_of(8, all_reduce="relay(4)"), 1 << 30) == "relay(4)"


def test_it_is_refused_where_it_does_not_serve_a_kind(register: Register) -> None:
    register(relay())
    assert "relay" not in strategies_for(Kind.BROADCAST)
    with pytest.raises(InvalidArgument, match=r"relay\(3\) cannot run broadcast; broadcast has"):
        strategy_of(Kind.BROADCAST, "relay")
    with pytest.raises(InvalidArgument, match=r"relay.* cannot run all_to_all"):
        compile_program(Kind.ALL_TO_ALL, "relay", nodes=3, numel=9, node=0)


def test_messages_list_it(register: Register) -> None:
    with pytest.raises(InvalidArgument, match="unknown strategy 'relay'; there are direct"):
        parse_strategy("relay")
    register(relay())
    with pytest.raises(InvalidArgument, match=r"there are direct, .*, relay\(width\)$"):
        parse_strategy("bus")
    with pytest.raises(InvalidArgument, match="the width of relay is 1 or more"):
        parse_strategy("relay(0)")
    with pytest.raises(InvalidArgument, match=r"taken by tree\(arity\), relay\(width\)"):
        parse_strategy("ring(2)")


@pytest.mark.parametrize("missing", ["compile", "predict", "kinds", "description"])
def test_a_strategy_lacks_nothing(missing: str) -> None:
    """One without a price would stop every agent that looks for the cheapest."""
    whole: dict[str, Any] = {
        "kinds": frozenset({Kind.ALL_REDUCE}),
        "compile": program,
        "predict": seconds,
        "description": DESCRIPTION,
    }
    Strategy(name="whole", **whole)
    del whole[missing]
    with pytest.raises(TypeError, match=missing):
        Strategy(name="part", **whole)


def test_the_closed_form_of_a_tree_without_children_ends_with_an_error(register: Register) -> None:
    with pytest.raises(ValueError, match="arity 0"):
        heap_depth(5, 0)
    register(relay(parameter=None))
    with pytest.raises(ValueError, match="arity 0"):
        predict(Kind.ALL_REDUCE, "relay", 5, 1000, LinkModel())


@pytest.mark.parametrize("name", ["", "auto", "Relay", "2ring", "a-b", "x" * 100])
def test_a_name_that_nobody_could_write_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a strategy"):
        relay(name)


def test_a_strategy_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="relay serves no kind"):
        relay(kinds=frozenset())


def test_every_name_is_spelled_as_control_planes_accept_it(register: Register) -> None:
    register(relay())
    register(relay("x" * MAX_STRATEGY_LABEL, parameter=None))
    for kind in Kind:
        for name in (*candidates(kind), *strategies_for(kind), "auto"):
            assert re.fullmatch(SPELLING, name)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=lambda strategy: strategy.name)
def test_every_strategy_says_what_it_is(strategy: Strategy) -> None:
    parts = strategy.description
    for text in (parts.summary, parts.steps, parts.sent, parts.seconds, parts.auto_for):
        assert text == text.strip() != ""
