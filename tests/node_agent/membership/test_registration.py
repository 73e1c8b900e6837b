"""An agent measures its links when it comes in: once, not for long, and never in a job's way."""

from __future__ import annotations

from threading import Event

import pytest

from allfold_agent.edges.link_probe import MeasuredLink
from allfold_agent.membership.registration import Identity
from allfold_core.errors import AllfoldError, PeerLost, PeerMissing
from tests.node_agent.membership.linked_node import GROUP, IDENTITY, LINKS, linked_node
from tests.node_agent.membership.scripted_orchestrator import ScriptedOrchestrator
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def forget(one: ScriptedOrchestrator) -> None:
    """Forget the node that is linked, as after the loss of the store; wait for it to be back."""
    one.unknown = 1
    count = len(one.links)
    await one.link.socket.close(1001)
    await one.is_linked(count + 2)


async def test_it_registers_once_more_with_the_slowest_of_its_links(
    one: ScriptedOrchestrator,
) -> None:
    one.peers = list(LINKS)
    async with linked_node(one.url):
        await one.is_linked()
    assert one.measured == [None, {"latency": 1e-2, "bandwidth": 1e8}]
    first, second = one.registrations
    assert first["incarnation"] == second["incarnation"]


async def test_it_says_once_that_it_is_registered_also_where_it_measures(
    one: ScriptedOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    one.peers = list(LINKS)
    caplog.set_level("INFO")
    async with linked_node(one.url):
        await one.is_linked()
    assert len(one.registrations) == 2
    told = [each.getMessage() for each in caplog.records]
    assert sum(each.startswith("registered with the orchestrator at") for each in told) == 1


async def test_alone_it_registers_once_and_has_nothing_to_measure(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url):
        await one.is_linked()
    assert one.measured == [None]


@pytest.mark.parametrize("error", [PeerLost("refused"), PeerMissing("silent")])
async def test_it_goes_on_with_the_others_where_one_cannot_be_measured(
    one: ScriptedOrchestrator, error: AllfoldError
) -> None:
    one.peers = ["gone:1", "near:1"]

    def probe(address: str) -> MeasuredLink:
        if address == "gone:1":
            raise error
        return LINKS[address]

    async with linked_node(one.url, probe=probe):
        await one.is_linked()
    assert one.measured == [None, {"latency": 1e-4, "bandwidth": 1e8}]


async def test_where_none_can_be_measured_it_goes_on_and_does_not_try_again(
    one: ScriptedOrchestrator,
) -> None:
    one.peers = ["gone:1", "gone:2"]
    asked: list[str] = []

    def probe(address: str) -> MeasuredLink:
        asked.append(address)
        raise PeerLost("refused")

    async with linked_node(one.url, probe=probe):
        await one.is_linked()
        await forget(one)
    assert one.measured == [None, None]
    assert asked == ["gone:1", "gone:2"]


async def test_registering_again_it_brings_the_link_and_does_not_measure_again(
    one: ScriptedOrchestrator,
) -> None:
    one.peers = ["near:1"]
    asked: list[str] = []

    def probe(address: str) -> MeasuredLink:
        asked.append(address)
        return LINKS[address]

    async with linked_node(one.url, probe=probe):
        await one.is_linked()
        await forget(one)
    measured = {"latency": 1e-4, "bandwidth": 1e8}
    assert one.measured == [None, measured, measured]
    assert asked == ["near:1"]


async def test_who_was_alone_measures_when_it_registers_again_and_others_are_there(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url):
        await one.is_linked()
        one.peers = ["far:1"]
        await forget(one)
    assert one.measured == [None, None, {"latency": 1e-2, "bandwidth": 1e9}]


async def test_while_it_holds_a_group_it_measures_nothing(one: ScriptedOrchestrator) -> None:
    one.peers = ["near:1"]
    async with linked_node(one.url, held=[GROUP]):
        await one.is_linked()
    assert one.measured == [None]
    assert one.registrations[0]["holds"] == {"train": 3}


async def test_a_probe_that_hangs_keeps_it_from_its_control_link_for_a_part_of_its_lease_only(
    one: ScriptedOrchestrator,
) -> None:
    one.peers = ["near:1", "far:1"]
    one.lease_seconds = 0.4
    over = Event()

    def probe(address: str) -> MeasuredLink:
        if address == "far:1":
            over.wait(30)
        return LINKS[address]

    try:
        async with linked_node(one.url, probe=probe):
            await one.is_linked()
            assert not over.is_set()
    finally:
        over.set()
    assert one.measured == [None, {"latency": 1e-4, "bandwidth": 1e8}]


async def test_an_error_that_nobody_foresaw_ends_no_tries_and_is_logged_once(
    one: ScriptedOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([KeyError("moon"), KeyError("moon")])

    def identify() -> Identity:
        for error in failures:
            raise error
        return IDENTITY

    async with linked_node(one.url, identify=identify) as node:
        await until(lambda: "KeyError('moon')" in str(node.registration.problem), "it says so")
        await one.is_linked()
    assert node.registration.problem is None
    told = [each for each in caplog.records if "moon" in each.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info, "the traceback is there for who has to mend it"
