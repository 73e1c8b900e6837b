"""A Redis master, a replica of it, and three Sentinels that put the replica in its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from allfold_cluster.environment import free_port
from allfold_cluster.processes import Child, stop_all
from allfold_cluster.redis_server import RedisServer
from tests.support.waiting import wait_until

NAME = "mymaster"
_START_SECONDS = 20.0
_CONFIGURATION = """\
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor {name} 127.0.0.1 {master} 2
sentinel down-after-milliseconds {name} 500
sentinel failover-timeout {name} 4000
"""


class WatchedRedis:
    """Ready once entered: all Sentinels know each other and the replica, which is up to date."""

    def __init__(self, folder: Path) -> None:
        self._folders = [folder / name for name in ("one", "two")]
        for each in self._folders:
            each.mkdir()
        self._folder = folder
        self.master = RedisServer(self._folders[0], is_durable=True)
        # Or the master would wait for others, who may come at once, before it copies itself.
        source = ["--replicaof", f"127.0.0.1 {self.master.port}", "--repl-diskless-sync-delay", "0"]
        self.replica = RedisServer(self._folders[1], options=source)
        self._ports = [free_port() for _ in range(3)]
        self._sentinels: list[Child] = []

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"redis+sentinel://{hosts}/{NAME}"

    def __enter__(self) -> Self:
        try:
            self.master.start()
            self.replica.start()
            for port in self._ports:
                self._start_sentinel(port)
            wait_until(self._is_whole, "the Sentinels know each other", _START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._sentinels:
            child.signal(signal.SIGKILL)
        stop_all(self._sentinels)
        self.replica.stop()
        self.master.stop()

    def await_failover(self) -> None:
        """Return once every Sentinel has the replica as the master."""
        wait_until(
            lambda: {self._known(port).get("port") for port in self._ports} == {self.replica.port},
            "the replica is the master",
            _START_SECONDS,
        )

    def replica_is_up_to_date(self) -> bool:
        """Return True if the replica has all that the master has acknowledged until now."""
        with Redis(port=self.master.port, socket_timeout=1.0) as client:
            return bool(client.wait(1, 100))

    def _start_sentinel(self, port: int) -> None:
        file = self._folder / f"sentinel{port}.conf"
        file.write_text(
            _CONFIGURATION.format(
                port=port, folder=self._folder, name=NAME, master=self.master.port
            )
        )
        with (self._folder / f"sentinel{port}.log").open("wb") as log:
            command = ["redis-server", str(file), "--sentinel"]
            self._sentinels.append(
                Child(f"sentinel {port}", command, env=os.environ, stdout=log, stderr=log)
            )

    def _is_whole(self) -> bool:
        counts = ("num-slaves", "num-other-sentinels")
        known = [self._known(port) for port in self._ports]
        return all([each.get(name) for name in counts] == [1, 2] for each in known) and (
            self._replica_is_linked()
        )

    def _replica_is_linked(self) -> bool:
        with Redis(port=self.replica.port, socket_timeout=1.0) as client:
            found = client.info("replication")
        return bool(found.get("master_link_status") == "up")

    @staticmethod
    def _known(port: int) -> dict[str, object]:
        """Return what a Sentinel knows of the master; nothing if it does not answer."""
        try:
            with Redis(port=port, socket_timeout=1.0) as client:
                found: dict[str, object] = client.sentinel_master(NAME)
                return found
        except RedisError:
            return {}
