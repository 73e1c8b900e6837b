"""``allfold doctor`` on networks of our own: a port that is filtered, a link that is slow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from allfold_cluster.network import Network, why_not
from allfold_cluster.network.links import INTERFACE, NetworkCluster, connected
from allfold_cluster.network.namespaces import Namespaces, entered, ip, tc
from tests.support.require import required

pytestmark = pytest.mark.slow

FAST, SLOW = Network.parse("1gbit"), "20mbit"


@dataclass(frozen=True)
class Nodes:
    """Two nodes with a network between them."""

    spaces: Namespaces
    stack: NetworkCluster

    def doctor(self, *options: str, status: int) -> dict[str, Any]:
        """The report of a doctor that runs where the orchestrator is."""
        with entered(self.spaces.switch):
            done = subprocess.run(
                [sys.executable, "-m", "allfold.cli", "doctor", "--json", *options],
                env=os.environ | self.stack.environment(),
                capture_output=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == status, done.stderr
        return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # Docker needs what they need: where it must be here, these tests must run.
    reason = why_not([FAST])
    if reason is None and shutil.which("iptables") is None:
        reason = "filtering a port needs iptables"
    if reason:
        if "docker" in required():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with Namespaces(2) as spaces, connected(FAST, spaces), NetworkCluster(spaces) as stack:
        stack.start(2)
        yield Nodes(spaces, stack)


def iptables(namespace: str, *arguments: str) -> None:
    with entered(namespace):
        subprocess.run(["iptables", "--wait", *arguments], check=True, timeout=30)


def bad(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (each["level"], each["check"], each["where"])
        for each in report["findings"]
        if each["level"] in ("warn", "fail")
    ]


@pytest.mark.long
def test_nodes_on_a_network_are_fine_and_their_links_measured(nodes: Nodes) -> None:
    report = nodes.doctor(status=0)
    assert bad(report) == []
    assert {each["path"] for each in report["links"]} == {"network"}
    assert len(report["links"]) == 2


@pytest.mark.long
def test_a_port_that_is_filtered_is_named_with_the_node(nodes: Nodes) -> None:
    target = nodes.spaces.nodes[1]
    port = nodes.stack.agents["node1"].data_address.rpartition(":")[2]
    rule = ("INPUT", "-p", "tcp", "--dport", port, "-j", "DROP")
    iptables(target, "-A", *rule)
    try:
        report = nodes.doctor(status=1)
    finally:
        iptables(target, "-D", *rule)
    assert bad(report) == [("fail", "data port", "node node1")]
    (finding,) = (each for each in report["findings"] if each["level"] == "fail")
    assert f"let TCP port {port} through the firewalls" in finding["advice"]


@pytest.mark.long
def test_packets_that_are_too_large_for_the_way_are_told_from_a_filter(nodes: Nodes) -> None:
    port_of_node_0 = ("-n", nodes.spaces.switch, "link", "set", "port0", "mtu")
    # What TCP leaves to the interface to cut would pass the switch in one piece.
    cutting = ("-n", nodes.spaces.nodes[1], "link", "set", INTERFACE, "gso_max_segs")
    ip(*port_of_node_0, "600")
    ip(*cutting, "1")
    try:
        report = nodes.doctor(status=1)
    finally:
        ip(*port_of_node_0, "1500")
        ip(*cutting, "65535")
    (finding,) = (each for each in report["findings"] if each["check"] == "data port")
    assert finding["found"].startswith("node1 cannot reach") or "asked: node0" in finding["found"]
    assert "the MTU of an interface on the way" in finding["advice"]


@pytest.mark.long
def test_a_slow_link_is_named_with_its_direction(nodes: Nodes) -> None:
    slow = nodes.spaces.nodes[1]
    bucket = ("tbf", "rate", SLOW, "burst", "40000", "limit", "400000")
    tc(slow, "qdisc", "replace", "dev", INTERFACE, "root", *bucket)
    try:
        report = nodes.doctor(status=0)
    finally:
        usual = ("tbf", "rate", "1gbit", "burst", "40000", "limit", "4000000")
        tc(slow, "qdisc", "replace", "dev", INTERFACE, "root", *usual)
    assert bad(report) == [("warn", "link speed", "node node1 -> node node0")]
