"""``allfold.init()`` where nothing says which rank this process is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import allfold
from tests.support.fakes.fake_agent import FakeAgent

NUMBERS = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(_serve, agent)
        yield agent
        allfold.shutdown()
        serving.result(10)


def _serve(agent: FakeAgent) -> None:
    agent.greet()
    agent.seat()
    agent.see_off()


def test_a_process_that_nobody_has_numbered_is_warned_that_it_is_alone(agent: FakeAgent) -> None:
    with pytest.warns(allfold.SingleProcessWarning) as found:
        allfold.init(agent=agent.path)
    (warning,) = found
    said = str(warning.message)
    assert said.startswith("allfold.init() takes this process for rank 0 of 1, because no launcher")
    for word in ("RANK", "WORLD_SIZE", "ALLFOLD_RANK", "ALLFOLD_WORLD_SIZE", "allfold run"):
        assert word in said
    assert warning.filename == __file__, "it points to the call"


@pytest.mark.parametrize("said_by", ["arguments", "launcher"])
def test_one_process_that_is_said_to_be_all_is_not_warned(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, said_by: str
) -> None:
    if said_by == "launcher":
        for name, value in NUMBERS.items():
            monkeypatch.setenv(name, value)
        allfold.init(agent=agent.path)
    else:
        allfold.init(rank=0, world_size=1, agent=agent.path)
    assert allfold.world_size() == 1
