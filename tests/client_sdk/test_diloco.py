"""DiLoCo's schedule and its outer step, with rounds that are exact: numbers have few bits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from allfold.diloco import DiLoCo
from allfold_core.errors import InvalidArgument, PeerLost, PeerMissing, ServiceError
from tests.client_sdk.diloco_ranks import FakeGroup, Late, Ranks, add, model_of, reference

SIZES = (3, 5, 2, 6, 4)
EXACT: dict[str, Any] = {"outer_lr": 0.5, "momentum": 0.5}
STEPS = 24


def inner(rank: int, step: int) -> float:
    """Small whole numbers that differ between ranks and steps."""
    return float((rank * 3 + step * 5) % 7 - 3)


def made(group: FakeGroup, sizes: tuple[int, ...] = SIZES, **options: Any) -> tuple[Any, DiLoCo]:
    model = model_of(sizes)
    return model, DiLoCo(model, group.as_group, **(EXACT | {"wire": "native"} | options))


def train(group: FakeGroup, model: Any, diloco: DiLoCo, steps: int) -> list[list[list[float]]]:
    """Return the synchronized and the own number of each tensor, after each step."""
    seen = []
    for _ in range(steps):
        group.step += 1
        add(model, inner(group.rank, group.step))
        diloco.step()
        seen.append(numbers(model, diloco))
    return seen


def numbers(model: Any, diloco: DiLoCo) -> list[list[float]]:
    own = [one_number(each) for each in model]
    with diloco.synchronized():
        return [[one_number(each) for each in model], own]


def one_number(tensor: torch.Tensor) -> float:
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "weights"),
    [
        (1, 1, 0, (1, 1)),
        (4, 1, 0, (1, 1, 1, 1)),
        (4, 1, 3, (1, 1)),
        (6, 3, 2, (1, 3)),
        (5, 5, 4, (2, 0, 6)),
        (7, 2, 1, (0.25, 0.75)),
    ],
)
def test_all_ranks_have_the_numbers_of_the_formulas_after_every_step(
    every: int, fragments: int, delay: int, weights: tuple[float, ...]
) -> None:
    options = {"every": every, "fragments": fragments, "delay": delay}
    sizes, steps = (4,) * 5, min(STEPS, 8 * every)  # later numbers have too many bits

    def program(group: FakeGroup) -> tuple[list[list[list[float]]], list[int]]:
        model, diloco = made(group, sizes, **options, weight=weights[group.rank])
        seen = train(group, model, diloco, steps)
        return seen, [len(each._parameters) for each in diloco._fragments]

    found = Ranks(len(weights)).run(program)
    tensor = 0
    for number, tensors in enumerate(found[0][1]):
        offset = number * every // fragments
        schedule = {"steps": steps, "every": every, "offset": offset, "delay": delay}
        thetas, own = reference(inner, weights, **schedule, **EXACT)
        for _ in range(tensors):
            for rank, (seen, _) in enumerate(found):
                assert [synchronized[tensor] for synchronized, _ in seen] == thetas
                assert [mine[tensor] for _, mine in seen] == [each[rank] for each in own]
            tensor += 1
    assert tensor == len(sizes)


def test_rounds_of_fragments_begin_at_offsets_that_spread_over_the_steps() -> None:
    def program(group: FakeGroup) -> list[tuple[int, int]]:
        model, diloco = made(group, (8, 8, 8, 8), every=8, fragments=4, delay=1)
        train(group, model, diloco, 16)
        return [(call.step, call.numel) for call in group.calls]

    (calls,) = Ranks(1).run(program)
    assert calls == [(step, 8) for step in (2, 4, 6, 8, 10, 12, 14, 16)]


def test_results_are_told_when_they_are_applied_and_flush_applies_those_in_flight() -> None:
    def program(group: FakeGroup) -> None:
        model, diloco = made(group, every=4, delay=2)
        told = []
        for _ in range(8):
            add(model, 1.0)
            told.append(len(diloco.step()))
        assert told == [0, 0, 0, 0, 0, 1, 0, 0]
        assert diloco.in_flight == 1
        assert len(diloco.flush()) == 1
        assert diloco.in_flight == 0
        assert diloco.flush() == []

    Ranks(2).run(program)


@pytest.mark.parametrize("fragments", range(1, 9))
def test_fragments_are_runs_of_whole_tensors_of_about_equal_size(fragments: int) -> None:
    sizes = (1, 40, 2, 30, 30, 1, 1, 20)
    diloco = DiLoCo(model_of(sizes), every=9, fragments=fragments)
    parts = [[each.numel() for each in part._parameters] for part in diloco._fragments]
    assert [size for part in parts for size in part] == list(sizes)
    assert len(parts) == fragments
    assert all(parts)
    assert max(map(sum, parts)) <= sum(sizes) / fragments + max(sizes)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_round_that_fails_changes_nothing_and_the_next_one_has_what_it_had(delay: int) -> None:
    lost = PeerLost("rank 1 is gone", ranks=[1])

    def program(group: FakeGroup) -> float:
        model, diloco = made(group, every=2, delay=delay)
        add(model, 3.0)
        diloco.step()
        add(model, 3.0)
        if delay:
            diloco.step()
            add(model, 3.0)
        before = numbers(model, diloco)
        with pytest.raises(PeerLost):
            diloco.step()
        assert numbers(model, diloco) == before
        assert diloco.in_flight == 0
        while len(group.calls) < 2:
            add(model, 3.0)
            diloco.step()
        diloco.flush()
        return numbers(model, diloco)[0][0]

    # Four steps of 3, all in one outer step: half of (1 + momentum) times 12.
    assert Ranks(2, fails={0: (lost, True)}).run(program) == [9.0, 9.0]


def test_a_round_that_is_undecided_is_waited_for_once_more() -> None:
    undecided = PeerMissing("the group waits", timeout=1.0, decided=False)

    def program(group: FakeGroup) -> float:
        model, diloco = made(group, every=3)
        for _ in range(2):
            add(model, 2.0)
            diloco.step()
        add(model, 2.0)
        with pytest.raises(PeerMissing):
            diloco.step()
        assert diloco.in_flight == 1
        assert len(diloco.step()) == 1
        return numbers(model, diloco)[0][0]

    assert Ranks(2, fails={0: (undecided, False)}).run(program) == [4.5, 4.5]


@pytest.mark.parametrize("kept", [False, True])
def test_a_late_rank_goes_on_where_the_others_are_and_loses_no_work(kept: bool) -> None:
    """Two rounds more were done without it; its work is in its next Δ, or its node has it."""

    def program(group: FakeGroup) -> None:
        options = {"every": 2, "outer_lr": 1.0, "momentum": 0.0, "quorum": 1, "within": 5.0}
        model, diloco = made(group, (4,), **options)
        add(model, 1.0)
        assert diloco.step() == []
        add(model, 1.0)
        assert [each.behind for each in diloco.step()] == [2, 1, 0]
        assert diloco.steps == 6
        own = 0.0 if kept else 2.0
        assert numbers(model, diloco) == [[3.0], [3.0 + own]]
        add(model, 2.0)
        diloco.step()
        diloco.step()
        assert numbers(model, diloco) == [[5.0 + own], [5.0 + own]]
        told = [(call.options["weight"], call.options["quorum"]) for call in group.calls]
        assert told == [(1.0, 1), (0.0, 1), (0.0, 1), (1.0, 1)]

    late = {0: Late(-1.0, 2, kept), 1: Late(-1.0, 1), 2: Late(-1.0, 0)}
    Ranks(1, late=late).run(program)


def test_a_weight_that_is_reset_while_a_round_is_in_flight_costs_a_late_rank_no_work() -> None:
    """As where it is the tokens since the last round."""

    def program(group: FakeGroup) -> None:
        options = {"every": 2, "delay": 1, "outer_lr": 1.0, "momentum": 0.0}
        model, diloco = made(group, (4,), **options, quorum=1, within=5.0)
        for _ in range(2):
            add(model, 1.0)
            diloco.step()
        diloco.weight = 0.0
        assert len(diloco.step()) == 1
        assert numbers(model, diloco) == [[1.0], [3.0]]

    Ranks(1, late={0: Late(-1.0, 0)}).run(program)


def test_a_round_that_was_called_meanwhile_is_not_caught_up_with_again() -> None:
    """The result of a fragment's round is as old as its delay."""

    def program(group: FakeGroup) -> None:
        model, diloco = made(group, (4, 4), every=4, fragments=2, delay=3, quorum=1, within=5.0)
        told = []
        for step in range(1, 9):
            add(model, 1.0)
            told += [(step, each.behind) for each in diloco.step()]
        assert told == [(5, 1), (7, 0)]
        assert diloco.steps == 8

    Ranks(1, late={0: Late(-1.0, 1), 1: Late(-1.0, 0)}).run(program)


def test_who_takes_over_the_state_goes_on_as_the_others_do() -> None:
    options: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 1}

    def program(group: FakeGroup) -> tuple[list[float], int]:
        model, diloco = made(group, **options)
        train(group, model, diloco, 5)
        state = diloco.state_dict()
        later, joined = made(group, **options)
        joined.load_state_dict(state)
        synchronized, own = numbers(later, joined)
        assert synchronized == numbers(model, diloco)[0]
        assert own == synchronized
        assert joined.steps == 5
        for _ in range(4):  # to the next round of both fragments
            group.step += 1
            for each, one in ((model, diloco), (later, joined)):
                add(each, 1.0)
                if one is joined:
                    one.step()
        joined.flush()
        return numbers(later, joined)[0], len(group.calls)

    found = Ranks(2).run(program)
    assert found[0] == found[1]
    assert found[0][1] == 2 + 2, "it keeps to the schedule of the others"


def test_a_state_waits_for_what_is_in_flight() -> None:
    def program(group: FakeGroup) -> None:
        model, diloco = made(group, every=2, delay=1)
        for _ in range(2):
            add(model, 2.0)
            diloco.step()
        assert diloco.in_flight == 1
        state = diloco.state_dict()
        assert state["synchronized"][0][0].item() == 3.0
        assert diloco.in_flight == 0
        add(model, 2.0)
        assert len(diloco.step()) == 1, "its result is told all the same"

    Ranks(2).run(program)


def test_a_state_of_other_fragments_is_refused() -> None:
    state = DiLoCo(model_of(SIZES), every=2, fragments=2).state_dict()
    with pytest.raises(InvalidArgument, match=r"\[\(10,\), \(10,\)\].*\[\(20,\)\]"):
        DiLoCo(model_of(SIZES), every=2).load_state_dict(state)


def test_half_types_have_a_synchronized_copy_in_float32() -> None:
    def program(group: FakeGroup) -> None:
        model = model_of((4,), torch.bfloat16)
        diloco = DiLoCo(model, group.as_group, every=1, outer_lr=0.5, momentum=0.0, wire=None)
        add(model, 256.0)
        diloco.step()
        add(model, 1.0)
        diloco.step()
        (synchronized,) = diloco.state_dict()["synchronized"]
        assert synchronized.tolist() == [128.5] * 4
        assert model[0].tolist() == [128.0] * 4  # bfloat16 has 8 bits

    Ranks(1).run(program)


def test_what_a_half_type_rounds_is_no_training() -> None:
    """Each step of rank 0 is one that bfloat16 has; rank 1 does nothing."""
    step, steps = 2.0**-7, 40

    def program(group: FakeGroup) -> list[float]:
        model = model_of((1,), torch.bfloat16)
        with torch.no_grad():
            model[0].fill_(1.0)
        options: dict[str, Any] = {"every": 1, "outer_lr": 1.0, "momentum": 0.0, "wire": "native"}
        diloco = DiLoCo(model, group.as_group, **options)
        for _ in range(steps):
            if group.rank == 0:
                add(model, step)
            diloco.step()
        return [each.item() for each in diloco.state_dict()["synchronized"]]

    assert Ranks(8).run(program) == [[1.0 + steps * step / 8]] * 8


def test_one_round_that_cannot_begin_costs_no_other_its_place() -> None:
    """Fragments of one step begin in the same order on all ranks."""

    def program(group: FakeGroup) -> list[int]:
        model, diloco = made(group, every=1, fragments=2)
        group.refuses = {2}
        for refused in (False, True, False):
            add(model, 1.0)
            if refused:
                with pytest.raises(InvalidArgument, match="refused"):
                    diloco.step()
            else:
                diloco.step()
        return [call.numel for call in group.calls]

    assert Ranks(1).run(program) == [[10, 10] * 3]


def test_a_rank_whose_missed_results_are_gone_says_so_until_it_has_the_state_of_another() -> None:
    gone = ServiceError("not kept", seq=0, not_kept=True)

    def program(group: FakeGroup) -> None:
        model, diloco = made(group, every=1)
        state = diloco.state_dict()
        for _ in range(2):
            add(model, 1.0)
            with pytest.raises(ServiceError, match="not kept"):
                diloco.step()
        assert len(group.calls) == 1
        diloco.load_state_dict(state)
        assert len(diloco.step()) == 1

    Ranks(1, fails={0: (gone, True)}).run(program)


def test_only_one_of_a_group_has_a_quorum() -> None:
    def program(group: FakeGroup) -> None:
        options = {"every": 1, "quorum": 1, "within": 1.0}
        (_, one), (_, other), (_, without) = (
            made(group, **given) for given in (options, options, {"every": 1})
        )
        one.step()
        without.step()
        with pytest.raises(InvalidArgument, match=r"another DiLoCo .* a group of its own"):
            other.step()
        del one
        gc.collect()
        assert len(other.step()) == 1

    Ranks(1).run(program)


def test_results_that_are_kept_keep_no_tensors() -> None:
    def program(group: FakeGroup) -> None:
        model, diloco = made(group, every=1)
        add(model, 1.0)
        (result,) = diloco.step()
        assert result.tensors is None

    Ranks(1).run(program)


def test_parameters_that_need_no_gradient_are_left_alone() -> None:
    model = model_of((4, 2))
    model[0].requires_grad_(False)
    state = DiLoCo(model, every=2).state_dict()
    assert [each.numel() for each in state["synchronized"]] == [2]


@pytest.mark.parametrize(
    ("options", "series"),
    [
        ({"wire": "int4"}, ["diloco.0", "diloco.1"]),
        ({"wire": "int4", "name": "large"}, ["large.0", "large.1"]),
        ({"wire": "int4", "feedback": False}, [None, None]),
        ({"wire": "native"}, [None, None]),
        ({"wire": None}, [None, None]),
    ],
)
def test_each_fragment_has_a_series_of_rounding_errors_where_the_wire_loses(
    options: dict[str, Any], series: list[str | None]
) -> None:
    def program(group: FakeGroup) -> list[dict[str, Any]]:
        model, diloco = made(group, every=2, fragments=2, **options)
        train(group, model, diloco, 4)
        return [call.options for call in group.calls]

    (found,) = Ranks(1).run(program)
    # Fragment 1 is first: it begins at an odd step.
    assert [each["feedback"] for each in found] == [*reversed(series)] * 2
    assert {each["wire"] for each in found} == {options["wire"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every= is at least 1"),
        ({"every": 4, "delay": 4}, "got 4 and 4"),
        ({"every": 4, "delay": -1}, "got 4 and -1"),
        ({"every": 4, "fragments": 0}, r"\(5\), got 0"),
        ({"every": 4, "fragments": 6}, r"\(5\), got 6"),
        ({"every": 4, "wire": "int5"}, "int5"),
        ({"every": 4, "weight": -1}, "weight="),
        ({"every": 4, "quorum": 2}, "belong together"),
        ({"every": 4, "quorum": 0, "within": 1}, "quorum= .* got 0"),
        ({"every": 4, "outer_lr": "x"}, "outer_lr= is a finite number, got 'x'"),
        ({"every": 4, "momentum": float("nan")}, "momentum= is a finite number"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_a_sentence(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        DiLoCo(model_of(SIZES), **options)


def test_complex_parameters_are_refused() -> None:
    given = [torch.zeros(2, dtype=torch.complex64, requires_grad=True)]
    with pytest.raises(InvalidArgument, match="complex"):
        DiLoCo(given, every=2)


def test_parameters_on_several_devices_are_refused() -> None:
    mixed = [torch.zeros(2, requires_grad=True), torch.zeros(2, device="meta", requires_grad=True)]
    with pytest.raises(InvalidArgument, match="several devices"):
        DiLoCo(mixed, every=2)
