"""The queue of a group: when what an event leaves to do is done."""

from __future__ import annotations

from allfold_agent.groups.events import EventQueue
from allfold_agent.groups.outcomes import OpTable
from allfold_core.survival.instructions import Instruction, Release


def test_what_an_event_leaves_to_do_is_done_in_its_turn() -> None:
    done: list[str] = []
    queue = EventQueue("test", OpTable())
    queue.at_end = lambda: done.append("begin")

    def carry_out(each: Instruction) -> None:
        assert isinstance(each, Release)
        if each.floor == 1:
            queue.follow((Release(3),), carry_out)
        done.append(f"instruction {each.floor}")

    def inner() -> None:
        queue.add_due(lambda: done.append("without the lock"))
        queue.follow((Release(1), Release(2)), carry_out)
        done.append("inner")

    def outer() -> None:
        queue.run(inner)
        done.append("outer")

    queue.run(outer)
    instructions = [f"instruction {floor}" for floor in (1, 2, 3)]
    assert done == [*instructions, "inner", "outer", "begin", "without the lock"]
