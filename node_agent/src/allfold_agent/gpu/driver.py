"""NVIDIA's driver, through its own bindings: what it says when it cannot do something."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from allfold_core.errors import GpuFailed

_CONTROL = Path("/dev/nvidiactl")
_NO_DRIVER = "there is no NVIDIA driver"


class CudaUnavailable(Exception):
    """This process has no CUDA; says why."""


@lru_cache(maxsize=1)
def load() -> Any:
    """The driver's functions, ready for use; :class:`CudaUnavailable` where there are none."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        reason = "cuda-bindings is not installed: see the extras cuda13 and cuda12 in docs/gpu.md"
        raise CudaUnavailable(reason if _CONTROL.exists() else _NO_DRIVER) from error
    try:
        code, *_ = driver.cuInit(0)
    except Exception as error:  # of a type that depends on the version of the binding
        raise CudaUnavailable(_NO_DRIVER) from error
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise CudaUnavailable("the NVIDIA driver shows no GPU")
    if code:
        raise CudaUnavailable(f"the NVIDIA driver does not work: {code.name}")
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver; what it returns beside the error code.

    Raises:
        GpuFailed: it could not.
    """
    code, *results = getattr(load(), name)(*arguments)
    if code:
        raise GpuFailed(f"the GPU of the node agent: {name} failed with {code.name}")
    return results[0] if len(results) == 1 else tuple(results)
