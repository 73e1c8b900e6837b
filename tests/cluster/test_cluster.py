"""A whole Allfold on this machine, as a library: it comes up, serves, and goes without a trace."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from allfold_cluster import Cluster
from allfold_core.errors import InvalidArgument, ServiceError

pytestmark = pytest.mark.slow


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="af") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.long
def test_a_cluster_serves_while_entered_and_leaves_nothing_after_a_failure(temporary: Path) -> None:
    with pytest.raises(ZeroDivisionError), Cluster() as cluster:
        cluster.start(2)
        assert list(cluster.agents) == ["node0", "node1"]
        for number in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
                rank.connect(cluster.environment(f"node{number}")["ALLFOLD_SOCKET"])
        assert [service.status for service in cluster.services] == [None] * 3
        url, killed = cluster.orchestrator_url, cluster.agents["node1"]
        cluster.kill_agent("node1")
        cluster.kill_orchestrator()
        cluster.start_orchestrator()
        cluster.start_agents("node1", "late")
        cluster.await_all_registered()
        assert cluster.orchestrator_url == url
        assert cluster.agents["node1"].pid != killed.pid
        _ = 1 / 0
    # They ended when they were told to, and were not killed.
    assert {service.status for service in cluster.services} <= {0, 128 + signal.SIGTERM}
    assert list(temporary.iterdir()) == []


def test_a_cluster_that_is_not_up_in_time_tells_what_its_services_said(temporary: Path) -> None:
    with (
        pytest.raises(ServiceError, match=r"waited 0\.1 s for orchestrator to be ready"),
        Cluster(seconds=0.1) as cluster,
    ):
        cluster.start()
    assert list(temporary.iterdir()) == []


def test_a_temporary_folder_with_a_long_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(InvalidArgument, match="TMPDIR to a shorter folder"), Cluster() as cluster:
        cluster.start()
    assert list(long.iterdir()) == []
