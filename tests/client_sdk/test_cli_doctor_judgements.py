"""The judgements of ``allfold doctor`` on limits, addresses, clocks, ports and links."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from allfold.cli._asking import Offset
from allfold.cli._doctor.findings import CheckFinding, Diagnosis, Level
from allfold.cli._doctor.machine import judge_machine
from allfold.cli._doctor.nodes import judge_addresses, judge_clocks, judge_nodes, leading_astray
from allfold.cli._doctor.pairs import NodePlace, PairCheck, check_pairs, judge_pairs, rounds

GIB = 1 << 30
MACHINE = {
    "open_files": {"soft": 65536, "hard": 65536, "used": 20},
    "locked_memory": {"soft": None, "hard": None},
    "processes": {"soft": None, "hard": None},
    "threads": {"limit": None, "used": None},
    "memory": {"total": 16 * GIB, "available": 8 * GIB, "limit": None, "used": None},
}


def node(name: str, host: str = "10.0.0.1", **more: Any) -> dict[str, Any]:
    addresses = {
        "control_url": f"http://{host}:7411",
        "data_address": f"{host}:7412",
        "why": "ALLFOLD_AGENT_ADVERTISE or --advertise",
    }
    versions = {"allfold": version("allfold"), "python": "3.11.7", "numpy": "2.0", "torch": "2.4"}
    gpu = {"setting": "auto", "names": {}, "reason": "there is no NVIDIA driver", "driver": False}
    return {
        "node": name, "ready": True, "waiting_for": "", "addresses": addresses, "memfd": "",
        "machine": MACHINE, "versions": versions, "gpu": gpu, "orchestrator": "http://o:7400",
    } | more  # fmt: skip


def bad(findings: list[CheckFinding]) -> dict[str, str]:
    """Check: text of the findings that are not fine."""
    return {each.check: each.found for each in findings if each.level != Level.OK}


# --- limits


def test_a_machine_with_enough_of_everything_is_fine() -> None:
    (finding,) = judge_machine("here", MACHINE, "")
    assert finding.level == Level.OK
    assert "open files 20 of 65536, memory 8.0 GiB available of 16.0 GiB" in finding.found


@pytest.mark.parametrize(
    ("limits", "check", "text"),
    [
        ({"open_files": {"soft": 256, "hard": 1024, "used": 9}}, "open files", "at most 1024"),
        ({"open_files": {"soft": 100, "hard": 9999, "used": 90}}, "open files", "90 of 100"),
        ({"threads": {"limit": 200, "used": 150}}, "threads", "150 of 200 threads"),
        ({"processes": {"soft": 64, "hard": 64}}, "threads", "at most 64 threads"),
        (
            {"memory": {"total": GIB, "available": GIB, "limit": GIB, "used": GIB - (1 << 20)}},
            "memory",
            "1023.0 MiB of 1.0 GiB, the limit of the cgroup",
        ),
        (
            {"memory": {"total": GIB, "available": 9, "limit": None, "used": None}},
            "memory",
            "9 B of 1.0 GiB are available",
        ),
    ],
)
def test_a_limit_that_is_near_is_a_warning(limits: dict[str, Any], check: str, text: str) -> None:
    (finding,) = judge_machine("here", MACHINE | limits, "")
    assert (finding.level, finding.check) == (Level.WARN, check)
    assert text in finding.found


def test_no_shared_memory_is_a_failure() -> None:
    (finding,) = judge_machine("here", MACHINE, "Operation not permitted")
    assert (finding.level, finding.check) == (Level.FAIL, "shared memory")


# --- nodes


def judged(*nodes: dict[str, Any]) -> dict[str, str]:
    diagnosis = Diagnosis(nodes={each["node"]: each for each in nodes})
    return bad(list(judge_nodes(diagnosis, set())))


A, B = "http://10.0.0.1:7411", "http://10.0.0.2:7411"
HERE, ALSO_HERE = "http://127.0.0.1:7411", "http://localhost:7421"


@pytest.mark.parametrize(
    ("urls", "astray"),
    [
        ({"a": A, "b": B}, set()),
        ({"a": HERE}, set()),
        ({"a": HERE, "b": ALSO_HERE}, set()),  # all on one machine
        ({"a": A, "b": HERE}, {"b"}),
        ({"a": A, "b": ALSO_HERE, "c": HERE}, {"b", "c"}),
        ({"a": HERE, "b": HERE}, {"a", "b"}),  # each on a machine of its own
        ({"a": A, "b": A, "c": B}, {"a", "b"}),
    ],
)
def test_addresses_that_lead_others_elsewhere_are_found(
    urls: dict[str, str], astray: set[str]
) -> None:
    assert leading_astray(urls) == astray
    told = {each.where: each.found for each in judge_addresses(urls, astray)}
    assert told.keys() == {f"node {node}" for node in astray}
    assert all(urls[node] in told[f"node {node}"] for node in astray)


def test_services_of_different_versions_fail() -> None:
    other = {"allfold": "0.0.9", "python": "3.11.7", "numpy": "2.0", "torch": "2.4"}
    ours = version("allfold")
    assert judged(node("a"), node("b", versions=other))["versions"] == (
        f"this machine: {ours}; node a: {ours}; node b: 0.0.9"
    )
    assert judged(node("a", versions=other))["versions"].startswith(f"this machine: {ours}; ")


def test_an_agent_that_cannot_register_says_why() -> None:
    told = judged(node("a", ready=False, waiting_for="the token is not the orchestrator's"))
    assert told["registration"] == "the token is not the orchestrator's"


def test_a_driver_without_a_gpu_that_the_agent_uses_is_a_warning() -> None:
    gpu = {"setting": "auto", "names": {}, "reason": "cuda-bindings is missing", "driver": True}
    assert "cuda-bindings is missing" in judged(node("a", gpu=gpu))["GPU"]
    assert judged(node("a", gpu=gpu | {"setting": "off"})) == {}


def test_clocks_are_compared_with_the_orchestrators_and_not_with_ours() -> None:
    ours_is_late = Offset(5.0, 0.001)
    assert bad(list(judge_clocks(ours_is_late, {"a": Offset(5.01, 0.001)}))) == {}
    told = bad(list(judge_clocks(ours_is_late, {"a": Offset(2.0, 0.001)})))
    assert told == {"clock": "is 3 s behind the orchestrator's"}


def test_what_a_round_trip_leaves_open_is_not_taken_for_an_offset() -> None:
    assert bad(list(judge_clocks(None, {"a": Offset(0.3, 0.25)}))) == {}
    told = bad(list(judge_clocks(None, {"a": Offset(0.4, 0.25)})))
    assert told == {"clock": "is 0.4 s ahead of this machine's"}


# --- ports and links


def place(name: str) -> NodePlace:
    return NodePlace(name, f"http://{name}:7411", f"{name}:7412", f"http://{name}:7411")


def outcome(source: str, target: str, bandwidth: float = 1e9, **more: Any) -> PairCheck:
    data = {"ok": True, "latency": 50e-6, "bandwidth": bandwidth, "path": "network"}
    answer = {"control": {"ok": True, "seconds": 0.001}, "data": data} | more
    return PairCheck(place(source), place(target), answer)


SILENT = {"ok": False, "kind": "silent", "problem": "timed out"}


@pytest.mark.parametrize("names", ["", "a", "ab", "abc", "abcd", "abcdefg"])
def test_every_ordered_pair_is_checked_once_and_nobody_twice_at_a_time(names: str) -> None:
    every = [
        [(one.node, other.node) for one, other in each]
        for each in rounds([place(name) for name in names])
    ]
    assert sorted(pair for each in every for pair in each) == [
        (a, b) for a in names for b in names if a != b
    ]
    for each in every:
        busy = [name for pair in each for name in pair]
        assert len(busy) == len(set(busy))


def test_a_port_that_nobody_reaches_is_one_finding_with_its_number() -> None:
    failed = [outcome(source, "b", data=SILENT) for source in "ac"]
    (finding,) = (
        each for each in judge_pairs([*failed, outcome("b", "a")]) if each.level == Level.FAIL
    )
    assert finding.check == "data port"
    assert finding.found == "no other node (asked: a, c) reaches b:7412: timed out"
    assert "let TCP port 7412 through" in finding.advice


def test_a_port_that_some_reach_names_those_that_do_not() -> None:
    told = bad(list(judge_pairs([outcome("a", "b", control=SILENT), outcome("c", "b")])))
    assert told["control port"] == "a cannot reach b:7411: timed out"


def test_a_node_that_could_not_be_asked_is_not_taken_for_a_good_one() -> None:
    missing = PairCheck(place("b"), place("a"), "the agent of node b was not reached")
    findings = list(judge_pairs([missing]))
    assert [(each.level, each.where) for each in findings] == [(Level.SKIPPED, "b -> a")]


def test_a_link_that_carries_much_less_than_the_best_is_a_warning() -> None:
    found = [outcome("a", "b", 100e6), outcome("b", "a", 20e6)]
    assert bad(list(judge_pairs(found))) == {
        "link speed": "carries 20 MB/s; the fastest link carries 100 MB/s"
    }


def test_fast_links_may_differ() -> None:
    assert bad(list(judge_pairs([outcome("a", "b", 4e9), outcome("b", "a", 0.5e9)]))) == {}


def test_memory_between_agents_of_one_machine_is_no_measure_for_networks() -> None:
    local = {"ok": True, "latency": 9e-6, "bandwidth": 9e9, "path": "machine"}
    assert bad(list(judge_pairs([outcome("a", "b", data=local), outcome("b", "a", 60e6)]))) == {}


def test_pairs_for_which_there_is_no_time_are_not_checked() -> None:
    outcomes = check_pairs([place("a"), place("b")], "", thorough=False, deadline=0.0)
    findings = list(judge_pairs(outcomes))
    assert [each.level for each in findings] == [Level.SKIPPED]
    assert findings[0].where == "a -> b, b -> a"
    assert "--timeout" in findings[0].found


def test_memory_is_not_judged_as_a_link() -> None:
    busy = {"ok": True, "latency": 0.02, "bandwidth": 1e6, "path": "machine"}
    assert bad(list(judge_pairs([outcome("a", "b", data=busy), outcome("b", "a")]))) == {}


def test_a_long_link_among_short_ones_is_a_warning() -> None:
    far = {"ok": True, "latency": 0.02, "bandwidth": 1e9, "path": "network"}
    told = bad(list(judge_pairs([outcome("a", "b"), outcome("a", "c", data=far)])))
    assert told == {"link latency": "takes 20.0 ms; the shortest link takes 50 us"}
