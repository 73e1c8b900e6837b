"""The sentences of ``allfold status`` about agents and terms."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from allfold.cli._status import _about_term, _agent_table, _group_table
from allfold_core.agent_answers import Status


def test_an_agent_that_is_not_ready_says_why() -> None:
    problem = "the orchestrator at http://127.0.0.1:7400 does not answer: refused"
    agent: Status = {"node": "a", "ready": False, "waiting_for": problem, "groups": []}
    console = Console(file=StringIO(), width=200)
    console.print(_agent_table([agent]))
    assert isinstance(console.file, StringIO)
    assert f"not ready: {problem}" in console.file.getvalue()


def test_a_term_says_whom_it_lost_and_how_that_is_known() -> None:
    lost = [{"node": "b", "how": "signed off"}, {"node": "c", "how": "was silent to a"}]
    term = {"number": 3, "nodes": ["a"], "lost": lost, "trusted": True}
    assert list(_about_term({"group": "train", "term": term})) == [
        "group 'train': term 3 goes on without node b, which signed off",
        "group 'train': term 3 goes on without node c, which was silent to a",
    ]
    assert list(_about_term({"group": "train", "term": None})) == []


def test_a_term_that_may_not_be_the_newest_one_says_what_it_waits_for() -> None:
    term = {"number": 3, "nodes": ["a"], "lost": [], "trusted": False}
    (line,) = _about_term({"group": "train", "term": term})
    assert "waits until the agents have reported theirs" in line


def test_of_a_group_whose_record_was_lost_the_ranks_are_shown_that_were_reported() -> None:
    group = {
        "group": "train",
        "phase": "recalled",
        "epoch": 1,
        "world_size": None,
        "present": [{"rank": 0, "node": "a"}, {"rank": 1, "node": "b"}],
        "missing": [],
        "left": [],
        "lost": [],
    }
    console = Console(file=StringIO(), width=200)
    console.print(_group_table([group], []))
    assert isinstance(console.file, StringIO)
    (row,) = (line for line in console.file.getvalue().splitlines() if "train" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[1] == "recalled"
    assert cells[4:6] == ["2", "0 on a; 1 on b"]
