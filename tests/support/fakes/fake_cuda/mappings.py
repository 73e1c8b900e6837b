"""Memory that is made, placed and shared apart, as CUDA's virtual memory calls have it."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from tests.support.fakes.fake_cuda.arrays import check

GRANULE = 2 << 20
"""The memory that these calls have to do with comes in multiples of it, in bytes."""


def name_of(answer: tuple[Any, ...]) -> str:
    """The result of a call, by its short name: ``INVALID_VALUE``."""
    return str(answer[0].name).removeprefix("CUDA_").removeprefix("ERROR_")


def use_device(ordinal: int = 0) -> Any:
    """Make a device current for this thread; its context."""
    check(driver.cuInit(0))
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(ordinal))))
    check(driver.cuCtxSetCurrent(context))
    return context


def descriptor_type() -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def create(size: int = GRANULE, ordinal: int = 0, shareable: bool = True) -> tuple[Any, ...]:
    """Make memory without an address; the driver's answer."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    if shareable:
        wanted.requestedHandleTypes = descriptor_type()
    return tuple(driver.cuMemCreate(size, wanted, 0))


def reserve(size: int = GRANULE) -> int:
    return int(check(driver.cuMemAddressReserve(size, 0, 0, 0)))


def give_access(address: int, ordinal: int, size: int = GRANULE) -> str:
    """Let a device use what is mapped; the name of the result."""
    wanted = driver.CUmemAccessDesc()
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return name_of(driver.cuMemSetAccess(address, size, [wanted], 1))


def mapping(ordinal: int = 0, size: int = GRANULE) -> tuple[int, Any]:
    """New memory that its own device may use: the address, and the handle."""
    handle, address = check(create(size, ordinal)), reserve(size)
    check(driver.cuMemMap(address, size, 0, handle, 0))
    assert give_access(address, ordinal, size) == "SUCCESS"
    return address, handle


def exported(handle: Any) -> int:
    """A descriptor of memory, to be closed by the caller."""
    return int(check(driver.cuMemExportToShareableHandle(handle, descriptor_type(), 0)))
