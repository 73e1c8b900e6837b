"""The shortcut of the proofs: what differs in sizes alone is proved once, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.schedule import Schedule
from allfold_core.schedules.verify import ScheduleError
from tests.core.cases import blocks_of, labels_of, pairs_of
from tests.core.proofs import prove, structure

ALL = pairs_of(list(Kind))


def compiled(kind: Kind, name: str, numel: int) -> Schedule:
    root = 1 if kind.has_root else -1
    return compile_schedule(kind, name, nodes=4, numel=numel, root=root)


@pytest.mark.parametrize(("kind", "name"), ALL, ids=labels_of(ALL))
def test_sizes_do_not_count_and_every_step_does(kind: Kind, name: str) -> None:
    whole = compiled(kind, name, 16)
    assert structure(whole) == structure(compiled(kind, name, 1 << 30))
    for node, program in enumerate(whole.programs):
        for position in range(len(program)):
            programs = list(whole.programs)
            programs[node] = (*program[:position], *program[position + 1 :])
            assert structure(replace(whole, programs=tuple(programs))) != structure(whole)


def test_an_empty_block_counts_and_so_does_the_root() -> None:
    def gathered(sizes: list[int], root: int) -> object:
        blocks = blocks_of(sizes)
        return structure(
            compile_schedule(
                Kind.GATHER, "chain", nodes=3, numel=sum(sizes), root=root, blocks=blocks
            )
        )

    assert gathered([1, 2, 3], 0) == gathered([7, 7, 7], 0)
    assert gathered([1, 2, 3], 0) != gathered([1, 0, 3], 0)
    assert gathered([1, 2, 3], 0) != gathered([1, 2, 3], 1)


def test_a_wrong_schedule_is_refused_each_time_and_says_which_it_is() -> None:
    right = compiled(Kind.ALL_GATHER, "ring", 10)
    prove(right)
    wrong = replace(right, programs=(right.programs[0][:-1], *right.programs[1:]))
    for _ in range(2):
        with pytest.raises(ScheduleError) as caught:
            prove(wrong)
        (note,) = caught.value.__notes__
        assert note == "all_gather by ring, 4 nodes, 10 elements, root -1, blocks of [3, 3, 2, 2]"
