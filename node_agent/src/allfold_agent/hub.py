"""The local socket: hears every rank of this machine, in the reactor's thread."""

from __future__ import annotations

import logging
import os
import socket
import struct
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from time import monotonic
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from allfold_agent.gpu.device import RankMemory
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.group import Group
from allfold_agent.held_calls import HeldCalls, refuse
from allfold_agent.ranks import Call, Membership, RankProcess
from allfold_agent.reactor import READABLE, WRITABLE, Reactor
from allfold_agent.watch import Watch
from allfold_agent.workers import WorkerPool
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    MultipleUnregister,
    RegisterNotFirstOperation,
)
from allfold_core.local_wire import (
    MAX_MESSAGE,
    NO_FENCE,
    PROTOCOL_VERSION,
    SEGMENT,
    Message,
    OpMessage,
    PairMessage,
    check_timeout,
    pack_json,
    unpack_json,
)

log = logging.getLogger(__name__)

PROCESS_ENDED = "its process ended without leaving the group"
GAVE_UP = "it left the group while ops of its own were in flight"
_DESCRIPTOR = struct.Struct("i")
_ONE_DESCRIPTOR = socket.CMSG_LEN(_DESCRIPTOR.size)
_TICK_SECONDS = 0.05  # how late a deadline may be noticed
_LEAST_SECONDS = 0.001


class Registrar(Protocol):
    """What the hub needs of the control plane. None of these may wait."""

    def join(self, request: dict[str, Any]) -> Future[Group]:
        """Seat a rank; resolves to the group when the plan is there.

        Cancelling the future gives the seat back, unless it was resolved before.
        """

    def leave(self, membership: Membership) -> Future[None]:
        """A rank leaves in order; resolves when its seat is free for another registration."""

    def lose(self, membership: Membership, reason: str = PROCESS_ENDED) -> None:
        """A rank has died, or can go on no more."""

    def groups(self) -> list[Group]:
        """The groups on this node."""

    def suspect(self, group: Group, seq: int, reason: str, waited: float = 0.0) -> None:
        """An op has stalled, or missed its deadline."""


@dataclass(frozen=True, slots=True)
class _Join:
    """A join that has an outcome."""

    process: RankProcess
    request: dict[str, Any]
    done: Future[Group]


class Hub:
    """Accepts ranks, reads their messages, starts their ops, watches the ops' deadlines.

    Args:
        path: of the socket.
        registrar: the control plane.
        welcome: what every rank is told.
        reactor: whose thread does all this.
        workers: for what takes longer.
        watch: sees when a GPU of a rank comes to a call.
        gpus: whose memory ranks may share.
    """

    def __init__(
        self,
        path: str,
        registrar: Registrar,
        welcome: dict[str, Any],
        *,
        reactor: Reactor,
        workers: WorkerPool,
        watch: Watch,
        gpus: Gpus,
    ) -> None:
        self._path = path
        self._registrar = registrar
        self._welcome = {**welcome, **gpus.welcome(), "protocol": PROTOCOL_VERSION}
        self._reactor = reactor
        self._workers = workers
        self._held = HeldCalls(reactor, watch, self._submit, registrar.suspect)
        self._gpus = gpus
        self._processes: dict[int, RankProcess] = {}
        self._numbers: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
        self._next_number = count()
        self._watching = False  # whether a look at the deadlines is due
        self._listener = _listen(path)
        reactor.register(self._listener, lambda _: self._accept())

    def close(self) -> None:
        """Remove the socket; the reactor has ended."""
        for process in self._processes.values():
            process.close()
        self._listener.close()
        Path(self._path).unlink(missing_ok=True)

    @property
    def processes(self) -> list[int]:
        """The pids of the connected processes."""
        return [process.pid for process in list(self._processes.values())]

    # The connections

    def _serve(self, process: RankProcess, events: int) -> None:
        if events & WRITABLE and process.flush():
            self._reactor.modify(process.socket, READABLE)
            if process.has_unsent:  # since then; its wish to write was just taken back
                self._want_write(process)
        if events & ~WRITABLE:
            self._read(process)

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        connected.setblocking(False)
        process = RankProcess(connected, self._want_write)
        self._processes[connected.fileno()] = process
        self._reactor.register(connected, lambda events: self._serve(process, events))

    def _want_write(self, process: RankProcess) -> None:
        try:
            self._reactor.modify(process.socket, READABLE | WRITABLE)
        except (OSError, ValueError) as error:
            log.debug("process %d is gone: %s", process.pid, error)

    def _watch_deadlines(self) -> None:
        """Look at the deadlines from time to time, as long as anything waits."""
        if not self._watching:
            self._watching = True
            self._reactor.later(_TICK_SECONDS, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._watching = False
        now = monotonic()
        for group in self._registrar.groups():
            if group.waiting:
                self._watch_deadlines()
            group.pairs.expire(now)
            for op, reason in group.overdue(now):
                self._registrar.suspect(group, op.seq, reason, op.timeout)

    # Messages

    def _read(self, process: RankProcess) -> None:
        """Read one message; where more are there, the socket is still ready."""
        try:
            data, beside, _, _ = process.socket.recvmsg(MAX_MESSAGE, _ONE_DESCRIPTOR)
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("process %d: %s", process.pid, error)
            data, beside = b"", []
        descriptors = _descriptors(beside) if beside else []
        if not data:
            self._gone(process)
            return
        try:
            self._message(process, data, descriptors)
        except (ValueError, struct.error) as error:
            log.error("process %d does not speak our protocol: %s", process.pid, error)
            self._gone(process)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _message(self, process: RankProcess, data: bytes, descriptors: list[int]) -> None:
        if data[0] == Message.OP:
            self._call(process, OpMessage.unpack(data))
        elif data[0] in (Message.SEND, Message.RECV):
            self._call(process, PairMessage.unpack(data))
        else:
            self._answer(process, data, descriptors)

    # Calls, in the order in which a process makes them

    def _call(self, process: RankProcess, message: Call) -> None:
        """Begin a call, unless its memory, or that of one before it, is still in use by a GPU."""
        if message.fence is NO_FENCE and not process.held:
            self._submit(process, message)
            return
        try:
            check_timeout(message.timeout)
            passed = process.has_passed(message.fence)
        except InvalidArgument as error:
            refuse(process, message, error)
            return
        if passed and not process.held:
            self._submit(process, message)
        else:
            self._held.hold(process, message)

    def _submit(self, process: RankProcess, message: Call, called: float | None = None) -> None:
        """Hand a call to its group, which the rank made at some time before, if not just now."""
        membership = process.memberships.get(message.group)
        if membership is None:
            error = RegisterNotFirstOperation("this process is not in the group of its call")
            refuse(process, message, error)
            return
        self._watch_deadlines()
        group, rank = membership.group, membership.rank
        if isinstance(message, OpMessage):
            group.submit(rank, process, message.group, message, called)
            return
        if called is not None:
            left = max(called + message.timeout - monotonic(), _LEAST_SECONDS)
            message = message._replace(timeout=left)
        group.pairs.submit(rank, process, message.group, message)

    def _answer(self, process: RankProcess, data: bytes, descriptors: list[int]) -> None:
        """Do what a rare message asks; what goes wrong is answered, with the request's number."""
        body: dict[str, Any] = {}
        try:
            if data[0] == Message.SEGMENT:
                self._segment(process, data, descriptors)
                return
            body = unpack_json(data)
            self._control(process, data[0], body, descriptors)
        except AllfoldError as error:
            self._refuse(process, body, error)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            self._refuse(process, body, InvalidArgument(f"not a message of ours: {error!r}"))

    @staticmethod
    def _refuse(process: RankProcess, body: dict[str, Any], error: AllfoldError) -> None:
        refusal = {**error.to_dict(), "request": body.get("request")}
        process.send(pack_json(Message.REFUSED, refusal))

    def _control(
        self, process: RankProcess, kind: int, body: dict[str, Any], descriptors: list[int]
    ) -> None:
        if kind == Message.HELLO:
            self._hello(process, body)
        elif not process.greeted:
            raise InvalidArgument("the first message of a process is HELLO")
        elif kind == Message.JOIN:
            self._join(process, body)
        elif kind == Message.LEAVE:
            self._leave(process, body)
        elif kind == Message.EXPLAIN:
            self._explain(process, body)
        elif kind == Message.SHARE:
            self._share(process, body, descriptors)
        else:
            raise InvalidArgument(f"unknown message type {kind}")

    @staticmethod
    def _segment(process: RankProcess, data: bytes, descriptors: list[int]) -> None:
        _, number, size = SEGMENT.unpack(data)
        if not descriptors:
            raise InvalidArgument("a segment without a file descriptor")
        process.add_segment(number, size, descriptors.pop())

    def _share(self, process: RankProcess, body: dict[str, Any], descriptors: list[int]) -> None:
        """Open memory of a GPU, which takes long, and so another thread."""
        if not descriptors:
            raise InvalidArgument("memory of a GPU without a file descriptor")
        number, size = int(body["number"]), int(body["size"])
        uuid, proof = str(body["uuid"]), bytes.fromhex(body["proof"])
        process.check_number(number)
        descriptor = descriptors.pop()

        def open_() -> None:
            try:
                memory = self._gpus.open(uuid, descriptor, size, proof)
            except Exception as error:  # noqa: BLE001 - the rank hears of it
                log.warning("process %d shares memory of a GPU in vain: %s", process.pid, error)
                problem = error if isinstance(error, AllfoldError) else InvalidArgument(repr(error))
                self._refuse(process, body, problem)
            else:
                self._reactor.call(lambda: self._shared(process, body, memory))
            finally:
                os.close(descriptor)

        self._workers.submit(open_)

    def _shared(self, process: RankProcess, body: dict[str, Any], memory: RankMemory) -> None:
        number = int(body["number"])
        try:
            process.add_gpu_segment(number, memory)
        except InvalidArgument as error:
            self._refuse(process, body, error)
            return
        name = memory.device.name.name
        log.info("process %d shares %d MiB of %s", process.pid, memory.size >> 20, name)
        process.send(pack_json(Message.SHARED, {"request": body["request"]}))

    def _hello(self, process: RankProcess, body: dict[str, Any]) -> None:
        if body.get("protocol") != PROTOCOL_VERSION:
            raise InvalidArgument(
                f"this agent speaks local protocol {PROTOCOL_VERSION}, the SDK of process "
                f"{process.pid} speaks {body.get('protocol')}; install the same Allfold version"
            )
        process.greeted = True
        process.send(pack_json(Message.WELCOME, self._welcome))

    # Groups

    def _join(self, process: RankProcess, request: dict[str, Any]) -> None:
        future = self._registrar.join(request)
        process.joining.add(future)
        future.add_done_callback(lambda done: self._note_join(_Join(process, request, done)))

    def _note_join(self, join: _Join) -> None:
        """Have the reactor's thread seat the rank: only that knows whether its process lives."""
        self._reactor.call(lambda: self._finish_join(join))

    def _finish_join(self, join: _Join) -> None:
        join.process.joining.discard(join.done)
        if not join.done.cancelled():
            self._seat(join.process, join.request, join.done)

    def _seat(self, process: RankProcess, request: dict[str, Any], done: Future[Group]) -> None:
        error = done.exception()
        if error is not None:
            if not isinstance(error, AllfoldError):
                log.error("a join failed", exc_info=error)
                error = AllfoldError(f"the agent failed while joining: {error!r}")
            self._refuse(process, request, error)
            return
        group = done.result()
        membership = Membership(request["rank"], request["session"], group)
        if process.socket.fileno() < 0:
            self._registrar.lose(membership)
            return
        number = self._numbers.get(group)
        if number is None:
            number = self._numbers[group] = next(self._next_number)
        process.memberships[number] = membership
        body = {
            "request": request["request"],
            "number": number,
            "epoch": group.epoch,
            "nodes": len(group.plan.members),
            "timeout": group.plan.timeout,
        }
        process.send(pack_json(Message.JOINED, body))

    def _leave(self, process: RankProcess, body: dict[str, Any]) -> None:
        membership = process.memberships.pop(body["number"], None)
        if membership is None:
            raise MultipleUnregister("this process is not in the group that it leaves")
        answer = pack_json(Message.LEFT, {"request": body["request"]})
        if body.get("lost"):
            self._registrar.lose(membership, GAVE_UP)
            process.send(answer)
            return
        self._registrar.leave(membership).add_done_callback(lambda _: process.send(answer))

    @staticmethod
    def _explain(process: RankProcess, body: dict[str, Any]) -> None:
        membership = process.memberships.get(body["number"])
        if membership is None:
            raise RegisterNotFirstOperation("this process is not in the group that it asks about")
        strategy = membership.group.explain(body["kind"], int(body["nbytes"]))
        answer = {"request": body["request"], "strategy": strategy}
        process.send(pack_json(Message.EXPLAINED, answer))

    def _gone(self, process: RankProcess) -> None:
        """The process has ended; what it did not leave in order is lost."""
        self._reactor.unregister(process.socket)
        del self._processes[process.socket.fileno()]
        process.close()
        for future in list(process.joining):
            future.cancel()  # where it is too late for that, the join is on its way to us
        for membership in process.memberships.values():
            self._registrar.lose(membership)
        process.memberships.clear()


def _descriptors(beside: list[tuple[int, int, bytes]]) -> list[int]:
    """The file descriptors that came with a message; they are ours now."""
    return [
        *chain.from_iterable(
            (number for (number,) in _DESCRIPTOR.iter_unpack(data))
            for level, kind, data in beside
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        )
    ]


def _listen(path: str) -> socket.socket:
    """Bind the socket in a folder of our own, replacing what a dead agent left behind."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.path.exists(path):  # noqa: PTH110 - Path.exists is false for some dead sockets
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.connect(path)
            raise InvalidArgument(f"another agent listens on {path}")
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
    listener.bind(path)
    listener.listen(128)
    return listener
