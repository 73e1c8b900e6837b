"""The bytes of arrays and torch tensors of any kind, read and written piece by piece."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np

from allfold._arena import Bytes
from allfold._tensors import check_writable, is_plain, unseen
from allfold_core.errors import InvalidArgument, PeerSentIncoherentTensor

_NOT_PLAIN = "is not a plain tensor in memory"


class TensorForm(NamedTuple):
    """The library, dtype and shape of a tensor.

    Attributes:
        library: ``"numpy"`` or ``"torch"``.
        dtype: as the library names it.
    """

    library: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * int(self._dtype().itemsize)

    def _dtype(self) -> Any:
        """The dtype of this name; a peer might name any attribute of the library."""
        torch = sys.modules.get("torch")
        try:
            found: Any = None
            if self.library == "numpy":
                found = np.dtype(self.dtype)
                known = not found.hasobject
            else:
                found = getattr(torch, self.dtype, None)
                known = torch is not None and isinstance(found, torch.dtype)
        except TypeError:
            known = False
        if not known:
            raise PeerSentIncoherentTensor(
                f"a tensor of {self.library} with dtype {self.dtype!r}, which this process does "
                "not have; import what the holders of the state import"
            )
        return found

    def empty(self) -> Any:
        """Return an uninitialized tensor of this form, in host memory."""
        if self.library == "numpy":
            return np.empty(self.shape, self._dtype())
        return sys.modules["torch"].empty(self.shape, dtype=self._dtype(), device="cpu")

    def to_json(self) -> list[Any]:
        return [self.library, self.dtype, list(self.shape)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Self:
        """The inverse of :meth:`to_json`; ``ValueError`` for anything else."""
        library, dtype, shape = data
        sizes = tuple(int(size) for size in shape)
        if library not in ("numpy", "torch") or any(size < 0 for size in sizes):
            raise ValueError(f"not a tensor: {str(data)[:200]}")
        return cls(library, str(dtype), sizes)

    def __str__(self) -> str:
        return f"{self.library} {self.dtype}{list(self.shape)}"


def is_tensor(value: Any) -> bool:
    """Return True for an array, or a torch tensor."""
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def check_overwritable(value: Any, name: str) -> None:
    """Refuse an array or tensor of a state that cannot take what other ranks send.

    Raises:
        InvalidArgument: names the entry; says why it cannot, and what to do.
    """
    try:
        check_writable(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"'{name}' cannot be part of a state: {error.message}") from None


def is_overwritable(value: Any) -> bool:
    """Return whether an array or tensor can take what other ranks send."""
    try:
        check_writable(value)
    except InvalidArgument:
        return False
    return True


def form_of(value: Any, path: str) -> TensorForm:
    """Return the form of an array or tensor.

    Raises:
        InvalidArgument: the tensor is not determined by its bytes (objects, sparse, quantized ...).
    """
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise InvalidArgument(f"{path} holds Python objects; a state has numbers")
        # The exact name of a type of another library, such as bfloat16, is not its str.
        text = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
        return TensorForm("numpy", text, value.shape)
    torch = sys.modules["torch"]
    if not is_plain(value, torch):
        raise InvalidArgument(f"{path} {_NOT_PLAIN} (layout {value.layout}); use a dense one")
    if hasattr(value, "placements"):
        raise InvalidArgument(
            f"{path} {_NOT_PLAIN}: a DTensor, of which each rank has another part; late ranks can "
            "only be given what is the same on all ranks"
        )
    return TensorForm("torch", str(value.dtype).removeprefix("torch."), tuple(value.shape))


def identity_of(value: Any) -> tuple[Any, ...]:
    """Return a key that is equal for views of the same memory, dtype and shape."""
    if isinstance(value, np.ndarray):
        about = value.__array_interface__
        return ("numpy", about["data"][0], value.shape, value.strides, value.dtype.str)
    return (
        "torch",
        value.data_ptr() if value.numel() else id(value),
        tuple(value.shape),
        value.stride(),
        str(value.dtype),
        str(value.device),
    )


class TensorBytes:
    """The bytes of a tensor in C order.

    If it is not contiguous, they are a copy, which :meth:`finish` writes back.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._is_array = isinstance(value, np.ndarray)
        if self._is_array:
            self._whole: Any = value if value.flags.c_contiguous else value.copy(order="C")
            self._flat = self._whole.reshape(-1).view(np.uint8)
        else:
            self._whole = value.detach().resolve_conj().resolve_neg().contiguous()
            self._flat = self._whole.reshape(-1).view(sys.modules["torch"].uint8)
            if self._whole.is_cpu:
                self._flat = self._flat.numpy()

    @property
    def nbytes(self) -> int:
        return int(self._flat.shape[0])

    def read(self, start: int, into: Bytes) -> None:
        """Copy bytes from ``start`` on; NumPy and torch let other threads work meanwhile."""
        part = self._flat[start : start + len(into)]
        if isinstance(part, np.ndarray):
            np.copyto(into, part)
        else:
            with unseen():
                sys.modules["torch"].from_numpy(into).copy_(part)

    def write(self, start: int, data: Bytes) -> None:
        """Overwrite bytes from ``start`` on."""
        part = self._flat[start : start + len(data)]
        if isinstance(part, np.ndarray):
            np.copyto(part, data)
        else:
            with unseen():
                part.copy_(sys.modules["torch"].from_numpy(data))

    def finish(self) -> None:
        """Write the copy of a tensor that is not contiguous back to it."""
        if self._is_array:
            if self._whole is not self.value:
                self.value[...] = self._whole
        elif self._whole.data_ptr() != self.value.data_ptr() or not self.value.is_contiguous():
            with unseen():
                self.value.detach().copy_(self._whole)
