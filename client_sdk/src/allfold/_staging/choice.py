"""The choice of memory for the tensors of a call, kept for calls that are like earlier ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from allfold._calls.call import EpochView, RankCall
from allfold._calls.template import Template
from allfold._lane.recipe import Recipe, SlotPlan
from allfold._lane.short_lane import RankLane
from allfold._process.settings import Path
from allfold._session.session import Session
from allfold._staging.host import Staged
from allfold._tensors import TensorView
from allfold_core.errors import InvalidArgument


class PreparedCall:
    """The prepared form of calls of one kind, with the same options, dtypes and shapes.

    Attributes:
        view: the epoch in which they are called.
        packed: their fingerprint.
        template: their tensors.
        lane: the short lane of the epoch, if it has one.
        recipe: how they are done there; ``None`` if they are messages.
    """

    __slots__ = ("_plans", "lane", "packed", "recipe", "template", "view")

    def __init__(
        self, view: EpochView, packed: bytes, template: Template, lane: RankLane | None
    ) -> None:
        self.view = view
        self.packed = packed
        self.template = template
        self.lane = lane
        self.recipe: Recipe | None = None if lane is None else lane.recipes.of(packed)
        self._plans: dict[int, SlotPlan] = {}

    def plan(self, slot: int) -> SlotPlan:
        """Return what such a call reads and writes in a slot of its lane."""
        found = self._plans.get(slot)
        return self._made_plan(slot) if found is None else found

    def _made_plan(self, slot: int) -> SlotPlan:
        assert self.lane is not None
        assert self.recipe is not None
        template = self.template
        sides = (template.inputs, template.outputs)
        inputs, outputs = ([place.shape for place in side] for side in sides)
        plan = SlotPlan(self.lane.page, slot, self.recipe, inputs, outputs)
        self._plans[slot] = plan
        return plan


def stage(session: Session, call: RankCall, nodes: int) -> Staged:
    """Put the tensors of a call where the agent finds them.

    Args:
        nodes: of the group.

    Raises:
        ArenaExhausted: no memory is left.
        InvalidArgument: they are not all in one place.
    """
    views = call.inputs + call.outputs
    for view in views:
        if view.gpu is not None:
            return _stage_on_gpu(session, call, views, nodes)
    return Staged(session.arena, call)


def _stage_on_gpu(
    session: Session, call: RankCall, views: Sequence[TensorView], nodes: int
) -> Staged:
    views = [view for view in views if view.nbytes] or views  # nothing may be anywhere
    first = views[0].gpu
    if any(view.gpu != first for view in views):
        places = sorted({view.place for view in views})
        raise InvalidArgument(
            f"the tensors of one call are in one place, got {' and '.join(places)}; move them first"
        )
    if first is None:
        return Staged(session.arena, call)
    gpu = session.gpu(first)
    from allfold._staging.cuda import CudaStaged

    if gpu.path is not Path.HOST and not call.on_host:
        return CudaStaged(gpu, call, nodes)
    why = "a round is done in the memory of the host" if call.on_host else gpu.why
    for view in views:
        if not view.is_torch:
            raise InvalidArgument(
                f"a {type(view.tensor).__name__} on {view.place} cannot be moved, because "
                f"{why}; a torch tensor could, or copy it to the host"
            )
    if not any(view.nbytes for view in call.inputs):
        # The result is copied on whichever stream is current then. To copy an input waits for what
        # the caller's stream was given; without one, some of that could still come to the result.
        sys.modules["torch"].cuda.current_stream(first).synchronize()
    return Staged(session.arena, call)
