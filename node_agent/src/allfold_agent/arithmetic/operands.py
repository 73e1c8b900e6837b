"""The operands of one op on this node: its layout, its arithmetic, its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from allfold_agent.arithmetic.arrays import Array, overlap
from allfold_agent.arithmetic.codecs import Codec, codec_of
from allfold_agent.arithmetic.error_feedback import ResidualAttempt
from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.arithmetic.weights import CODE_WEIGHT, Weights
from allfold_core.dtypes import Wire
from allfold_core.schedules.parts import End, NodeParts, Part


@dataclass(slots=True)
class Operands:
    """One op of the local ranks.

    Attributes:
        layout: which elements come from where and go where.
        arithmetic: how they are folded.
        inputs: the elements that each local rank brings, flat.
        outputs: the elements that each local rank gets, flat.
        wire: how data travels to other nodes.
        codec: of a lossy wire.
        residual: with error feedback, of the op's series.
        weights: of a weighted mean.
        weighs: every code says which weight is in it, as what rounding costs is kept by weight.
    """

    layout: NodeParts
    arithmetic: Arithmetic
    inputs: Mapping[int, Array]
    outputs: Mapping[int, Array]
    wire: Wire = Wire.NATIVE
    residual: ResidualAttempt | None = field(default=None, repr=False)
    weights: Weights | None = field(default=None, repr=False)
    weighs: bool = False
    _codec: Codec | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._codec = codec_of(self.wire)

    def codec(self, start: int) -> Codec | None:
        """The codec of a chunk that begins at an element; ``None`` if it travels as it is."""
        exact = self.layout.weights
        return self._codec if exact is None or start < exact.start else None

    def wire_bytes(self, start: int, numel: int) -> int:
        """The size on the wire of a chunk of ``numel`` elements from ``start`` on."""
        if self.codec(start) is None:
            return numel * self.arithmetic.kept_itemsize
        return self.code_bytes(numel) + (CODE_WEIGHT.size if self.weighs else 0)

    def code_bytes(self, numel: int) -> int:
        """The size of the code of so many elements, without the weight behind it."""
        return self.wire.nbytes(numel, self.arithmetic.kept_itemsize)

    def inputs_of(self, part: Part, start: int, stop: int) -> list[Array]:
        """Return the inputs of the local ranks to a range of a part, in rank order."""
        return _ranges(self.inputs, part.sources, start - part.slice.start, stop - start)

    def only_input(self, start: int, stop: int) -> Array | None:
        """The input of the one rank that brings all of a range, if it can be folded as it is."""
        if not self.arithmetic.takes_inputs_as_they_are:
            return None
        [*pieces] = self.layout.parts_in(start, stop)
        if len(pieces) != 1 or len(pieces[0][0].sources) != 1:
            return None
        [alone] = self.inputs_of(*pieces[0])
        return alone

    def outputs_of(self, part: Part, start: int, stop: int) -> list[Array]:
        """Return the outputs on this node that a range of a part goes to."""
        return _ranges(self.outputs, part.targets, start - part.slice.start, stop - start)

    def outputs_are_no_inputs(self) -> bool:
        """Return true if no rank's output overlaps its input."""
        return not any(overlap(self.inputs[rank], output) for rank, output in self.outputs.items())

    def fold_inputs(self, part: Part, start: int, stop: int, out: Array) -> None:
        """``out`` becomes the fold of what the local ranks bring to a range of a part."""
        inputs = self.inputs_of(part, start, stop)
        if self.weights is None:
            self.arithmetic.fold_inputs(out, inputs)
        elif part.slice == self.layout.weights:
            self.arithmetic.fold(out, inputs)
        else:
            inputs, factors = self.weights.taking_part(part.sources, inputs)
            self.arithmetic.fold_inputs(out, inputs, factors)

    def hand_out(self, part: Part, start: int, stop: int, result: Array) -> None:
        """Write a range of the result to the local ranks that get it.

        A mean without any weight has none: what the ranks have stays as it is.
        """
        if self.weights is None:
            self.arithmetic.finish(self.outputs_of(part, start, stop), result)
        elif self.weights.total:
            outputs = self.outputs_of(part, start, stop)
            self.arithmetic.finish(outputs, result, self.weights.total)

    def fold_locally(self, part: Part, start: int, stop: int) -> None:
        """Fold a range of all local ranks into their outputs, where there is no other node.

        The first output holds the running fold, so that a chunk is read and written in cache. It
        may be the first rank's input (an op in place): every input is read before its own output
        is written, and no other input is that memory.
        """
        outputs = self.outputs_of(part, start, stop)
        if not outputs:
            return
        if self.arithmetic.converts:
            kept = np.empty(stop - start, self.arithmetic.kept_dtype)
        else:
            kept = outputs[0]
        if self.weights is None or self.weights.total:
            self.fold_inputs(part, start, stop, kept)
            self.hand_out(part, start, stop, kept)

    def without_inputs(self) -> Operands:
        """Return operands of the same layout and arithmetic that refer to no rank's memory."""
        return Operands(self.layout, self.arithmetic, {}, {}, self.wire, weighs=self.weighs)


def _ranges(
    arrays: Mapping[int, Array], ends: Sequence[End], skipped: int, numel: int
) -> list[Array]:
    """Return ``numel`` elements of each end, from the element ``skipped`` on.

    Whole arrays are returned as they are: making a view takes longer than a small fold."""
    ranges = []
    for end in ends:
        array = arrays[end.rank]
        if len(array) != numel:
            start = end.offset + skipped
            array = array[start : start + numel]
        ranges.append(array)
    return ranges
