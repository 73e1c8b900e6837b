"""A group: the ranks that call collectives together, and this process's seat among them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import numpy as np

from allfold import _tensors
from allfold._arena import Block
from allfold._session import GRACE_SECONDS, Session
from allfold._tensors import TensorView
from allfold._work import Work
from allfold_core.dtypes import DType
from allfold_core.errors import (
    AgentLost,
    AllfoldError,
    BroadcastMultipleTensors,
    BroadcastNoTensor,
    InvalidArgument,
    MultipleUnregister,
    PeerMissing,
    RegisterNotFirstOperation,
)
from allfold_core.local_wire import Message, OpMessage, Region
from allfold_core.operations import Fingerprint, Kind, ReduceOp

log = logging.getLogger("allfold")

AUTO = "auto"
LONGEST_SECONDS = 30 * 24 * 3600
_NOWHERE = Region(0, 0)
_TIDY_EVERY = 64
_REDUCE_OPS = {op.label: op for op in ReduceOp} | {
    "avg": ReduceOp.MEAN,
    "average": ReduceOp.MEAN,
    "prod": ReduceOp.PRODUCT,
}


class Group:
    """The ranks of one group. Made by :func:`allfold.init`.

    Every collective is called by every rank of the group, in the same order. It writes its result
    into the tensor that it is given, which is a NumPy array or a torch CPU tensor of any strides,
    and returns that tensor; with ``async_op=True`` it returns a :class:`allfold.Work` at once.

    Arguments that all collectives share:
        timeout: seconds until the op fails on every rank, naming who did not come. Default: the
            group's.
        strategy: ``"ring"``, ``"tree(4)"`` ... for this op; default ``"auto"``.
        async_op: return a handle instead of waiting.

    Errors that all of them raise:
        InvalidArgument: the tensor or an argument cannot work; nothing was sent.
        RegisterNotFirstOperation: the group has been left.
        MismatchError: the ranks asked for different things; the group stays usable.
        PeerMissing: the deadline has passed; names the missing ranks.
        PeerLost: a rank or node is gone.
        AgentLost: the node agent of this machine is gone.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        rank: int,
        world_size: int,
        on_left: Callable[[Group], None],
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.epoch = -1
        self.nodes = 0
        self.timeout = 0.0
        self._session = session
        self._on_left = on_left
        self._number = -1
        self._uuid = uuid.uuid4().hex
        self._lock = Lock()
        self._next_seq = 0
        self._in_flight: dict[int, Work] = {}
        self._left = False

    def __repr__(self) -> str:
        return f"<allfold.Group {self.name!r}: rank {self.rank} of {self.world_size}>"

    # Membership

    def join(self, *, timeout: float, init_timeout: float, strategies: Mapping[str, str]) -> None:
        """Take the seat, and wait until every rank has done so."""
        body = {
            "group": self.name,
            "rank": self.rank,
            "world_size": self.world_size,
            "session": self._uuid,
            "timeout": timeout,
            "init_timeout": init_timeout,
            "strategies": dict(strategies),
        }
        try:
            seat = self._session.request(Message.JOIN, body, init_timeout + GRACE_SECONDS)
        except TimeoutError as error:
            if isinstance(error, PeerMissing):
                raise
            raise PeerMissing(
                f"the node agent at {self._session.path} gave no answer to the registration of "
                f"rank {self.rank} within {init_timeout:g} s",
                timeout=init_timeout,
            ) from None
        self._number = seat["number"]
        self.epoch = seat["epoch"]
        self.nodes = seat["nodes"]
        self.timeout = seat["timeout"]

    def shutdown(self) -> None:
        """Wait for the ops in flight, then leave the group.

        Where the node agent is gone there is nothing left to leave, which is no error here.

        Raises:
            MultipleUnregister: it was left before.
        """
        self._check_seat(MultipleUnregister)
        for work in list(self._in_flight.values()):
            try:
                work.wait()
            except AllfoldError as error:
                log.warning("left group '%s' with a failed op: %s", self.name, error)
        self._left = True
        try:
            self._session.request(Message.LEAVE, {"number": self._number}, GRACE_SECONDS)
        except (AgentLost, TimeoutError) as error:
            log.warning("left group '%s' without the agent's word: %s", self.name, error or "late")
        finally:
            self._on_left(self)

    def _check_seat(self, error: type[AllfoldError] = RegisterNotFirstOperation) -> None:
        if self._left:
            raise error(f"rank {self.rank} has left group '{self.name}'; call allfold.init again")
        self._session.check_process()

    # Collectives

    def all_reduce(
        self,
        tensor: Any,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        timeout: float | None = None,
        strategy: str = AUTO,
        async_op: bool = False,
    ) -> Any:
        """Fold the tensors of all ranks; every rank gets the result, with the same bits.

        Args:
            tensor: same shape and dtype on every rank.
            op: ``"sum"``, ``"mean"``, ``"product"``, ``"min"`` or ``"max"``. Half types are
                summed in float32 and rounded once. A mean of integers is refused.
        """
        view = _tensors.view(tensor)
        reduce_op = _reduce_op(op, view.dtype)
        print_ = Fingerprint(Kind.ALL_REDUCE, reduce_op, view.dtype, view.shape, -1, strategy)
        return self._run(print_, view, timeout, async_op)

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        timeout: float | None = None,
        strategy: str = AUTO,
        async_op: bool = False,
    ) -> Any:
        """Fold the tensors of all ranks; ``root`` gets the result, the others stay as they are."""
        view = _tensors.view(tensor)
        reduce_op = _reduce_op(op, view.dtype)
        self._check_root(root)
        print_ = Fingerprint(Kind.REDUCE, reduce_op, view.dtype, view.shape, root, strategy)
        return self._run(print_, view, timeout, async_op)

    def broadcast(
        self,
        tensor: Any = None,
        root: int | None = None,
        *,
        timeout: float | None = None,
        strategy: str = AUTO,
        async_op: bool = False,
    ) -> Any:
        """Give every rank the tensor of one.

        With a ``root``, every rank brings a tensor of the same shape and dtype, and those of the
        others are overwritten. Without a root, whoever brings a tensor is the source and exactly
        one must; the others bring ``None`` and get a new one (torch if theirs is loaded and the
        source's was, else NumPy). That takes two ops, the first of which is waited for.

        Raises:
            BroadcastNoTensor: no rank brought a tensor.
            BroadcastMultipleTensors: several did; names them.
        """
        if root is None:
            tensor, root = self._find_source(tensor, timeout)
        view = _tensors.view(tensor)
        self._check_root(root)
        print_ = Fingerprint(Kind.BROADCAST, None, view.dtype, view.shape, root, strategy)
        return self._run(print_, view, timeout, async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it."""
        view = _tensors.view(np.empty(0, np.uint8))
        print_ = Fingerprint(Kind.BARRIER, None, DType.UINT8, (0,), -1, AUTO)
        work = self._run(print_, view, timeout, async_op)
        return work if async_op else None

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """An uninitialized tensor in the arena: collectives on it copy nothing.

        Args:
            shape: its shape.
            dtype: a torch dtype makes a torch tensor, a NumPy dtype (or its name) an array.

        Raises:
            ArenaExhausted: no memory is left.
        """
        self._check_seat()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise InvalidArgument(f"a shape has no negative sizes, got {sizes}")
        nbytes = _tensors.dtype_of(dtype).itemsize * int(np.prod(sizes, dtype=np.int64))
        return _tensors.make(self._session.arena.array(nbytes), sizes, dtype)

    # Running an op

    def _run(
        self, fingerprint: Fingerprint, view: TensorView, timeout: float | None, async_op: bool
    ) -> Any:
        seconds = self.timeout if timeout is None else checked_seconds("timeout", timeout)
        work = self._submit(fingerprint, view, seconds)
        return work if async_op else work.wait()

    def _submit(self, fingerprint: Fingerprint, view: TensorView, timeout: float) -> Work:
        self._check_seat()
        packed = _pack(fingerprint)
        arena = self._session.arena
        region = _NOWHERE if not view.nbytes else None
        if view.address and region is None:
            region = arena.locate(view.address, view.nbytes)
        staged = None if region else arena.allocate(view.nbytes)
        try:
            if staged:
                region = staged.region
                view.copy_to(staged.memory)
            assert region is not None
            with self._lock:
                work = self._send(fingerprint, packed, view, region, staged, timeout)
        except BaseException:
            if staged:
                arena.free(staged)
            raise
        if len(self._in_flight) % _TIDY_EVERY == 0:
            self._tidy()
        return work

    def _send(
        self,
        fingerprint: Fingerprint,
        packed: bytes,
        view: TensorView,
        region: Region,
        staged: Block | None,
        timeout: float,
    ) -> Work:
        """Hand the op to the agent; called one at a time, because ops are numbered as they go."""
        seq = self._next_seq
        key = (Message.OP, self._number, seq)
        pending = self._session.expect(key)
        message = OpMessage(self._number, seq, timeout, region, region, view.nbytes, packed)
        self._session.send(message.pack(), timeout + GRACE_SECONDS)
        self._next_seq = seq + 1

        def finish() -> Any:
            if staged and self._gets_result(fingerprint):
                view.copy_from(staged.memory)
            return view.tensor

        def clean_up() -> None:
            self._in_flight.pop(seq, None)
            if staged:
                self._session.arena.free(staged)

        name = f"op {seq} of group '{self.name}'"
        work = Work(self._session, key, pending, name, timeout, finish, clean_up)
        self._in_flight[seq] = work
        return work

    def _tidy(self) -> None:
        """Take in replies, so that the agent can go on sending, and settle what is done."""
        self._session.drain()
        for work in list(self._in_flight.values()):
            work.settle_if_done()

    def _gets_result(self, fingerprint: Fingerprint) -> bool:
        if fingerprint.kind is Kind.REDUCE:
            return fingerprint.root == self.rank
        return fingerprint.kind is not Kind.BROADCAST or fingerprint.root != self.rank

    def _check_root(self, root: int) -> None:
        if not isinstance(root, int) or not 0 <= root < self.world_size:
            raise InvalidArgument(
                f"root {root!r} is not a rank of group '{self.name}': "
                f"its ranks are 0 to {self.world_size - 1}"
            )

    def _find_source(self, tensor: Any, timeout: float | None) -> tuple[Any, int]:
        """Agree on the one rank that brought a tensor, and on what it looks like.

        One all-reduce of a small record: per rank a flag, then what the source alone fills in.
        """
        view = None if tensor is None else _tensors.view(tensor)
        flags = np.zeros(self.world_size, np.int64)
        about = np.zeros(_ABOUT + 64, np.int64)
        if view is not None:
            flags[self.rank] = 1
            about[:_ABOUT] = (view.dtype.code, view.is_torch, len(view.shape))
            about[_ABOUT : _ABOUT + len(view.shape)] = view.shape
        record = np.concatenate([flags, about])
        self.all_reduce(record, timeout=timeout)
        sources = np.flatnonzero(record[: self.world_size]).tolist()
        if not sources:
            raise BroadcastNoTensor(
                f"broadcast in group '{self.name}': none of {self.world_size} ranks brought a "
                "tensor; exactly one must, or all must name the root"
            )
        if len(sources) > 1:
            raise BroadcastMultipleTensors(
                f"broadcast in group '{self.name}': ranks {sources} brought a tensor; "
                "exactly one must, or all must name the root",
                ranks=sources,
            )
        if tensor is None:
            tensor = _receiver(record[self.world_size :])
        return tensor, sources[0]


_ABOUT = 3


def _receiver(about: np.ndarray[Any, Any]) -> Any:
    code, is_torch, ndim = (int(value) for value in about[:_ABOUT])
    shape = tuple(int(size) for size in about[_ABOUT : _ABOUT + ndim])
    return _tensors.new(shape, DType.from_code(code), prefer_torch=bool(is_torch))


def _reduce_op(op: str | ReduceOp, dtype: DType) -> ReduceOp:
    found = op if isinstance(op, ReduceOp) else _REDUCE_OPS.get(op)
    if found is None:
        raise InvalidArgument(
            f"unknown reduce operation {op!r}; there are sum, mean, product, min, max"
        )
    if refusal := found.refusal(dtype):
        raise InvalidArgument(refusal)
    return found


def checked_seconds(source: str, value: Any) -> float:
    """A time limit; ``InvalidArgument`` names where a bad one came from."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= LONGEST_SECONDS:
        raise InvalidArgument(
            f"{source} is a positive number of seconds, at most {LONGEST_SECONDS} (30 days), "
            f"got {value!r}"
        )
    return seconds


def _pack(fingerprint: Fingerprint) -> bytes:
    try:
        return fingerprint.pack()
    except ValueError as error:
        raise InvalidArgument(
            f"{fingerprint.strategy!r} is not the name of a strategy: {error}"
        ) from None
