"""Memory that ranks share with their agent: segments of the host, and of GPUs."""

from __future__ import annotations

import logging
import os
from typing import Any

from allfold_agent.gpu.device import RankMemory
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.local.rank_connection import RankConnection, refuse_request
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.errors import AllfoldError, InvalidArgument
from allfold_core.protocol.rank_messages import SEGMENT, Message, pack_json

log = logging.getLogger(__name__)


def add_segment(process: RankConnection, data: bytes, descriptors: list[int]) -> None:
    """Map a memfd that a rank shares.

    Raises:
        InvalidArgument: there is none, or it is not as it says.
        struct.error: the message is too short.
    """
    _, number, size = SEGMENT.unpack(data)
    if not descriptors:
        raise InvalidArgument("a segment without a file descriptor")
    process.add_segment(number, size, descriptors.pop())
    for membership in list(process.memberships.values()):
        membership.group.lanes.arena_grew()


class GpuMemoryRequests:
    """Opens memory of GPUs that ranks share.

    Args:
        gpus: whose memory it may be.
        workers: open it, which takes long.
        reactor: in whose thread the rank gets it.
    """

    def __init__(self, gpus: Gpus, workers: WorkerPool, reactor: Reactor) -> None:
        self._gpus = gpus
        self._workers = workers
        self._reactor = reactor

    def share(self, process: RankConnection, body: dict[str, Any], descriptors: list[int]) -> None:
        """Open memory of a GPU, in a worker; the rank gets an answer later.

        Raises:
            InvalidArgument: there is no descriptor, or the number is used already.
        """
        if not descriptors:
            raise InvalidArgument("memory of a GPU without a file descriptor")
        number, size = int(body["number"]), int(body["size"])
        uuid, proof = str(body["uuid"]), bytes.fromhex(body["proof"])
        process.check_number(number)
        descriptor = descriptors.pop()

        def open_() -> None:
            try:
                memory = self._gpus.open(uuid, descriptor, size, proof)
            except Exception as error:  # noqa: BLE001 - the rank gets it
                log.warning("memory of process %d cannot be opened: %s", process.pid, error)
                problem = error if isinstance(error, AllfoldError) else InvalidArgument(repr(error))
                refuse_request(process, body, problem)
            else:
                self._reactor.call(lambda: self._opened(process, body, memory))
            finally:
                os.close(descriptor)

        self._workers.submit(open_)

    def _opened(self, process: RankConnection, body: dict[str, Any], memory: RankMemory) -> None:
        try:
            process.add_gpu_segment(int(body["number"]), memory)
        except InvalidArgument as error:
            refuse_request(process, body, error)
            return
        name = memory.device.name.name
        log.info("process %d shares %d MiB of %s", process.pid, memory.size >> 20, name)
        process.send(pack_json(Message.SHARED, {"request": body["request"]}))
