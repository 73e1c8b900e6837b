"""A call as a template for others that are alike (see :mod:`allfold._calls.template`)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from allfold._calls.call import RankCall
from allfold._elements import stored_as
from allfold._tensors import TensorView
from allfold_core.operations import ReduceOp

Likeness = tuple[Any, ...]

# Values that stand for themselves: what is equal to one of them means the same.
_PLAIN = frozenset({str, type(None), ReduceOp})
# Options that are no part of what a call is.
_APART = frozenset({"timeout", "async_op"})


def likeness(
    function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]
) -> Likeness | None:
    """Return what calls have in common that are alike; ``None`` of one that is unlike any other.

    Args:
        function: the collective.
        given, named: its arguments.
    """
    parts: list[Any] = [function, len(given)]  # a name is no value
    for each in given:
        kind = type(each)
        if kind is np.ndarray:
            parts.append((each.dtype, each.shape, each.flags.num))
        elif kind in _PLAIN:
            parts.append(each)
        elif (part := _part(each)) is not None:
            parts.append(part)
        else:
            return None
    for name, each in named.items():
        if name in _APART:
            continue
        if type(each) in _PLAIN:
            parts += (name, each)
        elif (part := _part(each)) is not None:
            parts += (name, part)
        else:
            return None
    return tuple(parts)


def _part(given: Any) -> Hashable | None:
    """Return what is alike of one argument; ``None`` if nothing can be said."""
    kind: Any = type(given)
    describe = _describer(kind)
    return None if describe is None else describe(given)


@lru_cache(maxsize=256)
def _describer(kind: Any) -> Callable[[Any], Hashable | None] | None:
    if kind is np.ndarray:
        return _of_array
    if kind in _PLAIN:
        return _itself
    if kind in (int, float):
        return _of_number
    if kind in (list, tuple):
        return _of_sequence
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return _describer_of_torch(torch.strided)
    return None


def _itself(given: Hashable) -> Hashable:
    return (type(given), given)


def _of_array(array: np.ndarray[Any, Any]) -> Hashable:
    return array.dtype, array.shape, array.flags.num


def _of_number(number: float) -> Hashable:
    """A number with its type: True equals 1, and is no rank."""
    return type(number), number


def _of_sequence(given: Sequence[Any]) -> Hashable | None:
    parts: list[Any] = [list]
    for each in given:
        if (part := _part(each)) is None:
            return None
        parts.append(part)
    return tuple(parts)


def _describer_of_torch(strided: Any) -> Callable[[Any], Hashable | None]:
    def describe(tensor: Any) -> Hashable | None:
        """Describe a plain tensor of the host, which lies there as it looks."""
        if (
            tensor.layout is not strided
            or not tensor.is_cpu
            or tensor.is_nested
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        return tensor.dtype, tensor.shape

    return describe


Elements = np.ndarray[Any, np.dtype[Any]]
Arrays = list[Elements]

_NEW = -1
_WHOLE = -1
# Tensors of one call that are remembered by their addresses.
_REMEMBERED = 256


class TensorPlace:
    """The place where alike calls have a tensor.

    Args:
        view: the tensor of one of these calls.
        argument: which argument has it; -1 if each call makes a new one.
        element: which of a list; -1 where the argument is the tensor.
    """

    __slots__ = (
        "_arrays", "_dtype", "_element", "_shape", "argument", "dtype", "element", "is_torch",
        "nbytes", "shape",
    )  # fmt: skip

    def __init__(self, view: TensorView, argument: int, element: int) -> None:
        self.argument = argument
        self.element = element
        self.dtype = view.dtype
        self.shape = view.shape
        self.nbytes = view.nbytes
        self.is_torch = view.is_torch
        self._dtype, self._shape = view.tensor.dtype, tuple(view.tensor.shape)
        self._element = view.element
        self._arrays: dict[int, Elements] = {}

    @property
    def is_new(self) -> bool:
        """True if each call makes the tensor."""
        return self.argument == _NEW

    def tensor(self, given: Sequence[Any]) -> Any:
        """Return the tensor of a call with these arguments."""
        if self.argument == _NEW:
            return self._new()
        found = given[self.argument]
        return found if self.element == _WHOLE else found[self.element]

    def _new(self) -> Any:
        if self.is_torch:
            return sys.modules["torch"].empty(self._shape, dtype=self._dtype, device="cpu")
        return np.empty(self._shape, self._dtype)

    def array(self, tensor: Any) -> Elements | None:
        """Return the elements of such a tensor; ``None`` if they cannot be seen as they are.

        For this call alone: the array does not keep the memory of a torch tensor.
        """
        if not self.is_torch:
            return tensor  # type: ignore[no-any-return]
        address = tensor.data_ptr()
        return self._arrays.get(address) if address in self._arrays else self._mapped(address)

    def _mapped(self, address: int) -> Elements | None:
        if not address or address % self.dtype.itemsize:
            return None
        if len(self._arrays) >= _REMEMBERED:
            self._arrays.clear()
        memory: Any = (ctypes.c_char * self.nbytes).from_address(address)
        array: Elements = np.frombuffer(memory, stored_as(self.dtype)).reshape(self.shape)
        self._arrays[address] = array
        return array

    def view(self, tensor: Any) -> TensorView:
        """Look at such a tensor."""
        address = tensor.data_ptr() if self.is_torch else tensor.__array_interface__["data"][0]
        if address % self.dtype.itemsize:
            address = 0
        return TensorView(
            tensor, self.dtype, self.shape, self.nbytes, address, self.is_torch, self._element
        )


class Template:
    """The tensors of calls that are alike.

    Attributes:
        inputs, outputs: their places.
        in_place: as of a call.
    """

    __slots__ = ("_result", "in_place", "inputs", "outputs")

    def __init__(
        self,
        inputs: tuple[TensorPlace, ...],
        outputs: tuple[TensorPlace, ...],
        result: int,
        *,
        in_place: bool,
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.in_place = in_place
        self._result = result

    @classmethod
    def of(cls, call: RankCall, given: Sequence[Any]) -> Template | None:
        """Return the template that a call makes; ``None`` if others need to be looked at.

        Args:
            given: the arguments of the call.
        """
        if not all(map(_is_plain, call.inputs + call.outputs)):
            return None
        result = next((i for i, each in enumerate(given) if each is call.result), _NEW)
        is_new = result == _NEW and call.result is not None
        places = _Places(given)
        inputs = places.of(call.inputs)
        outputs = inputs if call.outputs is call.inputs else places.of(call.outputs)
        if inputs is None or outputs is None or (is_new and not _is_alone(call)):
            return None
        if any(each.is_new for each in inputs) or any(each.is_new != is_new for each in outputs):
            return None
        return cls(inputs, outputs, result, in_place=call.in_place)

    def fill(self, given: Sequence[Any]) -> Filled:
        """Return the tensors of a call with these arguments."""
        inputs = [place.tensor(given) for place in self.inputs]
        outputs = inputs
        if self.outputs is not self.inputs:
            outputs = [place.tensor(given) for place in self.outputs]
        if self._result != _NEW:
            return Filled(self, inputs, outputs, given[self._result])
        return Filled(self, inputs, outputs, outputs[0] if outputs else None)


class Filled:
    """The tensors of one of these calls.

    Attributes:
        result: what its caller gets in the end.
    """

    __slots__ = ("_inputs", "_outputs", "_template", "result")

    def __init__(
        self, template: Template, inputs: Sequence[Any], outputs: Sequence[Any], result: Any
    ) -> None:
        self._template = template
        self._inputs = inputs
        self._outputs = outputs
        self.result = result

    def arrays(self) -> tuple[Arrays, Arrays] | None:
        """Return the elements of inputs and outputs; ``None`` if they cannot be seen as they are.

        They do not keep the memory of torch tensors.
        """
        inputs = _arrays(self._template.inputs, self._inputs)
        if self._outputs is self._inputs:
            outputs = inputs
        else:
            outputs = _arrays(self._template.outputs, self._outputs)
        return None if inputs is None or outputs is None else (inputs, outputs)

    def call(self) -> RankCall:
        """Return the call with views of its tensors."""
        template = self._template
        inputs = outputs = _views(template.inputs, self._inputs)
        if self._outputs is not self._inputs:
            outputs = _views(template.outputs, self._outputs)
        return RankCall(
            inputs=inputs, outputs=outputs, in_place=template.in_place, result=self.result
        )


def _arrays(places: Sequence[TensorPlace], tensors: Sequence[Any]) -> Arrays | None:
    found = []
    for place, tensor in zip(places, tensors, strict=True):
        if (array := place.array(tensor)) is None:
            return None
        found.append(array)
    return found


def _views(places: Sequence[TensorPlace], tensors: Sequence[Any]) -> tuple[TensorView, ...]:
    return tuple([place.view(each) for place, each in zip(places, tensors, strict=True)])


def _is_plain(view: TensorView) -> bool:
    """Return True if the elements lie in the memory of this process one after the other."""
    if view.gpu is not None or view.is_complex or not (view.address or not view.nbytes):
        return False
    if view.is_torch:
        return bool(view.tensor.is_cpu)
    tensor = view.tensor
    return type(tensor) is np.ndarray and tensor.dtype == stored_as(view.dtype)


def _is_alone(call: RankCall) -> bool:
    return len(call.outputs) == 1 and call.outputs[0].tensor is call.result


class _Places:
    """The places of the tensors in the arguments of a call."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._found: dict[int, list[tuple[int, int]]] = {}
        for argument, each in enumerate(given):
            self._note(each, argument, _WHOLE)
            if isinstance(each, list | tuple):
                for element, one in enumerate(each):
                    self._note(one, argument, element)

    def _note(self, each: Any, argument: int, element: int) -> None:
        self._found.setdefault(id(each), []).append((argument, element))

    def of(self, views: Sequence[TensorView]) -> tuple[TensorPlace, ...] | None:
        """Return the places; ``None`` if a tensor was given twice, so that there are several."""
        found = [self._found.get(id(view.tensor), [(_NEW, _WHOLE)]) for view in views]
        if any(len(each) > 1 for each in found):
            return None
        return tuple(TensorPlace(view, *each) for view, (each,) in zip(views, found, strict=True))
