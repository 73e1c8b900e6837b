"""Calls that are like earlier ones: what had to be looked up for these is kept."""

from __future__ import annotations

from allfold._calls.call import EpochView
from allfold._calls.template import Template
from allfold._lane.recipe import Recipe
from allfold._lane.short_lane import ShortLane
from allfold._lane.slot_plan import SlotPlan


class Prepared:
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
        self, view: EpochView, packed: bytes, template: Template, lane: ShortLane | None
    ) -> None:
        self.view = view
        self.packed = packed
        self.template = template
        self.lane = lane
        self.recipe: Recipe | None = None if lane is None else lane.recipe(packed)
        self._plans: dict[int, SlotPlan] = {}

    def plan(self, slot: int) -> SlotPlan:
        """Return what such a call reads and writes in a slot of its lane."""
        found = self._plans.get(slot)
        return self._made_plan(slot) if found is None else found

    def _made_plan(self, slot: int) -> SlotPlan:
        assert self.lane is not None
        assert self.recipe is not None
        template = self.template
        inputs, outputs = ([each.shape for each in side] for side in template.sides)
        plan = SlotPlan(self.lane.page, slot, self.recipe, inputs, outputs)
        self._plans[slot] = plan
        return plan
