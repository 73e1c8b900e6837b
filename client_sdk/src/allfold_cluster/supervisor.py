"""The supervisor of the services that a job has started for itself on one machine.

``python -m allfold_cluster.supervisor FOLDER SERVICES LOCK LISTENER [SERVING]`` is what
:mod:`allfold_cluster.job` starts, whose open files it inherits. It is no rank's child, and no
signal of a terminal reaches it. It starts the services as its children, which die with it, and
tells the ranks that connect when they are ready, and when one has ended. It ends some seconds after
the last rank has, and leaves nothing.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from allfold_cluster import Cluster
from allfold_cluster.http import NoAnswer
from allfold_cluster.job import JobRecord, JobServices
from allfold_cluster.job_folder import claiming
from allfold_cluster.processes import Child, wait_for
from allfold_cluster.signals import Interrupted, Interrupts
from allfold_core.errors import AllfoldError, ServiceError
from allfold_service.descriptors import allow_descriptors

log = logging.getLogger("allfold_cluster.supervisor")

# After the last rank: one that is started again at once finds the services there.
LINGER_SECONDS = 3.0
# The first one is there already, unless it was killed: it connects once it has started this.
_FIRST_SECONDS = 5.0
# A start ends when the last rank has given up waiting, each by a deadline of its own.
_START_SECONDS = 3600.0
# How often the orchestrator is asked who is left, once no rank of this machine is.
_ASK_SECONDS = 1.0
# Of its open files, beside two for each rank: for its services and their logs.
_OTHER_FILES = 32
_CREDENTIALS = struct.Struct("3i")


class Rank:
    """A connection, and the process at its other end.

    A child that the process has forked has the connection, too, and may live on: so it is the
    process that counts, where it can be seen.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.connected = connected
        packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, self.uid, _ = _CREDENTIALS.unpack(packed)
        self.process = -1
        with suppress(OSError):  # gone already, or in another namespace of processes
            self.process = os.pidfd_open(pid)

    def tell(self, news: bytes) -> None:
        """Send news, unless there are none, or the rank has gone or reads none."""
        if not news:  # which would look like the end of the connection
            return
        with suppress(OSError):
            self.connected.send(news, socket.MSG_DONTWAIT)

    def close(self) -> None:
        self.connected.close()
        if self.process >= 0:
            os.close(self.process)


class _Signals(Interrupts):
    """Signals, and whatever else ends a start of services that waits.

    Attributes:
        also: called wherever a signal would be raised; may raise itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.also: Callable[[], None] = lambda: None

    def raise_if_pending(self) -> None:
        super().raise_if_pending()
        self.also()


class _JobCluster(Cluster):
    """A cluster whose orchestrator inherits the socket on which it listens."""

    def __init__(self, serving: socket.socket | None, **options: Any) -> None:
        super().__init__(**options)
        self._serving = serving

    def start_module(
        self, name: str, command: Sequence[str], env: Mapping[str, str], output: int
    ) -> Child:
        """Let the orchestrator have the socket, once: where it has died, nobody listens."""
        if self._serving is None or name != "orchestrator":
            return super().start_module(name, command, env, output)
        with self._serving as serving:
            self._serving = None
            number = serving.fileno()
            whole = [sys.executable, "-P", "-m", *command, "--listen", f"fd://{number}"]
            return Child(name, whole, env=env, stdout=output, stderr=output, inherits=[number])


class Supervisor:
    """One job on one machine.

    Args:
        folder: of the services; it is removed in the end.
        listener: on which ranks connect.
        serving: on which the orchestrator listens; ``None`` where it runs elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        listener: socket.socket,
        services: JobServices,
        serving: socket.socket | None,
    ) -> None:
        self._folder = folder
        self._listener = listener
        self._services = services
        self._serving = serving
        self._ranks: dict[int, Rank] = {}  # by each of its descriptors
        self._most_files = allow_descriptors()
        self._has_come = False  # the first
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._news = b""
        self._ends_at = monotonic() + _FIRST_SECONDS
        self._is_over = False

    def run(self) -> None:
        """Start the services, and keep them for as long as there are ranks."""
        with _Signals() as interrupts, ExitStack() as ending:
            ending.callback(self._forget_all)
            try:
                interrupts.also = self._raise_if_abandoned
                cluster = ending.enter_context(self._cluster(interrupts))
                self._start(cluster)
                interrupts.also = lambda: None
                record = self._record(cluster)
                record.write()
                self._news = record.ready_news()
                for rank in set(self._ranks.values()):
                    rank.tell(self._news)
                self._serve(cluster, interrupts)
                self._await_other_nodes(cluster, interrupts)
            except Interrupted as interrupted:
                self._tell_end(ServiceError(f"{interrupted} has ended the services of this job"))
            except OSError as error:
                reason = f"the supervisor of this job's services has failed: {error}"
                self._tell_end(ServiceError(reason))
            except AllfoldError as error:
                self._tell_end(error)

    # --- starting

    def _cluster(self, interrupts: Interrupts) -> Cluster:
        services = self._services
        return _JobCluster(
            self._serving,
            listen=services.listen,
            address=lambda: f"{services.host}:0",
            interrupts=interrupts,
            orchestrator_url=services.orchestrator,
            folder=self._folder,
            seconds=_START_SECONDS,
        )

    def _start(self, cluster: Cluster) -> None:
        """Start both at once: the agent tries again until the orchestrator answers.

        It need not have: the agent tells ranks what keeps it from that, and this would not.
        """
        if self._services.serves:
            cluster.launch_orchestrator()
        cluster.launch_agent(self._services.node)
        if self._services.serves:
            cluster.await_orchestrator()
        cluster.await_agent(self._services.node, registered=False)

    def _record(self, cluster: Cluster) -> JobRecord:
        return JobRecord(
            self._services.job,
            cluster.orchestrator_url,
            cluster.token,
            cluster.agents[self._services.node].socket,
            str(self._folder),
        )

    # --- serving

    def _serve(self, cluster: Cluster, interrupts: Interrupts) -> None:
        """Return some seconds after the last rank has gone."""
        watched: dict[int, Child] = {each.fileno(): each for each in cluster.services}
        for descriptor in (interrupts.fileno(), *watched):
            self._poll.register(descriptor, select.POLLIN)
        while not self._is_over:
            for descriptor in self._attend(self._patience()):
                if descriptor in watched:
                    self._poll.unregister(descriptor)
                    self._note_end(cluster, watched.pop(descriptor))
            interrupts.raise_if_pending()
            if not self._ranks and monotonic() >= self._ends_at:
                self._close_if_alone()

    def _attend(self, seconds: float) -> list[int]:
        """Let ranks come and go once something happens; return the descriptors that are ready."""
        ready = [descriptor for descriptor, _ in self._poll.poll(seconds * 1000)]
        for descriptor in ready:
            if descriptor in self._ranks:
                self._forget(self._ranks[descriptor])
        # Last: a new connection may have the number of one that was closed just now.
        if self._listener.fileno() in ready:
            self._accept()
        return ready

    def _raise_if_abandoned(self) -> None:
        """While the services start, which may wait for another machine: is there anybody left?

        Nothing is kept for a rank that comes later: what has not started helps nobody.
        """
        while self._attend(0.0):
            pass
        if not self._ranks and (self._has_come or monotonic() >= self._ends_at):
            raise ServiceError("nobody is left for whom the services of this job start")

    def _patience(self) -> float:
        """Seconds until there is something to do without any news; at most a minute."""
        return 60.0 if self._ranks else max(0.0, self._ends_at - monotonic())

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        self._has_come = True
        rank = Rank(connected)
        if rank.uid != os.geteuid() and rank.uid != 0:
            log.warning("a process of uid %d was refused", rank.uid)
            rank.close()
            return
        if len(self._ranks) + _OTHER_FILES > self._most_files:
            rank.tell(_news_of(self._full()))
            rank.close()
            return
        for descriptor in (connected.fileno(), rank.process):
            if descriptor >= 0:
                self._ranks[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)
        rank.tell(self._news)

    def _full(self) -> ServiceError:
        return ServiceError(
            "the supervisor of this job's services takes no more ranks on this machine: each needs "
            f"two of its open files, of which it has {len(self._ranks)} for ranks already and may "
            f"have {self._most_files} in all; raise the hard limit (ulimit -Hn) of this job"
        )

    def _forget(self, rank: Rank) -> None:
        for descriptor in (rank.connected.fileno(), rank.process):
            if self._ranks.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)
        rank.close()
        self._ends_at = monotonic() + LINGER_SECONDS

    def _note_end(self, cluster: Cluster, service: Child) -> None:
        """A service has ended by itself: without its agent a job cannot go on."""
        report = cluster.end_report(service)
        if service is cluster.orchestrator:
            log.error("%s\nRunning ranks go on, but no rank can join and no node is judged", report)
            return
        raise ServiceError(report)

    def _tell_end(self, error: AllfoldError) -> None:
        """Tell the ranks, those also that have only just come; who comes later starts anew."""
        log.error("%s", error)
        if self._is_over:
            return
        with claiming(self._folder.parent):
            self._listener.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    self._accept()
            self._stop_listening()
        for rank in set(self._ranks.values()):
            rank.tell(_news_of(error))

    # --- the end

    def _close_if_alone(self) -> None:
        """Listen no more, unless a rank has just come."""
        with claiming(self._folder.parent):
            self._listener.setblocking(False)
            with suppress(BlockingIOError):
                self._accept()
            self._listener.setblocking(True)
            if not self._ranks:
                self._stop_listening()

    def _stop_listening(self) -> None:
        """Make room for another supervisor of the job; with the folder of jobs claimed."""
        if not self._is_over:
            self._is_over = True
            self._poll.unregister(self._listener)
            Path(self._listener.getsockname()).unlink(missing_ok=True)
            self._listener.close()

    def _await_other_nodes(self, cluster: Cluster, interrupts: Interrupts) -> None:
        """Keep the orchestrator for as long as nodes of other machines need it."""
        if not self._services.serves:
            return
        cluster.stop_agents(self._services.node)
        while not cluster.orchestrator_ended and _others_alive(cluster):
            wait_for([interrupts], _ASK_SECONDS)
            interrupts.raise_if_pending()

    def _forget_all(self) -> None:
        for rank in set(self._ranks.values()):
            rank.close()
        with claiming(self._folder.parent):
            self._stop_listening()
            shutil.rmtree(self._folder, ignore_errors=True)


def _news_of(error: AllfoldError) -> bytes:
    return json.dumps({"error": error.to_dict()}).encode()


def _others_alive(cluster: Cluster) -> bool:
    try:
        nodes = cluster.get(f"{cluster.orchestrator_url}/v1/nodes")["nodes"]
    except NoAnswer:
        return False
    return any(each["state"] == "alive" for each in nodes)


def main(arguments: list[str]) -> int:
    """Become the supervisor: its starter goes on as soon as this has left its process group."""
    services, inherited = JobServices.parse(arguments[1]), [*map(int, arguments[2:])]
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    for descriptor in inherited:
        os.set_inheritable(descriptor, False)
    with suppress(OSError):  # where the kernel allows fewer by now
        os.sched_setaffinity(0, services.cores)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    _lock, listener, *serving = inherited
    with socket.socket(fileno=listener) as listening:
        served = socket.socket(fileno=serving[0]) if serving else None
        Supervisor(Path(arguments[0]), listening, services, served).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
