"""How ranks come to their job's own services: what they would start, and why they cannot.

Nothing is started here: what would be is looked at.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from allfold._registry import registry
from allfold._starting import offers
from allfold._starting.offers import ServicesOffer, started_alone, started_for_store, taken
from allfold._starting.surroundings import machine
from allfold.torch import _creation
from allfold_cluster.job import JobServices
from allfold_core.errors import AgentUnreachable, InvalidArgument

HERE = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
APART = HERE | {"LOCAL_WORLD_SIZE": "1"}
ELSEWHERE = "192.0.2.1"
OURS = "10.9.8.7"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobServices, str]]:
    """Return the services that ranks ask for, and their tokens; on a machine with two addresses."""
    asked: list[tuple[JobServices, str]] = []

    def join(services: JobServices, token: str) -> Any:
        asked.append((services, token))
        listen = services.listen.replace(":0", ":7777")
        return SimpleNamespace(close=lambda: None, listen=listen)

    monkeypatch.setattr(offers, "join", join)
    monkeypatch.setattr(offers, "is_of_this_machine", lambda each: each in (OURS, "127.0.0.1"))
    monkeypatch.setattr(offers, "address_towards", lambda _address, _what: OURS)
    return asked


Started = list[tuple[JobServices, str]]


# --- with a store


def test_rank_0_of_one_machine_offers_an_orchestrator_on_loopback(started: Started) -> None:
    offer = started_for_store(2, HERE).offer
    ((services, token),) = started
    assert services.listen == "127.0.0.1:0"
    assert offer.orchestrator == "http://127.0.0.1:7777"
    assert offer.token == token
    assert len(token) >= 32
    assert services.serves
    assert services.host == "127.0.0.1"


def test_rank_0_of_several_machines_offers_one_at_the_address_that_all_know(
    started: Started,
) -> None:
    offer = started_for_store(2, APART | {"MASTER_ADDR": OURS}).offer
    ((services, _),) = started
    assert offer.orchestrator == f"http://{OURS}:7777"
    assert services.host == OURS


def test_rank_0_on_another_machine_than_the_store_offers_its_own_address(started: Started) -> None:
    assert started_for_store(2, APART | {"MASTER_ADDR": ELSEWHERE}).offer.orchestrator == (
        f"http://{OURS}:7777"
    )


def test_no_two_jobs_have_one_name_or_token(started: Started) -> None:
    first, second = started_for_store(2, HERE).offer, started_for_store(2, HERE).offer
    assert first.job != second.job
    assert first.token != second.token
    assert len(started) == 2


def test_where_an_orchestrator_is_named_agents_alone_are_started_with_the_users_token(
    started: Started,
) -> None:
    named = {"ALLFOLD_ORCHESTRATOR_URL": f"http://{ELSEWHERE}:7400", "ALLFOLD_TOKEN": "users"}
    offer = started_for_store(2, APART | named).offer
    ((services, token),) = started
    assert not services.serves
    assert offer.orchestrator == f"http://{ELSEWHERE}:7400"
    assert offer.token == "", "it does not go through the store"
    assert token == "users"


def offer_of(address: str, of_machine: str | None = None) -> ServicesOffer:
    return ServicesOffer(
        "job", f"http://{address}:7777", "token", of_machine or machine(), "rank0s-host"
    )


def test_another_rank_starts_an_agent_for_its_own_machine(started: Started) -> None:
    services = taken(offer_of(ELSEWHERE, "another"), {})
    assert services.offer.job == "job"
    ((asked, token),) = started
    assert not asked.serves
    assert (asked.job, asked.orchestrator, asked.host) == ("job", f"http://{ELSEWHERE}:7777", OURS)
    assert token == "token"


def test_a_rank_of_another_machine_is_told_that_the_offer_is_for_one_alone(
    started: Started,
) -> None:
    with pytest.raises(AgentUnreachable) as caught:
        taken(offer_of("127.0.0.1", "another"), {})
    said = caught.value.message
    assert said.startswith(
        f"this rank is on another machine ({socket.gethostname()}) than rank 0 (rank0s-host), "
    )
    assert "Set MASTER_ADDR on all ranks" in said
    assert started == []


@pytest.mark.parametrize(
    ("scheme", "here", "how", "folder"),
    [("https", {}, "with", "not set"), ("http", {"ALLFOLD_TLS_DIR": "/tls"}, "without", "/tls")],
)
def test_a_rank_with_another_idea_of_tls_than_rank_0_is_told_so(
    started: Started, scheme: str, here: dict[str, str], how: str, folder: str
) -> None:
    offer = replace(offer_of(ELSEWHERE, "another"), orchestrator=f"{scheme}://{ELSEWHERE}:7777")
    with pytest.raises(AgentUnreachable) as caught:
        taken(offer, here)
    said = caught.value.message
    assert said.startswith(f"rank 0 (rank0s-host) has started the job's services {how} TLS, but ")
    assert said.endswith(f"ALLFOLD_TLS_DIR is {folder}: set it for all ranks, or for none")
    assert started == []


def test_with_a_certificate_rank_0_offers_an_orchestrator_with_tls(started: Started) -> None:
    offer = started_for_store(2, HERE | {"ALLFOLD_TLS_DIR": "/tls"}).offer
    assert offer.orchestrator == "https://127.0.0.1:7777"
    taken(
        replace(offer, orchestrator=f"https://{ELSEWHERE}:7777", machine="another"),
        {"ALLFOLD_TLS_DIR": "/tls"},
    )
    assert started[1][0].orchestrator == f"https://{ELSEWHERE}:7777"


def test_an_offer_goes_through_the_store_whole() -> None:
    offer = offer_of(OURS)
    assert ServicesOffer.from_dict(offer.to_dict()) == offer
    assert ServicesOffer.from_dict(replace(offer, token="").to_dict()).token == ""


def test_a_rank_with_an_agent_of_its_own_refuses_the_offer(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLFOLD_SOCKET", "/run/mine.sock")
    with pytest.raises(AgentUnreachable) as caught:
        _creation._take(offer_of("127.0.0.1").to_dict())
    said = caught.value.message
    assert "on this rank ALLFOLD_SOCKET names one, /run/mine.sock" in said
    assert "set it for all ranks, or for none" in said
    assert started == []


def test_a_rank_that_may_start_nothing_refuses_the_offer(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLFOLD_START", "never")
    with pytest.raises(AgentUnreachable, match="on this rank ALLFOLD_START is never"):
        _creation._take(offer_of("127.0.0.1").to_dict())
    assert started == []


def test_without_an_offer_a_rank_looks_for_its_agent_itself(started: Started) -> None:
    _creation._take(None)
    assert started == []
    assert registry.services is None


# --- without one


def test_ranks_of_one_machine_have_an_orchestrator_on_a_port_that_is_picked_later(
    started: Started,
) -> None:
    for rank in ("0", "1"):
        started_alone(2, {"RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"})
    (first, _), (second, _) = started
    assert first.job == second.job
    assert first.serves
    assert first.listen == "127.0.0.1:0"
    assert first.host == "127.0.0.1"


def test_a_token_that_the_user_has_set_is_that_of_his_job(started: Started) -> None:
    started_alone(1, {"ALLFOLD_TOKEN": "users"})
    assert started[0][1] == "users"


def test_single_ranks_of_one_shell_never_meet_and_those_that_may_grow_do(started: Started) -> None:
    started_alone(1, {})
    started_alone(1, {}, grows=True)
    started_alone(2, {})
    alone, growing, two = (services.job for services, _ in started)
    assert growing == two
    assert alone != two


@pytest.mark.parametrize("serving", [True, False])
def test_ranks_of_several_machines_with_a_token_meet_beside_the_launchers_port(
    started: Started, serving: bool
) -> None:
    address = OURS if serving else ELSEWHERE
    started_alone(2, APART | {"MASTER_ADDR": address, "ALLFOLD_TOKEN": "ours"})
    ((services, token),) = started
    assert services.serves is serving
    if serving:
        assert services.listen == f"{OURS}:29501"
    else:
        assert services.orchestrator == f"http://{ELSEWHERE}:29501"
    assert token == "ours"


THREE_WAYS = ("ALLFOLD_ORCHESTRATOR_URL", "'allfold agent'", "the same ALLFOLD_TOKEN on all ranks")


@pytest.mark.parametrize(
    "variables",
    [
        APART | {"MASTER_ADDR": ELSEWHERE},  # no token
        {"LOCAL_WORLD_SIZE": "1", "ALLFOLD_TOKEN": "ours"},
        {"LOCAL_WORLD_SIZE": "1", "ALLFOLD_TOKEN": "ours", "MASTER_ADDR": OURS},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"SLURM_TASKS_PER_NODE": "1(x2)"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"MASTER_ADDR": ELSEWHERE, "MASTER_PORT": "29500"},  # by hand: who is here is not said
    ],
)
def test_ranks_of_several_machines_that_cannot_meet_are_told_three_ways(
    started: Started, variables: dict[str, str]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        started_alone(2, variables)
    said = caught.value.message
    assert said.startswith("the ranks of this job are on several machines, no node agent listens ")
    for way in THREE_WAYS:
        assert way in said
    assert started == []


@pytest.mark.parametrize("address", ["127.0.0.1", OURS])
def test_ranks_by_hand_whose_master_is_this_machine_are_taken_to_be_on_it(
    started: Started, address: str
) -> None:
    started_alone(2, {"MASTER_ADDR": address, "MASTER_PORT": "29500", "RANK": "1"})
    assert started[0][0].serves


def test_a_launchers_port_that_is_the_last_one_is_refused(started: Started) -> None:
    last = APART | {"MASTER_ADDR": OURS, "MASTER_PORT": "65535", "ALLFOLD_TOKEN": "ours"}
    with pytest.raises(InvalidArgument, match="no port after it"):
        started_alone(2, last)
    assert started == []


def test_a_named_orchestrator_is_the_meeting_place_of_all(started: Started) -> None:
    url = f"http://{ELSEWHERE}:7400"
    started_alone(2, {"LOCAL_WORLD_SIZE": "1", "ALLFOLD_ORCHESTRATOR_URL": url})
    ((services, _),) = started
    assert (services.orchestrator, services.serves) == (url, False)


def test_a_master_that_is_not_known_is_named(started: Started) -> None:
    for start in (started_alone, started_for_store):
        given = APART | {"MASTER_ADDR": "no-such-host.invalid", "ALLFOLD_TOKEN": "ours"}
        with pytest.raises(AgentUnreachable, match=r"MASTER_ADDR is 'no-such-host.invalid'"):
            start(2, given)
    assert started == []


# --- what is installed


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (("allfold_agent",), "allfold-agent not installed"),
        (("allfold_orchestrator",), "allfold-orchestrator not installed"),
        (
            ("allfold_agent", "allfold_orchestrator"),
            "allfold-agent and allfold-orchestrator not installed",
        ),
    ],
)
def test_packages_that_are_missing_are_named_with_the_command_that_brings_them(
    started: Started, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr(offers, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(AgentUnreachable) as caught:
        started_for_store(2, HERE)
    said = caught.value.message
    assert f"this job cannot start its own: {named} here. " in said
    assert 'pip install "allfold[local]"' in said
    assert started == []


def test_an_agent_alone_needs_no_orchestrator_here(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        offers, "find_spec", lambda name: None if name == "allfold_orchestrator" else object()
    )
    taken(offer_of(ELSEWHERE, "another"), dict(os.environ))
    assert len(started) == 1
