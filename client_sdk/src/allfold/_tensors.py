"""One view of NumPy arrays, torch tensors and arrays on a GPU: type, shape, address, bytes.

torch is never imported here: a torch tensor can only come from a program that has done so. Arrays
on a GPU are those of any library that has ``__cuda_array_interface__``, as CuPy and Numba have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import memmove
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import index, mul
from typing import Any

import numpy as np

from allfold._arena import ArenaBlock, Bytes
from allfold._elements import Element, element_of_array, element_of_torch
from allfold_core.dtypes import DType
from allfold_core.errors import InvalidArgument
from allfold_core.operations import MAX_DIMENSIONS

_MOST_ELEMENTS = 1 << 48  # more bytes than a process can address
_LEGACY_STREAM = 1  # what CUDA calls it, the one that waits for all others


@dataclass(slots=True, eq=False)  # not frozen, which takes three times as long to make
class TensorView:
    """A user's tensor, as elements that Allfold knows.

    Attributes:
        tensor: the user's.
        dtype: of the elements: those of a complex tensor are its real and imaginary parts, those of
            a type that Allfold cannot fold are bytes.
        shape: in such elements.
        address: of its first element, where it is contiguous and aligned; 0 otherwise.
        element: what the caller's elements are, and how they travel.
        gpu: the number of the CUDA device that has it; ``None`` for any other place.
        stream: the CUDA stream on which its owner works; ``None`` for torch's current one.
    """

    tensor: Any
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    address: int
    is_torch: bool
    element: Element
    gpu: int | None = None
    stream: int | None = None

    @property
    def is_complex(self) -> bool:
        """True if the elements that travel are the real and imaginary parts of others."""
        return self.element.is_complex

    @property
    def given_shape(self) -> tuple[int, ...]:
        """The shape in the caller's elements."""
        return self.shape[:-1] if self.element.inner else self.shape

    @property
    def given_numel(self) -> int:
        """The caller's elements."""
        return prod(self.given_shape)

    @property
    def rows(self) -> int:
        """The size of the first dimension; a scalar is one row."""
        return int(self.tensor.shape[0]) if len(self.tensor.shape) else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row, in the caller's elements."""
        return self.given_shape[1:] if len(self.tensor.shape) else self.given_shape

    @property
    def host_address(self) -> int:
        """The address of the data in host memory; 0 for a tensor on a device."""
        return self.address if self.gpu is None else 0

    @property
    def place(self) -> str:
        """The name of the device, for messages."""
        if self.gpu is not None:
            return f"cuda:{self.gpu}"
        return str(self.tensor.device) if self.is_torch else "the host"

    def copy_to(self, block: ArenaBlock, start: int) -> None:
        """Write the elements, in C order, to a block of the host, from this byte on.

        Those of a tensor on a device are copied by torch, which waits for them.
        """
        if address := self.host_address:
            memmove(block.address + start, address, self.nbytes)
        elif self.nbytes:
            with unseen():
                given = self.copyable()
                _shaped(block, start, self.nbytes, given)[...] = given

    def copy_from(self, block: ArenaBlock, start: int) -> None:
        """Read the elements back into the tensor, whatever its strides."""
        if (address := self.host_address) and self.stays():
            memmove(address, block.address + start, self.nbytes)
        elif self.nbytes:
            with unseen():
                given = self.copyable()
                given[...] = _shaped(block, start, self.nbytes, given)

    def stays(self) -> bool:
        """Return True if the memory is still the tensor's: torch lets anybody resize a storage."""
        return not self.is_torch or self.tensor.data_ptr() == self.address

    def copyable(self) -> Any:
        """Return the tensor in a type that torch can copy: it lacks some of those of one byte."""
        if not self.is_torch:
            return self.tensor
        data = self.tensor.detach()
        if not data.data_ptr():  # torch would go there, and crash
            raise InvalidArgument(
                "the tensor has no memory: its storage was resized; leave it alone until the op "
                "is done"
            )
        return data.view(sys.modules["torch"].uint8) if data.element_size() == 1 else data


@contextmanager
def unseen() -> Iterator[None]:
    """Run torch's operators as they are, whatever modes the calling thread is in.

    It may be in one that records them or replaces them, and the tensors may be those of inference
    mode, which torch lets only a thread write that is in it too.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.inference_mode():
        yield


def _shaped(block: ArenaBlock, start: int, nbytes: int, like: Any) -> Any:
    """The bytes of a block as a tensor of the type and shape of another."""
    assert block.memory is not None
    return make(block.memory[start : start + nbytes], like.shape, like.dtype)


_READ_ONLY = "the array is read-only, but others' data are written into it; use array.copy()"
_OVERLAPS = (
    "several elements share one place in memory (an expanded or broadcast tensor, or windows that "
    "overlap), but others' data are written into it"
)


def view(tensor: Any, *, written: bool = True, folded: bool = True) -> TensorView:
    """Look at a tensor.

    Args:
        tensor: a NumPy array, a torch tensor, or an array on a GPU.
        written: whether a result is written into it.
        folded: whether its elements are reduced; what is only moved may be of any type.

    Raises:
        InvalidArgument: it is not one that Allfold can move; says why and what to do.
    """
    if isinstance(tensor, np.ndarray):
        return _view_array(tensor, written, folded)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _view_torch(tensor, torch, written, folded)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _view_cuda(tensor, written, folded)
    raise InvalidArgument(
        f"expected a NumPy array, a torch tensor or a CUDA array, got {type(tensor).__name__}; "
        "the result is written into the tensor, so put a list or a number into one first: use "
        "numpy.array(tensor)"
    )


def _view_array(array: np.ndarray[Any, Any], written: bool, folded: bool) -> TensorView:
    element = element_of_array(array.dtype, folded)
    flags = array.flags
    if written and not flags.writeable:
        raise InvalidArgument(_READ_ONLY)
    _check_dimensions(len(array.shape))
    if written and not flags.c_contiguous:
        _check_strides(array.shape, array.strides, array.itemsize, "array.copy()")
    contiguous = flags.c_contiguous and flags.aligned
    address = array.__array_interface__["data"][0] if contiguous else 0
    shape = array.shape + element.inner
    return TensorView(array, element.dtype, shape, array.nbytes, address, False, element)


def _view_torch(tensor: Any, torch: Any, written: bool, folded: bool) -> TensorView:
    if not is_plain(tensor, torch):
        raise InvalidArgument(_why_not(tensor, torch))
    element = element_of_torch(tensor.dtype, folded)
    shape = tuple(tensor.shape)
    _check_dimensions(len(shape))
    contiguous = tensor.is_contiguous()
    if written and not contiguous:
        _check_strides(shape, tensor.stride(), 1, "tensor.clone()")
    address = tensor.data_ptr() if contiguous else 0
    if address % element.dtype.itemsize or tensor.is_conj() or tensor.is_neg():
        address = 0
    nbytes = tensor.numel() * element.itemsize
    shape += element.inner
    seen = TensorView(tensor, element.dtype, shape, nbytes, address, True, element)
    if not tensor.is_cpu:
        if tensor.is_cuda:
            seen.gpu = tensor.get_device()
        else:  # torch itself copies what no other library can reach
            seen.address = 0
    return seen


def _view_cuda(array: Any, written: bool, folded: bool) -> TensorView:
    """Look at an array by https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""
    about = array.__cuda_array_interface__
    shape = tuple(about["shape"])
    _check_dimensions(len(shape))
    dtype = np.dtype(about["typestr"])
    element = element_of_array(dtype, folded)
    address, read_only = about["data"]
    if written and read_only:
        raise InvalidArgument(_READ_ONLY)
    strides = about.get("strides")
    if strides is not None and tuple(strides) != _c_strides(shape, dtype.itemsize):
        address = 0
    nbytes = prod(shape) * dtype.itemsize
    seen = TensorView(array, element.dtype, shape + element.inner, nbytes, address, False, element)
    seen.gpu = _ordinal_of(array, about["data"][0]) if about["data"][0] else 0
    seen.stream = about.get("stream") or _LEGACY_STREAM
    return seen


def _ordinal_of(array: Any, address: int) -> int:
    """The number of the GPU that has an array."""
    from allfold._cuda.device import NoCuda, ordinal_of

    try:
        return ordinal_of(address)
    except NoCuda as error:
        raise InvalidArgument(
            f"the {type(array).__name__} on a GPU cannot be reached: {error}; see to that, or copy "
            "it to the host"
        ) from error


def _c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = accumulate(reversed(shape[1:]), mul, initial=itemsize)
    return tuple(strides)[::-1] if shape else ()


def is_plain(tensor: Any, torch: Any) -> bool:
    """Return True if a torch tensor is a plain array of numbers in memory."""
    return not (
        tensor.is_nested
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_quantized
    )


def _why_not(tensor: Any, torch: Any) -> str:
    """Return why a tensor is no plain array of numbers in memory, and what to do."""
    if tensor.is_nested:
        return "the tensor is nested; move its parts one by one: use tensor.unbind()"
    if tensor.layout is not torch.strided:
        return f"the tensor has layout {tensor.layout}; use tensor.to_dense()"
    if tensor.is_meta:
        return "the tensor is on meta and has no data; use torch.empty_like(tensor, device='cpu')"
    return f"the tensor is quantized ({tensor.dtype}); use tensor.int_repr()"


def _check_dimensions(count: int) -> None:
    if count >= MAX_DIMENSIONS:
        raise InvalidArgument(f"{count} dimensions; at most {MAX_DIMENSIONS - 1} are possible")


def _check_strides(shape: Sequence[int], strides: Sequence[int], step: int, remedy: str) -> None:
    if all(shape) and _overlaps_itself(shape, strides, step):
        raise InvalidArgument(f"{_OVERLAPS}; use {remedy}")


def check_writable(tensor: Any) -> None:
    """Refuse an array or a torch tensor whose elements cannot be overwritten one by one.

    Raises:
        InvalidArgument: says why, and what to do.
    """
    if not isinstance(tensor, np.ndarray):
        torch: Any = sys.modules["torch"]
        if not is_plain(tensor, torch):
            raise InvalidArgument(_why_not(tensor, torch))
        _check_strides(tuple(tensor.shape), tensor.stride(), 1, "tensor.clone()")
        return
    if not tensor.flags.writeable:
        raise InvalidArgument(_READ_ONLY)
    _check_strides(tensor.shape, tensor.strides, tensor.itemsize, "array.copy()")


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Return True if elements may share memory; ``strides`` have the unit of ``step``.

    As in torch, an interleaving of dimensions that happens to touch nothing twice counts as well.
    """
    reach = step
    dimensions = zip(shape, map(abs, strides), strict=True)
    for size, stride in sorted(dimensions, key=_by_stride):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def _by_stride(dimension: tuple[int, int]) -> int:
    return dimension[1]


def like(tensor: Any, shape: tuple[int, ...]) -> Any:
    """A fresh tensor of the same kind and dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    if isinstance(tensor, np.ndarray):
        return np.empty(shape, tensor.dtype)
    library: Any = sys.modules.get("cupy")
    if library is not None and isinstance(tensor, library.ndarray):
        return library.empty(shape, tensor.dtype)
    raise InvalidArgument(
        f"a new {type(tensor).__name__} cannot be made for the result; say with output= where it "
        "is to go"
    )


def sizes_of(shape: Any) -> tuple[int, ...]:
    """Return the sizes of a shape, which is one integer or several, of Python or NumPy.

    Raises:
        InvalidArgument: it is something else, or there is no such tensor.
    """
    try:
        sizes = (index(shape),) if hasattr(shape, "__index__") else tuple(map(index, shape))
    except TypeError:
        raise InvalidArgument(f"a shape is an integer or several, got {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise InvalidArgument(f"a shape has no negative sizes, got {sizes}")
    if prod(sizes) > _MOST_ELEMENTS:
        raise InvalidArgument(
            f"no machine has memory for {sizes}, which are {prod(sizes)} elements"
        )
    return sizes


def make(memory: Bytes, shape: Sequence[int], dtype: Any) -> Any:
    """A tensor of the given shape over raw memory: torch's for a torch dtype, else NumPy's."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return torch.from_numpy(memory).view(dtype).reshape(tuple(shape))
    return memory.view(np.dtype(dtype)).reshape(tuple(shape))
