"""The facts that an agent tells of itself: where others find it and why, its limits, its GPUs."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from allfold_agent.agent import NodeAgent
from allfold_agent.control.app import make_app
from allfold_agent.settings import AgentSettings

ORCHESTRATOR = "http://10.0.0.9:7400"


def member(node: str, host: str) -> SimpleNamespace:
    return SimpleNamespace(
        node=node, control_url=f"http://{host}:7411", data_address=f"{host}:7412"
    )


def facts(
    settings: dict[str, str] | None = None,
    *,
    registered: bool = True,
    gpus: dict[str, str] | None = None,
) -> Any:
    """Return the facts that an agent with these settings answers."""
    variables = {f"ALLFOLD_AGENT_{name.upper()}": value for name, value in (settings or {}).items()}
    given = {"ALLFOLD_AGENT_NAME": "a", "ALLFOLD_ORCHESTRATOR_URL": ORCHESTRATOR} | variables
    names = {uuid: SimpleNamespace(name=name) for uuid, name in (gpus or {}).items()}
    plan = SimpleNamespace(members=[member("a", "10.0.0.1"), member("b", "10.0.0.2")])
    agent = SimpleNamespace(
        settings=AgentSettings.model_validate(given),
        registration=SimpleNamespace(
            identity=member("a", "10.0.0.1") if registered else None,
            problem=None if registered else "no token",
        ),
        draining=SimpleNamespace(problem=None),
        gpus=SimpleNamespace(names=names, reason="" if names else "there is no NVIDIA driver"),
        registry=SimpleNamespace(all=lambda: [SimpleNamespace(current=SimpleNamespace(plan=plan))]),
    )

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(cast(NodeAgent, agent)))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
            return await http.get("/v1/facts")

    answer = asyncio.run(ask())
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"data_listen": "10.0.0.1:7412"}, "the address that the port listens on (10.0.0.1:7412)"),
        (
            {"data_listen": "0.0.0.0:7412"},
            f"the address from which this machine reaches {ORCHESTRATOR}",
        ),
        (
            {"data_listen": "0.0.0.0:7412", "advertise": "a.example"},
            "ALLFOLD_AGENT_ADVERTISE or --advertise",
        ),
    ],
)
def test_an_agent_says_what_it_advertises_and_why(settings: dict[str, str], why: str) -> None:
    told = facts(settings)["addresses"]
    assert told["control_url"] == "http://10.0.0.1:7411"
    assert told["data_address"] == "10.0.0.1:7412"
    assert told["why"] == why


def test_an_agent_that_is_not_registered_says_what_it_waits_for() -> None:
    told = facts(registered=False)
    assert (told["ready"], told["waiting_for"]) == (False, "no token")
    assert told["addresses"]["control_url"] == ""


def test_an_agent_names_the_other_nodes_of_its_groups() -> None:
    assert facts()["peers"] == {
        "b": {"control_url": "http://10.0.0.2:7411", "data_address": "10.0.0.2:7412"}
    }


def test_an_agent_names_its_gpus_or_why_it_has_none() -> None:
    told = facts(gpus={"GPU-1": "NVIDIA H100"})["gpu"]
    assert (told["setting"], told["names"]) == ("auto", {"GPU-1": "NVIDIA H100"})
    assert facts()["gpu"]["reason"] == "there is no NVIDIA driver"


def test_an_agent_tells_its_clock_its_versions_and_its_limits() -> None:
    before = time.time()
    told = facts()
    assert before <= told["now"] <= time.time()
    assert told["versions"].keys() == {"allfold", "python", "numpy", "torch", "kernel"}
    assert told["machine"]["open_files"]["used"] > 0
    assert told["machine"]["memory"]["total"] > 0
    assert told["memfd"] == ""
