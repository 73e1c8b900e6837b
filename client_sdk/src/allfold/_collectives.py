"""The collectives and messages of a group, from their arguments to a call."""

# ruff: noqa: ARG002 - the options of a collective are read by its decorator

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

from allfold._calling import Calling, collective
from allfold._calls import movement, reductions, unrooted
from allfold._calls.call import AUTO, EpochView
from allfold._calls.options import Options, with_checked_names
from allfold._handles.round import Round
from allfold_core.errors import InvalidArgument
from allfold_core.operations import ReduceOp


class Collectives(Calling):
    """The collectives of a group, and its messages between two ranks."""

    @collective
    def all_reduce(
        self,
        tensor: Any,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        factor: float | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Reduce the tensors of all ranks; every rank gets the result, with the same bits.

        Args:
            tensor: same shape and dtype on every rank. A list of tensors of one dtype travels as
                one op.
            op: ``"sum"``, ``"mean"``, ``"product"``, ``"min"``, ``"max"``; of integers and booleans
                also ``"band"``, ``"bor"``, ``"bxor"``; ``"premul_sum"`` sums after every input was
                multiplied by ``factor``. Half types are summed in float32 and rounded once. A mean
                of integers is refused. Complex numbers can be summed and averaged.
            factor: of a ``"premul_sum"``.
        """
        return self._view, reductions.all_reduce(tensor, op, factor)

    @with_checked_names
    def start_round(
        self,
        tensors: Any,
        op: str = "mean",
        *,
        weight: float = 1.0,
        quorum: int | None = None,
        within: float | None = None,
        wire: str | None = None,
        feedback: str | None = None,
        strategy: str = AUTO,
        timeout: float | None = None,
    ) -> Round:
        """Start a round, a weighted mean of the tensors of all ranks; returns its handle at once.

        A round is a collective like others: called by every rank in the same order, any number of
        them in flight, with one outcome for all. In a group with ``traffic="background"`` it leaves
        the line to other groups. The mean is the sum of weight times tensor, each product rounded
        to the type that sums are kept in, divided by the sum of the weights in float64.

        Args:
            tensors: a tensor of a float or complex type, with the same shape and dtype on every
                rank; or a list of them, of one dtype. The mean is written to them.
            op: ``"mean"``.
            weight: of this rank, from 1e-12 to 1e15, for instance how many tokens its tensors come
                from. That of a rank that takes no part is 0: its tensors are not read, and get the
                mean.
            quorum, within: once ``quorum`` ranks have called, the others are waited for ``within``
                seconds more; in a group whose ranks come and go, a ``quorum`` above their number
                is all of them. A rank that comes later gets the result all the same, and
                ``took_part`` is False; what it brought is added to its next round of that
                ``feedback`` name.
            wire, feedback, strategy, timeout: as for the other collectives, but weight times tensor
                would leave the range of ``wire="float16"``. Tensors on a GPU are averaged in the
                memory of the host.

        Raises:
            InvalidArgument: the weight is neither 0 nor from 1e-12 to 1e15, the wire is float16,
                the quorum is not 1 to the number of ranks, ``op`` is another one, or rounds of
                another shape have the name ``feedback``.
        """
        with self._calling("start_round"):
            view = self._view
            call = reductions.weighted_mean(
                view, tensors, op, weight, quorum, within, is_elastic=self._is_elastic
            )
            self._check_series(feedback, call.fingerprint)
            work = self._start(
                view,
                call,
                None,
                (),
                timeout=timeout,
                strategy=strategy,
                wire=wire,
                feedback=feedback,
            )
        if feedback is not None:
            self._series.setdefault(feedback, call.fingerprint)
        work.given(waits=False)
        return Round(work)

    @collective
    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        factor: float | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Reduce the tensors of all ranks; ``root`` gets the result, the others keep their own."""
        view = self._view
        return view, reductions.reduce(view, tensor, root, op, factor)

    @collective
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
        view, found = self._view, root is None
        if root is None:
            view, record, unfit = self._search(tensor, options.get("timeout"))
            # An error that all ranks have is first: the op after the search is called by none then.
            root = unrooted.source_in(view, record)
            with self._calling("broadcast"):
                if unfit is not None:
                    raise unfit
                if tensor is None:
                    tensor = unrooted.new_target(view, record, root)
                call = movement.broadcast(view, tensor, root, options.get("wire"))
        else:
            call = movement.broadcast(view, tensor, root, options.get("wire"))
        call.is_unlike = found
        return view, call

    @collective
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
        view = self._view
        return view, movement.all_gather(view, tensor, output, counts)

    @collective
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
        view = self._view
        return view, movement.gather(view, tensor, root, output, counts)

    @collective
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
        view = self._view
        return view, movement.scatter(view, output, inputs, root, counts)

    @collective
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
        """Reduce the tensors of all ranks; every rank gets its block of the result.

        Args:
            inputs: one tensor of all blocks in rank order, or a list of blocks, one per rank.
            output: this rank's block; ``None`` for a new tensor.
            op, factor: as in :meth:`all_reduce`.
            counts: the size of each block's first dimension, where these differ; the same on every
                rank.
        """
        view = self._view
        call = reductions.reduce_scatter(view, inputs, output, op, factor, counts)
        return view, call

    @collective
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
        view = self._view
        call = movement.all_to_all(view, inputs, output, send_counts, receive_counts)
        return view, call

    @with_checked_names
    def send(
        self,
        tensor: Any,
        to: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send a tensor to one rank. It is done when that rank has received it.

        Args:
            tensor: of any shape; its dtype and number of elements are those of the receive.
            to: another rank.
            tag: a whole number of 64 bits with its sign; the receive has the same.

        Raises:
            PeerMissing: the rank has not received it in time.
            MismatchError: its receive has another dtype or size; it gets the same error.
        """
        view = self._view
        call = movement.send(view, tensor, to, tag)
        return self._exchange(view, call, timeout, async_op)

    @with_checked_names
    def recv(
        self,
        tensor: Any,
        source: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receive a tensor from one rank, or from any; returns the rank that it came from.

        Between two ranks and with one tag, what was sent first is received first.

        Args:
            tensor: is overwritten; has the dtype and the number of elements of what is sent.
            source: another rank; ``None`` for whichever sends first.
            tag: as in :meth:`send`.
        """
        view = self._view
        call = movement.recv(view, tensor, source, tag)
        return self._exchange(view, call, timeout, async_op)

    @collective
    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it."""
        return self._view, movement.barrier()

    def _search(
        self, tensor: Any, timeout: float | None
    ) -> tuple[EpochView, Any, InvalidArgument | None]:
        """Agree on who brings a tensor; return all ranks' record, and why this one's cannot be.

        And the epoch that the record is of: where the ranks change meanwhile, they agree again.
        """
        while True:
            view = self._view
            record, unfit = unrooted.record_of(view, tensor)
            search = reductions.all_reduce(record, ReduceOp.SUM, None)
            work = self._start(view, search, None, (), timeout=timeout)
            work.wait()
            if work.epoch == view.epoch:
                return view, record, unfit

    @contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        """See to the failure of a collective that comes after another one of the same call."""
        number = self.next_op
        try:
            yield
        except BaseException as error:
            self._see_to_failed(call, error, number)
            raise
