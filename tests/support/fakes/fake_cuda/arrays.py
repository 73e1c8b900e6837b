"""Arrays in GPU memory, as a library like CuPy would hand them to Allfold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import DTypeLike, NDArray

_LEGACY_STREAM = 1
"""The legacy default stream in ``__cuda_array_interface__``; 0 is not allowed there."""


def check(answer: tuple[Any, ...]) -> Any:
    """Return the values of a driver's answer beside its result code.

    Raises:
        RuntimeError: it failed; the text is the error's name.
    """
    code, *results = answer
    if code:
        raise RuntimeError(code.name)
    return results[0] if len(results) == 1 else tuple(results)


class FakeTensor:
    """A contiguous array of ``shape`` in memory of its own, first with undefined contents.

    Attributes:
        stream: of the driver, on which it is made and read; 0 is the legacy default stream.
        address: of its first element, 0 where it has none.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: DTypeLike = np.float32,
        device: int = 0,
        own_stream: bool = False,
    ) -> None:
        self.shape = (shape,) if isinstance(shape, int) else shape
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.device = device
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.address = 0
        self.stream = 0
        check(driver.cuInit(0))
        self._context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device))))
        with self.current():
            if self.nbytes:
                self.address = int(check(driver.cuMemAlloc(self.nbytes)))
            if own_stream:
                flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
                self.stream = int(check(driver.cuStreamCreate(flags)))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": self.stream or _LEGACY_STREAM,
        }

    def put(self, values: Any) -> FakeTensor:
        """Copy from an array of numpy, on the tensor's stream, and wait for it."""
        host = np.array(np.broadcast_to(values, self.shape), self.dtype, order="C")
        with self.current():
            if self.nbytes:
                arguments = (self.address, host.ctypes.data, self.nbytes, self.stream)
                check(driver.cuMemcpyHtoDAsync(*arguments))
            check(driver.cuStreamSynchronize(self.stream))
        return self

    def get(self) -> NDArray[Any]:
        """Copy to an array of numpy, after all that the tensor's stream has been given."""
        host: NDArray[Any] = np.empty(self.shape, self.dtype)
        with self.current():
            if self.nbytes:
                arguments = (host.ctypes.data, self.address, self.nbytes, self.stream)
                check(driver.cuMemcpyDtoHAsync(*arguments))
            check(driver.cuStreamSynchronize(self.stream))
        return host

    def free(self) -> None:
        """Give the memory and the stream back; the tensor cannot be used any more."""
        with self.current():
            if self.address:
                check(driver.cuMemFree(self.address))
            if self.stream:
                check(driver.cuStreamDestroy(self.stream))
        self.address = self.stream = 0

    def current(self) -> _Current:
        """Makes its GPU the one that this thread talks to, as a context manager."""
        return _Current(self._context)


class _Current:
    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        check(driver.cuCtxPushCurrent(self._context))

    def __exit__(self, *_: object) -> None:
        check(driver.cuCtxPopCurrent())
