"""The sentence of ``allfold status`` about an agent."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from allfold.cli._status import _agent_table


def test_an_agent_that_is_not_ready_says_why() -> None:
    problem = "the orchestrator at http://127.0.0.1:7400 does not answer: refused"
    agent = {"node": "a", "ready": False, "waiting_for": problem, "groups": []}
    console = Console(file=StringIO(), width=200)
    console.print(_agent_table([agent]))
    assert isinstance(console.file, StringIO)
    assert f"not ready: {problem}" in console.file.getvalue()
