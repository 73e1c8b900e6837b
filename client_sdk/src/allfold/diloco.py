"""DiLoCo: ranks train by themselves, and agree on their parameters every so many steps.

    from allfold.diloco import DiLoCo

    diloco = DiLoCo(model, every=100, fragments=4, delay=10)
    state = allfold.State(diloco=diloco)
    group = allfold.init(traffic="background", state=state)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()  # the inner optimizer: AdamW, Muon, whichever is right for the model
        diloco.step()
    diloco.flush()

The method is that of A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of
Language Models", 2023 (arXiv:2311.08105); fragments and delay are those of A. Douillard et al.,
"Streaming DiLoCo with overlapping communication", 2025 (arXiv:2501.18512). It needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from allfold._calls.reductions import LARGEST_QUORUM, checked_quorum, checked_weight, finite
from allfold._group import Group
from allfold._handles.round import Round, RoundResult
from allfold._registry import registry
from allfold_core.dtypes import DType, Wire
from allfold_core.errors import AllfoldError, ArenaExhausted, InvalidArgument, ServiceError
from allfold_core.group_options import checked_wire

__all__ = ["DiLoCo"]

# By group, the one that has a quorum.
_with_quorum: WeakKeyDictionary[Group, ref[DiLoCo]] = WeakKeyDictionary()


class DiLoCo:
    """The outer optimizer of a model of which every rank trains a copy.

    The parameters are in ``fragments`` of about equal size. Each has a synchronized copy θ in
    float32, the same bits on all ranks, beside the rank's own parameters x. Every H = ``every``
    steps, at steps t with (t + offset) mod H = 0, a round of the fragment begins::

        Δᵣ = θ - x                    what rank r has done: its outer gradient
        Δ  = Σ wᵣ Δᵣ / Σ wᵣ           the round; w is the weight

    ``delay`` steps later its result is waited for, and is a step of Nesterov's momentum m::

        m ← μ m + Δ
        θ ← θ - η (Δ + μ m)           η is outer_lr, μ momentum
        x ← θ + (x - x of step t)     what the inner optimizer has done since is kept

    The offsets spread the rounds of the fragments over the H steps. The last line differs from
    Streaming DiLoCo, which mixes θ and x: here no step is lost, and without a delay x is θ. A round
    that fails changes nothing: what this rank has done is in the fragment's next one. So it is if a
    round with a ``quorum`` has not waited for the rank: :attr:`steps` goes on to where the others
    are then, and what they have agreed on meanwhile is applied.

    Ranks start from the same parameters: by ``State(diloco=...)`` of :func:`allfold.init`, or by
    the same seed. A rank that joins takes over θ, m and the steps, and starts from θ with a new
    inner optimizer. The model's buffers are not synchronized.

    Args:
        parameters: a module, or the parameters; those that need no gradient are left alone.
        group: by default the first of the process, when the first round begins.
        every: H, the steps from a round of a fragment to its next one.
        outer_lr, momentum: η and μ.
        fragments: in how many parts the parameters are synchronized; each is some whole tensors.
        delay: steps from the begin of a round until it is waited for, less than ``every``.
        wire: how a Δ travels between nodes; ``None`` for the default of the group.
        feedback: add the rounding error of a lossy wire to the fragment's next round.
        weight: of this rank in the mean, >= 0.
        quorum, within: how many ranks a round waits for, and how many seconds more for the others.
        name: of the series of rounding errors; a group with several models needs several names.

    Attributes:
        steps: the number of inner steps so far, the same on all ranks; train until it is enough.
        weight: as above; may be set before every step, e.g. to the tokens since the last round.

    Raises:
        InvalidArgument: an argument cannot work; says which, and why.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor],
        group: Group | None = None,
        *,
        every: int,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        wire: str | None = "int4",
        feedback: bool = True,
        weight: float = 1.0,
        quorum: int | None = None,
        within: float | None = None,
        name: str = "diloco",
    ) -> None:
        given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        trained = [each for each in given if each.requires_grad]
        _check(every, delay, fragments, trained)
        for option, number in (("outer_lr", outer_lr), ("momentum", momentum)):
            finite(option, number)
        checked_weight(weight)
        checked_quorum(quorum, within, LARGEST_QUORUM)
        self._group = group
        self._every, self._delay, self._outer_lr, self._momentum = every, delay, outer_lr, momentum
        self._options: dict[str, Any] = {"wire": wire, "quorum": quorum, "within": within}
        loses = wire is not None and checked_wire(wire).effective(DType.FLOAT32) is not Wire.NATIVE
        self._feedback = feedback and loses
        self.weight, self.steps = weight, 0
        self._called = self._done = 0  # rounds that this rank has called; that some have done
        self._results: list[RoundResult] = []
        self._left_behind: ServiceError | None = None
        self._fragments = [
            _Fragment(part, f"{name}.{number}", number * every // fragments)
            for number, part in enumerate(_parts(trained, fragments))
        ]

    @property
    def in_flight(self) -> int:
        """The number of rounds that have begun, and are not applied yet."""
        return sum(each.flight is not None for each in self._fragments)

    def step(self) -> list[RoundResult]:
        """Count a step of the inner optimizer, on all ranks: begin and apply the rounds of now.

        Returns:
            The results that were applied, mostly none: they say what the rounds have cost. Their
            tensors are ``None``: what was agreed on is in the model.

        Raises:
            ServiceError: the others have done so many rounds without this rank that its node has
                not kept their results. From then on every call raises it: load the state of
                another rank, or leave the group and join it again.
            AllfoldError: a round could not begin, or has failed, as on all other ranks. It changed
                nothing, and training may go on: call :meth:`step` after the next inner step.
        """
        failures = self._count(self.weight, self.steps + 1)
        while self._called < self._done and not self._left_behind:  # without this rank
            failures += self._count(0.0, math.inf)
        return self._told(failures)

    def flush(self) -> list[RoundResult]:
        """Wait for all rounds in flight, and apply them now; returns and raises as :meth:`step`."""
        return self._told(self._finish(math.inf))

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Have the synchronized parameters in the model meanwhile, to evaluate or to save it."""
        own = [fragment.local() for fragment in self._fragments]
        for fragment in self._fragments:
            fragment.assign(fragment.synchronized)
        try:
            yield
        finally:
            for fragment, before in zip(self._fragments, own, strict=True):
                fragment.assign(before)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a rank needs to join: the same on every rank, for ``allfold.State``.

        Rounds in flight are applied before, so where there are any, all ranks call it at one step.
        """
        if failures := self._finish(math.inf):
            raise failures[0]
        return {
            "steps": self.steps,
            "synchronized": [each.synchronized for each in self._fragments],
            "momentum": [each.momentum for each in self._fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, and start from its synchronized parameters; forget what is in flight.

        Raises:
            InvalidArgument: it is that of other fragments.
        """
        sizes = [tuple(each.shape) for each in state["synchronized"]]
        ours = [tuple(each.synchronized.shape) for each in self._fragments]
        if sizes != ours:
            raise InvalidArgument(f"a state of fragments of {sizes} elements; here they are {ours}")
        self.steps, self._left_behind = int(state["steps"]), None
        for number, fragment in enumerate(self._fragments):
            fragment.flight = None
            fragment.synchronized.copy_(state["synchronized"][number])
            fragment.momentum.copy_(state["momentum"][number])
            fragment.assign(fragment.synchronized)

    def _count(self, weight: float, due: float) -> list[AllfoldError]:
        """Count a step: begin the rounds of now, with a weight, and apply those that are due.

        All of them, also where one fails: ranks call rounds in the same order.
        """
        self.steps += 1
        failures: list[AllfoldError] = []
        for fragment in self._fragments:
            if (self.steps + fragment.offset) % self._every == 0:
                if fragment.flight is not None:  # nothing was decided about it when it was due
                    failures += _failure_of(self._apply, fragment, fragment.flight)
                if fragment.flight is None:
                    failures += _failure_of(self._begin, fragment, weight)
        return failures + self._finish(due)

    def _begin(self, fragment: _Fragment, weight: float) -> None:
        if self._left_behind is not None:
            raise self._left_behind
        group = self._group or registry.default()
        if self._options["quorum"] is not None:
            self._check_is_the_only_one(group)
        began = fragment.local()
        delta = _room(group, began)
        torch.sub(fragment.given(), began, out=delta)
        series = fragment.series if self._feedback else None
        self._called += 1  # also if it cannot be called: then it counts as one that has failed
        round_ = group.start_round(delta, weight=weight, feedback=series, **self._options)
        due, brings = self.steps + self._delay, self.weight > 0  # which may change until then
        fragment.flight = _Flight(round_, delta, began, due, self._called, brings)

    def _check_is_the_only_one(self, group: Group) -> None:
        """Refuse a second one: what a late rank lacks is a number of rounds, whosever they are."""
        other = _with_quorum.setdefault(group, ref(self))()
        if other is None:
            _with_quorum[group] = ref(self)
        elif other is not self:
            raise InvalidArgument(
                "another DiLoCo of this group has a quorum, too: a late rank could not tell whose "
                "rounds it has missed. Give each a group of its own: init(group=...)"
            )

    def _finish(self, due: float) -> list[AllfoldError]:
        failures: list[AllfoldError] = []
        for fragment in self._fragments:
            if fragment.flight is not None and fragment.flight.due <= due:
                failures += _failure_of(self._apply, fragment, fragment.flight)
        return failures

    def _told(self, failures: Sequence[AllfoldError]) -> list[RoundResult]:
        """Return the results since the last time; with a failure, raise that and keep them."""
        if failures:
            raise failures[0]
        results, self._results = self._results, []
        return results

    def _apply(self, fragment: _Fragment, flight: _Flight) -> None:
        try:
            result = flight.round.wait()
        except ServiceError as error:
            if error.details.get("not_kept"):
                self._left_behind = error
            raise
        finally:  # where nothing is decided yet it is still in flight, and is waited for again
            if flight.round.is_completed():
                fragment.flight = None
        # Without the tensors: callers keep results, and the memory of these is shared.
        self._results.append(replace(result, tensors=None))
        self._done = max(self._done, flight.number + result.behind)
        keeps = flight.brings and not (result.took_part or result.kept)
        fragment.apply(flight, self._outer_lr, self._momentum, keeps=keeps)


@dataclass(frozen=True)
class _Flight:
    """A round in flight: of ``delta``, in place; ``began`` are the parameters of its begin."""

    round: Round
    delta: Tensor
    began: Tensor
    due: int  # step
    number: int  # of rounds that this rank had called with it
    brings: bool  # what this rank has done counts


class _Fragment:
    """Some parameters, and what all ranks have agreed on about them: θ and m, flat, in float32.

    Its rounds are at an ``offset``, and their rounding errors are a ``series``.
    """

    def __init__(self, parameters: Sequence[Tensor], series: str, offset: int) -> None:
        self._parameters = parameters
        self.series, self.offset = series, offset
        self._dtypes = {each.dtype for each in parameters}
        self.synchronized = self.local()
        self.momentum = torch.zeros_like(self.synchronized)
        self.flight: _Flight | None = None  # the round that is not applied yet

    def local(self) -> Tensor:
        """Return a copy of this rank's own parameters, flat, as float32."""
        return torch.cat([each.detach().float().reshape(-1) for each in self._parameters])

    def given(self) -> Tensor:
        """Return θ as the parameters have it, where they are of a type that rounds it.

        What that costs is no training: it must not be in what this rank has done since.
        """
        if self._dtypes <= {torch.float32, torch.float64}:
            return self.synchronized
        sizes = [each.numel() for each in self._parameters]
        parts = zip(self._parameters, torch.split(self.synchronized, sizes), strict=True)
        return torch.cat([part.to(parameter.dtype).float() for parameter, part in parts])

    @torch.no_grad()
    def assign(self, flat: Tensor) -> None:
        """Overwrite the parameters."""
        sizes = [each.numel() for each in self._parameters]
        for parameter, part in zip(self._parameters, torch.split(flat, sizes), strict=True):
            parameter.copy_(part.view_as(parameter))

    def apply(self, flight: _Flight, outer_lr: float, momentum: float, *, keeps: bool) -> None:
        """Do the outer step; where the round lacks what this rank has done, x ``keeps`` it.

        Each operation rounds by itself: fused ones give other bits on other processors.
        """
        gradient = flight.delta
        before = self.synchronized.clone() if keeps else flight.began
        self.momentum.mul_(momentum).add_(gradient)
        self.synchronized.sub_(self.momentum.mul(momentum).add_(gradient).mul_(outer_lr))
        self.assign(self.local().sub_(before).add_(self.synchronized))


def _parts(parameters: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Cut into so many runs of whole tensors, of about equal size."""
    until = [0, *accumulate(each.numel() for each in parameters)]
    cuts = [0]
    for part in range(1, count):
        may_end = range(cuts[-1] + 1, len(parameters) - count + part + 1)
        cuts.append(min(may_end, key=lambda end: abs(until[end] * count - until[-1] * part)))
    return [parameters[begin:end] for begin, end in pairwise([*cuts, len(parameters)])]


def _failure_of(action: Callable[..., None], *given: Any) -> list[AllfoldError]:
    """Do something; return the error that it ends with, if any."""
    try:
        action(*given)
    except AllfoldError as error:
        return [error]
    return []


def _room(group: Group, like: Tensor) -> Tensor:
    """Return memory for a Δ: shared with the agent, or else the round refuses it for all ranks."""
    try:
        return cast(Tensor, group.empty(like.numel(), torch.float32, device=like.device))
    except ArenaExhausted:
        return torch.empty_like(like)


def _check(every: int, delay: int, fragments: int, trained: Sequence[Tensor]) -> None:
    if not 0 <= delay < every:
        raise InvalidArgument(
            "every= is at least 1, and delay= at least 0 and less than that, so that a fragment "
            f"has one round at a time; got {every} and {delay}"
        )
    if not 1 <= fragments <= len(trained):
        raise InvalidArgument(
            "fragments= is at least 1 and at most the number of tensors that need a gradient "
            f"({len(trained)}), got {fragments}"
        )
    if any(each.is_complex() for each in trained):
        raise InvalidArgument(
            "there is no DiLoCo of complex parameters; give their torch.view_as_real"
        )
    if len({each.device for each in trained}) > 1:
        raise InvalidArgument("the parameters are on several devices; make a DiLoCo for each")
