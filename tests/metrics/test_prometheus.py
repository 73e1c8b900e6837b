"""A real Prometheus scrapes both services; its alerts fire on faults."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from urllib.error import HTTPError

import pytest

from allfold_cluster.http import post
from allfold_cluster.redis_server import RedisServer
from allfold_service.metrics import MetricType
from tests.metrics import programs
from tests.metrics.prometheus import Prometheus
from tests.support.processes.ranks import RankPool, results
from tests.support.processes.services import Services
from tests.support.require import requires
from tests.support.waiting import wait_until
from tools import grafana_dashboard
from tools.grafana_dashboard import Panel
from tools.metrics_page import METRICS

# Without a fault, or more nodes than there are, there is nothing to be shown.
QUIET = {
    "allfold_agent_send_limit_bytes",  # nobody has set a cap
    "allfold_orchestrator_token_limit",  # nor a limit of a token
    "allfold_orchestrator_token_open",
    "allfold_agent_incidents",
    "allfold_agent_retransmitted_segments_total",
    "allfold_orchestrator_incidents",
    "allfold_orchestrator_incident_info",
    # These are there with TLS alone: tests/e2e/test_tls.py.
    "allfold_agent_certificate_end_time_seconds",
    "allfold_orchestrator_certificate_end_time_seconds",
}
FOUR_RANKS = (0, 0, 1, 1)
ADMIN = "the-admins"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    requires("redis")
    requires("prometheus")
    server = RedisServer(tmp_path_factory.mktemp("redis"), is_durable=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def services(redis: RedisServer) -> Iterator[Services]:
    with Services(redis_url=redis.url, variables={"ALLFOLD_ADMIN_TOKEN": ADMIN}) as services:
        services.start_orchestrator()
        services.start_agents("node0", "node1")
        yield services


@pytest.fixture(scope="module")
def pool(services: Services) -> Iterator[RankPool]:
    with RankPool(services) as pool:
        yield pool


@pytest.fixture(scope="module")
def prometheus(
    services: Services, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), services) as prometheus:
        wait_until(
            lambda: (
                prometheus.targets() == {"allfold-orchestrator": "up", "node0": "up", "node1": "up"}
            ),
            "the orchestrator and the agents that it names are scraped",
        )
        yield prometheus


def served(services: Services, url: str) -> str:
    request = urllib.request.Request(
        f"{url}/metrics", headers={"Authorization": f"Bearer {services.token}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def test_a_job_is_seen(services: Services, pool: RankPool, prometheus: Prometheus) -> None:
    with pool.job(FOUR_RANKS) as job:
        job.run(programs.all_reduces, numel=4, times=50)
        job.run(programs.all_reduces, numel=1 << 18, times=5)
        group = f'{{group="{job.name}"'
        called = f'allfold_agent_collectives_total{group}, node="node0"}}'
        wait_until(lambda: prometheus.value(called) == 55, "the ops of both lanes are counted")
        in_lane = f'allfold_agent_collective_seconds_count{group}, lane="long", node="node0"}}'
        wait_until(lambda: len(prometheus.query(in_lane)) >= 1, "their seconds are counted")
        moved = f'sum(allfold_agent_edge_bytes_total{group}, node="node0", direction="out"}})'
        # Half a tensor goes to the other node, and half of the result; small ones go as a whole.
        wait_until(
            lambda: 5 << 20 <= (prometheus.value(moved) or 0.0) <= 6 << 20,
            "so many bytes have gone",
        )
        check_panels(prometheus)
        for url in (services.agents["node0"].control_url, services.orchestrator_url):
            text = served(services, url)
            checked = subprocess.run(
                ["promtool", "check", "metrics"],
                input=text,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert checked.returncode == 0, checked.stdout + checked.stderr
    wait_until(
        lambda: not prometheus.query(f"allfold_agent_group_ranks{group}}}"),
        "the series of a group that is over are gone",
    )


def test_rounds_are_counted_with_the_ranks_they_did_not_wait_for(
    services: Services, pool: RankPool
) -> None:
    """Of three rounds, two do not wait for the rank of node1."""
    with pool.job((0, 0, 1)) as job:
        for _ in range(2):
            assert all(results([job.start(rank, programs.round_, quorum=2) for rank in (0, 1)]))
        assert not any(job.start(2, programs.round_, quorum=2).result() for _ in range(2))
        assert all(job.run(programs.round_, quorum=3))
        for node, late in (("node0", 0.0), ("node1", 2.0)):
            lines = served(services, services.agents[node].control_url).splitlines()
            counted = {f'rounds_total{{group="{job.name}"}}': 3.0}
            counted[f'round_late_ranks_total{{group="{job.name}"}}'] = late
            for name, value in counted.items():
                found = [each for each in lines if each.startswith(f"allfold_agent_{name} ")]
                assert [float(each.split()[-1]) for each in found] == [value]


def check_panels(prometheus: Prometheus) -> None:
    """Every metric has series, and every panel can be drawn."""

    def lacking() -> list[str]:
        served = (each for each in METRICS if each.name not in QUIET)
        names = [m.series[-1] if m.type is MetricType.HISTOGRAM else m.name for m in served]
        return [name for name in names if not prometheus.query(name)]

    wait_until(lambda: not lacking(), f"all metrics have series: {lacking()}")
    for panel, asked in queries():
        found = partial(prometheus.query, asked)
        if asked.endswith("> 0") or {each.name for each in panel.metrics} & QUIET:
            found()
        else:
            wait_until(found, f"{panel.title} has data: {asked}")


def queries() -> Iterator[tuple[Panel, str]]:
    """The expressions of the dashboard, as Grafana asks them."""
    for panel in (panel for row in grafana_dashboard.ROWS.values() for panel in row):
        for expression, _ in panel.queries:
            yield panel, expression.replace("$__rate_interval", "30s").replace("$group", ".*")


def test_nobody_reads_metrics_without_the_token(services: Services) -> None:
    for url in (services.agents["node0"].control_url, services.orchestrator_url):
        for path in ("/metrics", "/v1/metrics/targets"):
            with pytest.raises(HTTPError) as refused:
                urllib.request.urlopen(f"{url}{path}", timeout=30)
            with refused.value:
                assert refused.value.code == 401


@pytest.mark.long
def test_ranks_that_wait_for_one_raise_alerts(pool: RankPool, prometheus: Prometheus) -> None:
    await_silence(prometheus)
    with pool.job(FOUR_RANKS, timeout=60.0) as job:
        waiting = [job.start(rank, programs.all_reduces, numel=4, times=1) for rank in range(3)]
        prometheus.await_alert("AllfoldOpWaits", group=job.name)
        culprit = "rank 3 on node node1"
        prometheus.await_alert("AllfoldIncident", cause="late_rank", culprit=culprit)
        (found,) = prometheus.query(f'allfold_orchestrator_incident_info{{culprit="{culprit}"}}')
        assert f"of group '{job.name}'" in found["metric"]["sentence"]
        for panel, asked in queries():
            if "_incidents" in asked:
                assert prometheus.query(asked), panel.title
        last = job.start(3, programs.all_reduces, numel=4, times=1)
        assert [call.result() for call in [*waiting, last]] == [4.0] * 4
    await_silence(prometheus)


def test_a_rank_that_is_always_late_raises_an_alert(pool: RankPool, prometheus: Prometheus) -> None:
    with pool.job(FOUR_RANKS, timeout=60.0) as job:
        until = time.time() + 8.0
        calls = job.start_all(programs.late_all_reduces, late=1, until=until)
        prometheus.await_alert("AllfoldRanksWaitForEachOther", group=job.name, node="node0")
        assert len(set(results(calls))) == 1
    await_silence(prometheus)


def test_a_group_that_does_not_form_raises_an_alert(
    services: Services, pool: RankPool, prometheus: Prometheus
) -> None:
    with pool.unregistered(FOUR_RANKS) as job:
        calls = job.start_entering(services, ranks=range(3), init_timeout=60.0)
        prometheus.await_alert("AllfoldGroupDoesNotForm")
        job.entered([*calls, *job.start_entering(services, ranks=[3], init_timeout=60.0)])
    await_silence(prometheus)


def test_an_agent_that_does_not_answer_raises_alerts(
    services: Services, prometheus: Prometheus
) -> None:
    pid = services.agents["node1"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        prometheus.await_alert("AllfoldAgentDown", node="node1")
        prometheus.await_alert("AllfoldNodeSilent", node="node1")
    finally:
        os.kill(pid, signal.SIGCONT)
    await_silence(prometheus)


@pytest.mark.long
def test_an_agent_that_gets_no_cpu_raises_an_alert(
    services: Services, prometheus: Prometheus
) -> None:
    with interrupted(services.agents["node1"].pid, 0.8, between=0.8):
        prometheus.await_alert("AllfoldAgentLags", node="node1")
    await_silence(prometheus)


def test_an_orchestrator_that_is_down_raises_alerts(
    services: Services, prometheus: Prometheus
) -> None:
    services.kill_orchestrator()
    prometheus.await_alert("AllfoldOrchestratorDown")
    prometheus.await_alert("AllfoldAgentNotReady", node="node0")
    services.start_orchestrator()
    services.await_all_registered()
    await_silence(prometheus)


@pytest.mark.long
def test_a_store_that_is_down_raises_alerts_and_metrics_are_still_served(
    services: Services, redis: RedisServer, prometheus: Prometheus
) -> None:
    redis.stop()
    prometheus.await_alert("AllfoldStoreDown")
    prometheus.await_alert("AllfoldIncident", cause="store_failed")
    assert prometheus.value("allfold_orchestrator_store_up") == 0
    assert (prometheus.value("allfold_orchestrator_store_failures_total") or 0) > 0
    assert prometheus.targets()["allfold-orchestrator"] == "up"
    redis.start()
    services.await_all_registered()
    await_silence(prometheus)


@pytest.mark.long
def test_a_slow_store_raises_an_alert(redis: RedisServer, prometheus: Prometheus) -> None:
    with interrupted(redis.pid, 0.5, between=0.125):
        prometheus.await_alert("AllfoldStoreSlow")
    await_silence(prometheus)


@pytest.mark.long
def test_a_node_that_drains_while_it_has_ranks_raises_an_alert(
    services: Services, pool: RankPool, prometheus: Prometheus
) -> None:
    with pool.job((1,)):
        post(f"{services.orchestrator_url}/v1/nodes/node1/drain", ADMIN)
        prometheus.await_alert("AllfoldAgentDrains", node="node1")
    services.kill_agent("node1")  # drains until its end
    services.restart_dead_agents()
    await_silence(prometheus)


def test_a_lost_node_and_ops_that_fail_raise_alerts(
    services: Services, pool: RankPool, prometheus: Prometheus
) -> None:
    with pool.unregistered(FOUR_RANKS) as job:
        job.enter(services, on_loss="raise", timeout=30.0)
        job.run(programs.all_reduces, numel=4, times=1)
        waiting = job.start(0, programs.all_reduces, numel=4, times=1)
        services.kill_agent("node1")
        prometheus.await_alert("AllfoldNodeLost")
        prometheus.await_alert("AllfoldOpsFail", node="node0", code="AF301")
        assert waiting.failure().error.code == "AF301"
    services.restart_dead_agents()


def await_silence(prometheus: Prometheus) -> None:
    wait_until(lambda: prometheus.firing() == [], "no alert fires any more", 60.0)


@contextmanager
def interrupted(pid: int, seconds: float, between: float) -> Iterator[None]:
    """A process that stands still for so long, again and again, with so many seconds between."""
    over = Event()

    def interrupt() -> None:
        while not over.wait(between):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    interrupting = Thread(target=interrupt)
    interrupting.start()
    try:
        yield
    finally:
        over.set()
        interrupting.join()
