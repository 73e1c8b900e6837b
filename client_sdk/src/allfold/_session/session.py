"""A process's session at its node agent: a connection, and memory that both can reach."""

from __future__ import annotations

import ctypes
import itertools
from threading import Lock
from typing import TYPE_CHECKING

from allfold._arena import Arena, host_memory
from allfold._process import futex
from allfold._session.connection import AgentConnection
from allfold._session.in_flight import Lander
from allfold_core.protocol.rank_messages import SEGMENT, Message

if TYPE_CHECKING:
    from allfold._cuda.gpu import Gpu


class Session:
    """The connection to the agent, the arena that is shared with it, and the GPUs in use.

    Args:
        path: of the agent's socket.
        timeout: seconds for each step of the beginning, and for the agent to take memory.

    Attributes:
        lander: sees to ops that no thread waits for.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._patience = timeout
        self._numbers = itertools.count()
        self._gpus: dict[int, Gpu] = {}
        self._opening = Lock()
        self.connection = AgentConnection(path, timeout, futex.why_not())
        self.lander = Lander()
        permit_ptrace(int(self.connection.welcome.get("pid", 0)))
        self.arena = Arena(host_memory(self._share), self._numbers)

    def close(self) -> None:
        """Disconnect, and let go of the memory."""
        self.connection.close()
        self.lander.close()
        # After the lander, which may be copying results out of it.
        self.arena.close()
        for gpu in self._gpus.values():
            gpu.close()

    def _share(self, number: int, size: int, descriptor: int) -> None:
        message = SEGMENT.pack(Message.SEGMENT, number, size)
        self.connection.send_descriptor(message, descriptor, self._patience)

    def gpu(self, ordinal: int) -> Gpu:
        """Return the GPU of this number, opened at the first call of this process that needs it."""
        if (known := self._gpus.get(ordinal)) is not None:
            return known
        from allfold._cuda.gpu import AgentAccess, Gpu

        with self._opening:
            if ordinal not in self._gpus:
                agent = AgentAccess(
                    self.connection.welcome.get("gpus", {}),
                    self.connection.welcome.get("no_gpu", "the agent folds on no GPU"),
                    self._numbers,
                    self._share,
                    self._share_gpu,
                )
                self._gpus[ordinal] = Gpu(ordinal, agent)
            return self._gpus[ordinal]

    def _share_gpu(self, number: int, size: int, uuid: str, descriptor: int, proof: bytes) -> None:
        body = {"number": number, "size": size, "uuid": uuid, "proof": proof.hex()}
        try:
            self.connection.request(Message.SHARE, body, self._patience, descriptor)
        except TimeoutError:
            raise self.connection.lose(
                f"the node agent at {self.connection.path} has not opened memory of a GPU within "
                f"{self._patience:g} s"
            ) from None


_PR_SET_PTRACER = 0x59616D61


def permit_ptrace(pid: int) -> None:
    """Allow a process of the same user, and what it starts, to read the stack of this one.

    The node agent does so when others wait for this rank. Where Linux's Yama restricts ptrace to
    descendants (``ptrace_scope`` 1, as on Ubuntu), a process may name one more that may: see
    prctl(2), PR_SET_PTRACER. Its failure is no error: it is refused where there is no Yama, and an
    agent in another container has no such process id here.
    """
    if pid > 0:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
