"""One GPU as this process sees it: memory, and one stream for all that Allfold does there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import string_at
from functools import lru_cache
from time import monotonic, sleep
from typing import Any, NamedTuple

from allfold_core.errors import AllfoldError, GpuFailed, InvalidArgument


class NoCuda(Exception):
    """This process has no CUDA; says why."""


@lru_cache(maxsize=1)
def load() -> Any:
    """The driver's functions, ready for use.

    Raises:
        NoCuda: there is no binding, no driver, or no GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoCuda(
            "the package cuda-bindings is not installed (pip install 'allfold[cuda13]', or cuda12 "
            "for drivers before 580; see docs/gpu.md)"
        ) from error
    try:
        code, *_ = driver.cuInit(0)
    except Exception as error:  # of a type that depends on the version of the binding
        raise NoCuda(f"there is no NVIDIA driver: {error}") from error
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise NoCuda("the NVIDIA driver shows no GPU")
    if code:
        raise NoCuda(f"the NVIDIA driver does not work: {code.name}")
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


_UUID_BYTES = 16
_DEFAULT_STREAM = 0
_LOOK_AGAIN_SECONDS = 0.0002
PATIENCE_SECONDS = 10.0
"""The longest wait for a GPU, in seconds."""


class Event:
    """A point in the work of a stream."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device = device
        self.handle = call("cuEventCreate", load().CUevent_flags.CU_EVENT_DISABLE_TIMING)
        call("cuEventRecord", self.handle, stream)

    def __del__(self) -> None:
        # Unless it was never made, or the driver is gone.
        with suppress(AttributeError, GpuFailed), self._device.current():
            call("cuEventDestroy", self.handle)


class Allocation(NamedTuple):
    """Memory of a GPU.

    Attributes:
        descriptor: what another process opens it with; to be closed by whoever has it.
    """

    address: int
    size: int
    descriptor: int


class CudaDevice:
    """A GPU, by its number in this process.

    All copies go through one stream of our own. What they go to is touched by nothing else, so a
    block can be given to the next op while copies out of it are still to come: the copies into it
    come later.
    """

    def __init__(self, ordinal: int) -> None:
        driver = load()
        self.ordinal = ordinal
        self._handle = call("cuDeviceGet", ordinal)
        self.name = call("cuDeviceGetName", 128, self._handle).split(b"\0")[0].decode()
        self.uuid = _uuid(self._handle)
        self._context = call("cuDevicePrimaryCtxRetain", self._handle)
        with self.current():
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self.stream = call("cuStreamCreate", flags)
            self.side_stream = call("cuStreamCreate", flags)
        self._used: dict[int, Event] = {}
        self._patience = PATIENCE_SECONDS

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the GPU that this thread talks to."""
        call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")

    # All of the following inside of `current`.

    def wait_for(self, stream: int) -> None:
        """Make later work of our stream wait for all work that another stream has been given.

        Raises:
            InvalidArgument: that stream records a graph, which would record our work as well.
        """
        self.check_not_recording(stream)
        self._used[int(stream)] = event = Event(self, stream)
        order(self.stream, event)

    def check_not_recording(self, stream: Any) -> None:
        """``InvalidArgument`` where a stream records a graph."""
        if is_recording(stream):
            raise InvalidArgument(
                "the current stream records a CUDA graph, of which a collective cannot be a part; "
                "call it before or after"
            )

    def wait_for_users(self) -> None:
        """Make later work of our stream wait for all work that the user's streams have been given.

        Of others than the default one, for what they had been given when we last saw them: their
        owners may have destroyed them since.
        """
        with suppress(AllfoldError):
            self.wait_for(_DEFAULT_STREAM)
        for event in list(self._used.values()):
            order(self.stream, event)

    def mark(self) -> Event:
        """The present point of our stream."""
        return Event(self, self.stream)

    def finished_within(self, seconds: float, stream: Any = None) -> bool:
        """Return true if our streams are done within ``seconds``."""
        deadline = monotonic() + seconds
        while True:
            code, *_ = load().cuStreamQuery(self.stream if stream is None else stream)
            if not code:
                return True
            if code != load().CUresult.CUDA_ERROR_NOT_READY:
                raise GpuFailed(f"the GPU of this process: cuStreamQuery failed with {code.name}")
            if monotonic() > deadline:
                return False
            sleep(_LOOK_AGAIN_SECONDS)  # CUDA's own way of waiting has no deadline

    def finish(self) -> None:
        """Wait for all that our stream has been given, so that memory can be let go.

        There may be much of it, and all of it stays where the GPU is stuck: after one wait that
        timed out, later callers do not wait again.

        Raises:
            GpuFailed: the GPU does not come to an end.
        """
        finished = self.finished_within(self._patience)
        self._patience = PATIENCE_SECONDS if finished else 0.0
        if not finished:
            raise GpuFailed(f"cuda:{self.ordinal} does not finish its work")

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None:
        """Copy on our stream, or another, between any addresses that the GPU reaches."""
        on = self.stream if stream is None else stream
        call("cuMemcpyAsync", target, source, nbytes, on)

    def write(self, address: int, value: int) -> None:
        """Write a word of the host's memory when our stream gets here, after all before it."""
        call("cuStreamWriteValue32", self.stream, address, value, 0)

    def register(self, address: int, nbytes: int) -> int:
        """Register memory of the host with the GPU; return its address for the GPU."""
        driver = load()
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        call("cuMemHostRegister", address, nbytes, flags)
        try:
            return int(call("cuMemHostGetDevicePointer", address, 0))
        except GpuFailed:
            self.unregister(address)
            raise

    def unregister(self, address: int) -> None:
        call("cuMemHostUnregister", address)

    def allocate(self, nbytes: int) -> Allocation:
        """Memory of the GPU that other processes can open. A framework's own need not be such.

        It is opened with a file descriptor, which the local socket takes along. The older handles
        of CUDA (cuIpcGetMemHandle) ask for more than that: between containers, for instance, that
        they see each other's processes.
        """
        driver = load()
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = _descriptor_type()
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = int(call("cuMemGetAllocationGranularity", properties, least))
        size = -(-nbytes // granule) * granule
        handle = call("cuMemCreate", size, properties, 0)
        address = 0
        try:
            address = int(call("cuMemAddressReserve", size, 0, 0, 0))
            call("cuMemMap", address, size, 0, handle, 0)
            access = self._access()
            call("cuMemSetAccess", address, size, access, len(access))
            descriptor = int(call("cuMemExportToShareableHandle", handle, _descriptor_type(), 0))
        except GpuFailed:
            self.free(address, size)
            raise
        finally:
            call("cuMemRelease", handle)  # the mapping keeps the memory
        return Allocation(address, size, descriptor)

    def _access(self) -> list[Any]:
        """Access for this GPU and, as with a framework's own memory, for those that reach it."""
        driver, found = load(), []
        for ordinal in range(call("cuDeviceGetCount")):
            other = call("cuDeviceGet", ordinal)
            if ordinal == self.ordinal or call("cuDeviceCanAccessPeer", other, self._handle):
                access = driver.CUmemAccessDesc()
                access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                access.location.id = ordinal
                access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                found.append(access)
        return found

    def free(self, address: int, size: int) -> None:
        """Release an allocation. Whoever has it open keeps the memory until it closes it."""
        if address:
            load().cuMemUnmap(address, size)
            load().cuMemAddressFree(address, size)


def _uuid(handle: Any) -> str:
    """Return the UUID of a GPU, or of the MIG instance that this process sees as one, in hex."""
    newest = "cuDeviceGetUuid_v2" if hasattr(load(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    uuid = call(newest, handle)
    return string_at(uuid.getPtr(), _UUID_BYTES).hex()


def _descriptor_type() -> Any:
    return load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def is_recording(stream: Any) -> bool:
    """Return true if a stream is being captured: its work goes into a graph and is not run."""
    return bool(int(call("cuStreamIsCapturing", stream)))


def order(stream: int, after: Event) -> None:
    """Make later work of a stream wait for an event."""
    call("cuStreamWaitEvent", stream, after.handle, 0)


def ordinal_of(address: int) -> int:
    """The number of the GPU that an address belongs to."""
    attribute: Any = load().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    if int(call("cuCtxGetCurrent")):
        return int(call("cuPointerGetAttribute", attribute, address))
    # A thread that has talked to no GPU yet. Whoever made the array uses the context of one.
    call("cuCtxPushCurrent", _context_in_use())
    try:
        return int(call("cuPointerGetAttribute", attribute, address))
    finally:
        call("cuCtxPopCurrent")


@lru_cache(maxsize=1)
def _context_in_use() -> Any:
    """The context of a GPU that this process uses already."""
    for ordinal in range(call("cuDeviceGetCount")):
        handle = call("cuDeviceGet", ordinal)
        _, is_active = call("cuDevicePrimaryCtxGetState", handle)
        if is_active:
            return call("cuDevicePrimaryCtxRetain", handle)
    raise GpuFailed("this process uses no GPU, so no array of it can be on one")
