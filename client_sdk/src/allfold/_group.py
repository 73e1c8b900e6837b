"""A group: the ranks that call collectives together, and this process's seat among them."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from time import monotonic
from typing import Any, TypedDict, Unpack

import numpy as np

from allfold import _calls, _tensors
from allfold._calls import AUTO, Call, Seat
from allfold._session import GRACE_SECONDS, Pending, Session
from allfold._staging import Staged
from allfold._work import Work
from allfold_core.codecs import Wire
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
from allfold_core.local_wire import FIRST_PAIR, MAX_MESSAGE, Message, OpMessage, PairMessage
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.operations import Fingerprint, ReduceOp

log = logging.getLogger("allfold")

NATIVE = Wire.NATIVE.label
LONGEST_SECONDS = 30 * 24 * 3600
_TIDY_EVERY = 64
_ABANDON_SECONDS = 1.0
_LONGEST_FINGERPRINT = MAX_MESSAGE - 256
# A group's name has at most 128 characters; a sub-group's ends in a dot and 20 hex digits.
_NAME_KEPT = 107


class Options(TypedDict, total=False):
    """The keyword arguments that all collectives share; see :class:`Group`."""

    timeout: float | None
    strategy: str
    wire: str | None
    feedback: str | None
    async_op: bool


@dataclass(frozen=True, slots=True)
class CallOptions:
    """:class:`Options` with their defaults."""

    timeout: float | None = None
    strategy: str = AUTO
    wire: str | None = None
    feedback: str | None = None
    async_op: bool = False


class Group:
    """The ranks of one group. Made by :func:`allfold.init`.

    Every collective is called by every rank of the group, in the same order. It writes its result
    into a tensor that it is given, which is a NumPy array or a torch CPU tensor of any strides,
    and returns that tensor; with ``async_op=True`` it returns a :class:`allfold.Work` at once.

    Arguments that all collectives share:
        timeout: seconds until the op fails on every rank, naming who did not come. Default: the
            group's.
        strategy: ``"ring"``, ``"tree(4)"`` ... for this op; default ``"auto"``.
        wire: how the data travels between nodes: ``"native"``, or rounded to ``"bfloat16"``,
            ``"float16"`` or ``"int8"``, with the same bits on every rank; see docs/precision.md.
            Default: the group's for reductions, ``"native"`` for whatever is only moved.
        feedback: the name of a series of calls on tensors of one shape; what a lossy ``wire`` cost
            one of them is added to the next.
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
        wire: str = NATIVE,
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.epoch = -1
        self.nodes = 0
        self.timeout = 0.0
        self.wire = wire
        self.seat = Seat(name, rank, world_size)
        self._session = session
        self._on_left = on_left
        self._number = -1
        self._uuid = uuid.uuid4().hex
        self._lock = Lock()
        self._op_numbers = count()
        self._pair_numbers = count(FIRST_PAIR)
        self._in_flight: dict[int, Work] = {}
        self._children: Counter[tuple[int, ...]] = Counter()
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

    def abandon(self) -> None:
        """Leave without waiting for what is in flight: the others lose this rank, at once."""
        if self._left:
            return
        self._left = True
        try:
            request = {"number": self._number, "lost": True}
            self._session.request(Message.LEAVE, request, _ABANDON_SECONDS)
        except (AgentLost, TimeoutError) as error:
            log.warning("gave up group '%s' without the agent: %s", self.name, error or "late")
        finally:
            self._on_left(self)

    def quiesce(self, seconds: float) -> bool:
        """Whether the ops in flight have an outcome within ``seconds``."""
        deadline = monotonic() + seconds
        return all(
            work.settle_within(max(0.0, deadline - monotonic()))
            for work in list(self._in_flight.values())
        )

    def name_of_child(self, members: tuple[int, ...]) -> str:
        """The name of the next sub-group of these ranks: the same on all of them."""
        key = f"{self.name} {self.epoch} {members} {self._children[members]}"
        return (
            f"{self.name[:_NAME_KEPT]}.{hashlib.blake2b(key.encode(), digest_size=10).hexdigest()}"
        )

    def count_child(self, members: tuple[int, ...]) -> None:
        """A sub-group of these ranks has been made."""
        self._children[members] += 1

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
        factor: float | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Fold the tensors of all ranks; every rank gets the result, with the same bits.

        Args:
            tensor: same shape and dtype on every rank. A list of tensors of one dtype travels as
                one op.
            op: ``"sum"``, ``"mean"``, ``"product"``, ``"min"``, ``"max"``; of integers and booleans
                also ``"band"``, ``"bor"``, ``"bxor"``; ``"premul_sum"`` sums after every input was
                multiplied by ``factor``. Half types are summed in float32 and rounded once. A mean
                of integers is refused. Complex numbers can be summed and averaged.
            factor: of a ``"premul_sum"``.
        """
        return self._run(_calls.all_reduce(tensor, op, factor), options)

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        factor: float | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Fold the tensors of all ranks; ``root`` gets the result, the others stay as they are."""
        return self._run(_calls.reduce(self.seat, tensor, root, op, factor), options)

    def broadcast(
        self, tensor: Any = None, root: int | None = None, **options: Unpack[Options]
    ) -> Any:
        """Give every rank the tensor of one.

        With a ``root``, every rank brings a tensor of the same shape and dtype (or a list of them),
        and those of the others are overwritten. Without a root, whoever brings a tensor is the
        source and exactly one must; the others bring ``None`` and get a new one (torch if theirs
        is loaded and the source's was, else NumPy). That takes two ops, the first of which is
        waited for.

        With a lossy ``wire`` the root's tensor is rounded to what the others get.

        Raises:
            BroadcastNoTensor: no rank brought a tensor.
            BroadcastMultipleTensors: several did; names them.
        """
        if root is None:
            tensor, root = self._find_source(tensor, options.get("timeout"))
        call = _calls.broadcast(self.seat, tensor, root, options.get("wire"))
        return self._run(call, options)

    def all_gather(
        self,
        tensor: Any,
        output: Any = None,
        *,
        counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Give every rank the tensors of all; returns ``output``.

        Args:
            tensor: this rank's; same shape and dtype on every rank, unless there are counts.
            output: one tensor with as many elements as all of them have together, in rank order;
                or a list of tensors, one per rank, whose sizes may differ; or ``None`` for a new
                tensor, in which the first dimensions add up.
            counts: the size of each rank's first dimension, where these differ; the same on every
                rank.
        """
        return self._run(_calls.all_gather(self.seat, tensor, output, counts), options)

    def gather(
        self,
        tensor: Any,
        root: int = 0,
        output: Any = None,
        *,
        counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Give ``root`` the tensors of all; returns its ``output``, and ``None`` elsewhere.

        The arguments are those of :meth:`all_gather`; ``output`` is the root's alone.
        """
        return self._run(_calls.gather(self.seat, tensor, root, output, counts), options)

    def scatter(
        self,
        output: Any,
        inputs: Any = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Give every rank its block of what ``root`` has; returns ``output``.

        Args:
            output: this rank's block; same shape and dtype on every rank, unless there are counts.
            inputs: at the root alone: one tensor of all blocks in rank order, or a list of them.
            root: who has them.
            counts: the size of each block's first dimension, where these differ; the same on every
                rank.
        """
        return self._run(_calls.scatter(self.seat, output, inputs, root, counts), options)

    def reduce_scatter(
        self,
        inputs: Any,
        output: Any = None,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        factor: float | None = None,
        counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Fold the tensors of all ranks; every rank gets its block of the result.

        Args:
            inputs: one tensor of all blocks in rank order, or a list of blocks, one per rank.
            output: this rank's block; ``None`` for a new tensor.
            op, factor: as in :meth:`all_reduce`.
            counts: the size of each block's first dimension, where these differ; the same on every
                rank.
        """
        call = _calls.reduce_scatter(self.seat, inputs, output, op, factor, counts)
        return self._run(call, options)

    def all_to_all(
        self,
        inputs: Any,
        output: Any = None,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Give block j of rank i to rank j, as its block i; returns ``output``.

        Args:
            inputs: one tensor, whose rows are split over the ranks, or a list of tensors.
            output: likewise; ``None`` for new ones.
            send_counts: how many rows go to each rank; by default equally many.
            receive_counts: how many rows come from each rank; by default equally many. What rank i
                sends to rank j must be what j expects of i.
        """
        call = _calls.all_to_all(self.seat, inputs, output, send_counts, receive_counts)
        return self._run(call, options)

    def send(
        self,
        tensor: Any,
        to: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Give one rank a tensor. It is done when that rank has received it.

        Args:
            tensor: of any shape; its dtype and number of elements are those of the receive.
            to: another rank.
            tag: a whole number of 64 bits with its sign; the receive has the same.

        Raises:
            PeerMissing: the rank has not received it in time.
            MismatchError: its receive has another dtype or size; it gets the same error.
        """
        peer = _calls.checked_peer(self.seat, to, "to")
        call = _calls.send(tensor)
        seconds = self._seconds(timeout)
        work = self._exchange(Message.SEND, call, peer, _calls.checked_tag(tag), seconds, async_op)
        return work if async_op else work.wait()

    def recv(
        self,
        tensor: Any,
        source: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Get a tensor of one rank, or of any; returns the rank that it came from.

        Between two ranks and with one tag, what was sent first is received first.

        Args:
            tensor: is overwritten; has the dtype and the number of elements of what is sent.
            source: another rank; ``None`` for whichever sends first.
            tag: as in :meth:`send`.
        """
        peer = ANY_SOURCE if source is None else _calls.checked_peer(self.seat, source, "source")
        call = _calls.recv(tensor)
        seconds = self._seconds(timeout)
        work = self._exchange(Message.RECV, call, peer, _calls.checked_tag(tag), seconds, async_op)
        return work if async_op else work.wait()

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it."""
        return self._run(_calls.barrier(), {"async_op": async_op, "timeout": timeout})

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
        nbytes = _tensors.itemsize_of(dtype) * int(np.prod(sizes, dtype=np.int64))
        return _tensors.make(self._session.arena.array(nbytes), sizes, dtype)

    def strategy_for(self, kind: str, nbytes: int) -> str:
        """What ``"auto"`` takes for an op; ``"local"`` where all ranks are on one node.

        Args:
            kind: ``"all_reduce"``, ``"broadcast"`` ...
            nbytes: of the tensor, or of all blocks together.
        """
        self._check_seat()
        request = {"number": self._number, "kind": kind, "nbytes": nbytes}
        answer = self._session.request(Message.EXPLAIN, request, GRACE_SECONDS)
        return str(answer["strategy"])

    # Running an op

    def _run(self, call: Call, options: Options) -> Any:
        work = self._submit(call, CallOptions(**options))
        return work if work.is_async else work.wait()

    def _submit(self, call: Call, options: CallOptions) -> Work:
        self._check_seat()
        _calls.check_one_dtype(call.inputs + call.outputs)
        call = call.with_options(options.strategy, options.wire, options.feedback, self.wire)
        packed = _pack(call.fingerprint)
        timeout = self._seconds(options.timeout)

        def message(number: int, staged: Staged) -> OpMessage:
            return OpMessage(self._number, number, timeout, staged.source, staged.target, packed)

        return self._hand_over(call, self._op_numbers, message, timeout, options.async_op)

    def _exchange(
        self, kind: Message, call: Call, peer: int, tag: int, timeout: float, is_async: bool
    ) -> Work:
        """Send or receive one message."""
        self._check_seat()
        dtype = call.fingerprint.dtype.code
        nbytes = sum(view.nbytes for view in call.inputs + call.outputs)

        def message(number: int, staged: Staged) -> PairMessage:
            memory = staged.source if call.inputs else staged.target
            return PairMessage(
                kind, self._number, number, timeout, peer, tag, dtype, memory, nbytes
            )

        return self._hand_over(call, self._pair_numbers, message, timeout, is_async)

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else checked_seconds("timeout", timeout)

    def _hand_over(
        self,
        call: Call,
        numbers: Iterator[int],
        make: Callable[[int, Staged], OpMessage | PairMessage],
        timeout: float,
        is_async: bool,
    ) -> Work:
        """Give the agent a call; one at a time, because calls are numbered as they go."""
        staged = Staged(self._session.arena, call)
        try:
            with self._lock:
                number = next(numbers)
                message = make(number, staged)
                key = (Message.OP, self._number, number)
                pending = self._session.expect(key)
                self._session.send(message.pack(), timeout + GRACE_SECONDS)
                work = self._work(call, key, pending, staged, timeout, is_async)
        except BaseException:
            staged.free()
            raise
        if len(self._in_flight) % _TIDY_EVERY == 0:
            self._tidy()
        return work

    def _work(
        self,
        call: Call,
        key: tuple[Message, int, int],
        pending: Pending,
        staged: Staged,
        timeout: float,
        is_async: bool,
    ) -> Work:
        number = key[-1]

        def finish(answer: dict[str, Any]) -> Any:
            staged.bring_home()
            return answer.get("source", call.result)

        def clean_up() -> None:
            self._in_flight.pop(number, None)
            staged.free()

        name = f"{_name_of(number)} of group '{self.name}'"
        work = Work(self._session, key, pending, name, timeout, finish, clean_up, is_async=is_async)
        self._in_flight[number] = work
        return work

    def _tidy(self) -> None:
        """Take in replies, so that the agent can go on sending, and settle what is done."""
        self._session.drain()
        for work in list(self._in_flight.values()):
            work.settle_if_done()

    def _find_source(self, tensor: Any, timeout: float | None) -> tuple[Any, int]:
        """Agree on the one rank that brought a tensor, and on what it looks like.

        One all-reduce of a small record: per rank a flag, then what the source alone fills in.
        """
        flags = np.zeros(self.world_size, np.int64)
        about = np.zeros(_tensors.ABOUT_SIZE, np.int64)
        unfit: InvalidArgument | None = None
        if tensor is not None:
            flags[self.rank] = 1
            try:
                about = _tensors.describe(tensor)
            except InvalidArgument as error:
                unfit = error  # the others wait for the record, and must hear of it
        record = np.concatenate([flags, about])
        self.all_reduce(record, timeout=timeout)
        if unfit is not None:
            raise unfit
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
            tensor = _tensors.described(record[self.world_size :])
        if tensor is None:
            raise InvalidArgument(
                f"broadcast in group '{self.name}': rank {sources[0]} brought something that "
                "cannot be moved; its own error says why"
            )
        return tensor, sources[0]


def _name_of(number: int) -> str:
    return f"op {number}" if number < FIRST_PAIR else f"message {number - FIRST_PAIR}"


def checked_members(group: Group, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a sub-group; ``InvalidArgument`` where they cannot make one."""
    group._check_seat()
    members = tuple(_calls.checked_rank(group.seat, rank, "rank") for rank in ranks)
    if not members or len(set(members)) < len(members):
        raise InvalidArgument(
            f"a group has at least one rank, and each once; got {list(members)} of "
            f"group '{group.name}'"
        )
    return members


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
        packed = fingerprint.pack()
    except ValueError as error:
        raise InvalidArgument(
            f"{fingerprint.strategy!r} is not the name of a strategy: {error}"
        ) from None
    if len(packed) > _LONGEST_FINGERPRINT:
        raise InvalidArgument(
            f"{fingerprint.kind.label} with {len(fingerprint.counts)} counts: they have to fit "
            f"{_LONGEST_FINGERPRINT} bytes, at 8 bytes each"
        )
    return packed
