"""NVIDIA's driver, and what it says when it cannot do something."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from allfold_core.errors import GpuFailed


class CudaUnavailable(Exception):
    """This process has no CUDA; says why."""


@lru_cache(maxsize=1)
def load() -> Any:
    """The driver's functions, ready for use.

    Raises:
        CudaUnavailable: there is no binding, no driver, or no GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable(
            "the package cuda-bindings is not installed (pip install 'allfold[cuda13]', or cuda12 "
            "for drivers before 580; see docs/gpu.md)"
        ) from error
    try:
        code, *_ = driver.cuInit(0)
    except Exception as error:  # of a type that depends on the version of the binding
        raise CudaUnavailable(f"there is no NVIDIA driver: {error}") from error
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
        raise GpuFailed(f"the GPU of this process: {name} failed with {code.name}")
    return results[0] if len(results) == 1 else tuple(results)
