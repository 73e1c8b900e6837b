"""An argument that a function does not have is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allfold
from allfold._registry import registry
from allfold_core.errors import InvalidArgument
from allfold_core.group_options import BY_ARGUMENT
from tests.support.fakes.fake_agent import FakeAgent

CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda **unknown: allfold.all_reduce(np.ones(2), **unknown),
    "reduce": lambda **unknown: allfold.reduce(np.ones(2), **unknown),
    "broadcast": lambda **unknown: allfold.broadcast(np.ones(2), **unknown),
    "all_gather": lambda **unknown: allfold.all_gather(np.ones(2), **unknown),
    "gather": lambda **unknown: allfold.gather(np.ones(2), **unknown),
    "scatter": lambda **unknown: allfold.scatter(np.ones(2), np.ones(2), **unknown),
    "reduce_scatter": lambda **unknown: allfold.reduce_scatter(np.ones(2), **unknown),
    "all_to_all": lambda **unknown: allfold.all_to_all(np.ones(2), **unknown),
}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    """An agent in whose group this process is rank 0 of 1; it answers one op, and the leaving."""
    with FakeAgent(tmp_path) as agent, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(
            allfold.init, rank=0, world_size=1, agent=agent.path, init_timeout=10.0
        )
        agent.greet()
        agent.seat()
        opening.result(10)
        yield agent
        leaving = pool.submit(allfold.shutdown)
        agent.see_off()
        leaving.result(10)


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("name", CALLS)
def test_the_public_function_is_named_and_the_nearest_argument_suggested(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        CALLS[name](tiemout=3)
    assert caught.value.message == (
        f"allfold.{name}() has no argument 'tiemout'; did you mean 'timeout'?"
    )


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(
    ("name", "unknown", "meant"),
    [
        ("broadcast", "src", "root"),
        ("scatter", "src", "root"),
        ("reduce", "dst", "root"),
        ("gather", "dst", "root"),
        ("all_reduce", "reduce_op", "op"),
        ("all_reduce", "async_", "async_op"),
        ("all_gather", "out", "output"),
        ("all_to_all", "output_split_sizes", "receive_counts"),
        ("all_reduce", "comm", "group"),
    ],
)
def test_the_words_of_other_libraries_are_known(name: str, unknown: str, meant: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'{unknown}'; did you mean '{meant}'"):
        CALLS[name](**{unknown: 0})


@pytest.mark.usefixtures("agent")
def test_where_nothing_is_near_all_arguments_are_listed() -> None:
    with pytest.raises(InvalidArgument) as caught:
        CALLS["reduce"](zzz=1)
    assert caught.value.message == (
        "allfold.reduce() has no argument 'zzz'; its arguments are tensor, root, op, factor, "
        "timeout, strategy, wire, feedback, async_op, group"
    )


@pytest.mark.usefixtures("agent")
def test_it_is_a_type_error_as_python_programs_expect() -> None:
    with pytest.raises(TypeError):
        CALLS["broadcast"](src=0)


def test_no_op_number_is_taken(agent: FakeAgent) -> None:
    """The next op of this rank has the number that it has on the others."""
    with pytest.raises(InvalidArgument):
        allfold.broadcast(np.ones(2), src=0)  # type: ignore[call-arg]
    with ThreadPoolExecutor(1) as pool:
        reducing = pool.submit(allfold.all_reduce, np.ones(2))
        assert agent.finish_op().seq == 0
        reducing.result(10)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: allfold.send(np.ones(2), dst=1),  # type: ignore[call-arg]
            "allfold.send() has no argument 'dst'; did you mean 'to'?",
        ),
        (
            lambda: allfold.recv(np.ones(2), src=1),  # type: ignore[call-arg]
            "allfold.recv() has no argument 'src'; did you mean 'source'?",
        ),
        (
            lambda: allfold.barrier(asynch_op=True),  # type: ignore[call-arg]
            "allfold.barrier() has no argument 'asynch_op'; did you mean 'async_op'?",
        ),
        (
            lambda: allfold.barrier(device_ids=[0]),  # type: ignore[call-arg]
            "allfold.barrier() has no argument 'device_ids'; its arguments are group, timeout, "
            "async_op",
        ),
        (
            lambda: allfold.init(size=1),  # type: ignore[call-arg]
            "allfold.init() has no argument 'size'; did you mean 'world_size'?",
        ),
        (
            lambda: allfold.new_group([0], timeuot=1.0),  # type: ignore[call-arg]
            "allfold.new_group() has no argument 'timeuot'; did you mean 'timeout'?",
        ),
    ],
)
def test_functions_without_shared_options_suggest_their_arguments_too(
    call: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert isinstance(caught.value, InvalidArgument)
    assert caught.value.message == said


def test_init_takes_every_option_of_a_group() -> None:
    assert {*BY_ARGUMENT} <= {*signature(allfold.init).parameters}


@pytest.mark.usefixtures("agent")
def test_the_methods_of_a_group_suggest_them_as_well() -> None:
    with pytest.raises(InvalidArgument, match="'dst'; did you mean 'to'"):
        registry.default().send(np.ones(2), dst=1)  # type: ignore[call-arg]
