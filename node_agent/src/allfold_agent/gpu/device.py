"""One GPU of this machine: its stream, the memory of ranks on it, and the kernels it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import string_at
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from allfold_agent.gpu import kernels
from allfold_agent.gpu.completions import Completions, FencePoller
from allfold_agent.gpu.kernels import Variant
from allfold_agent.runtime.locks import make_lock
from allfold_core.errors import GpuFailed

_CONTROL = Path("/dev/nvidiactl")
_NO_DRIVER = "there is no NVIDIA driver"


class DriverUnavailable(Exception):
    """This process has no CUDA; says why."""


@lru_cache(maxsize=1)
def load() -> Any:
    """The driver's functions, ready for use; :class:`DriverUnavailable` where there are none."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        reason = "cuda-bindings is not installed: see the extras cuda13 and cuda12 in docs/gpu.md"
        raise DriverUnavailable(reason if _CONTROL.exists() else _NO_DRIVER) from error
    try:
        code, *_ = driver.cuInit(0)
    except Exception as error:  # of a type that depends on the version of the binding
        raise DriverUnavailable(_NO_DRIVER) from error
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DriverUnavailable("the NVIDIA driver shows no GPU")
    if code:
        raise DriverUnavailable(f"the NVIDIA driver does not work: {code.name}")
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


log = logging.getLogger(__name__)

Release = Callable[[], None]


class Releases:
    """A thread that does so, one after the other: nobody else waits for it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._due: SimpleQueue[Release] = SimpleQueue()  # finalizers may put something in
        Thread(target=self._run, name=name, daemon=True).start()

    def later(self, release: Release) -> None:
        """Release something, after all that was asked for before it."""
        self._due.put(release)

    def _run(self) -> None:
        while True:
            release = self._due.get()
            try:
                release()
            except Exception:
                log.exception("memory that GPUs used is not given back")
            del release  # it must not keep anything while nothing is due


_UUID_BYTES = 16


@dataclass(frozen=True, slots=True)
class GpuName:
    """The identity of a GPU, known before it is used.

    Attributes:
        ordinal: its number in this process.
        uuid: of the GPU, or of the part of one (MIG) that this process sees as one; in hex.
        architecture: that kernels are compiled for, such as ``sm_90``.
    """

    ordinal: int
    uuid: str
    name: str
    architecture: str


def find() -> list[GpuName]:
    """The GPUs of this machine that this process may use. Takes none of their memory."""
    return [_name(ordinal) for ordinal in range(call("cuDeviceGetCount"))]


def _name(ordinal: int) -> GpuName:
    handle = call("cuDeviceGet", ordinal)
    newest = "cuDeviceGetUuid_v2" if hasattr(load(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    uuid = call(newest, handle)
    return GpuName(
        ordinal,
        string_at(uuid.getPtr(), _UUID_BYTES).hex(),
        call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode(),
        f"sm_{_attribute(handle, 'COMPUTE_CAPABILITY_MAJOR')}"
        f"{_attribute(handle, 'COMPUTE_CAPABILITY_MINOR')}",
    )


def _attribute(handle: Any, name: str) -> int:
    which = getattr(load().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", which, handle))


class GpuEvent:
    """A point in the work of a GPU."""

    def __init__(self, device: GpuDevice) -> None:
        self.device = device
        self.handle = call("cuEventCreate", load().CUevent_flags.CU_EVENT_DISABLE_TIMING)
        call("cuEventRecord", self.handle, device.stream)

    def is_reached(self) -> bool:
        """Return true if all work before it is done; :class:`GpuFailed` if the GPU has failed."""
        with self.device.current():
            code, *_ = load().cuEventQuery(self.handle)
        if not code:
            return True
        if code == load().CUresult.CUDA_ERROR_NOT_READY:
            return False
        raise GpuFailed(f"{self.device.name.name}, on which the node agent folds: {code.name}")

    def __del__(self) -> None:
        # Unless it was never made, or the driver is gone.
        with suppress(AttributeError, GpuFailed), self.device.current():
            call("cuEventDestroy", self.handle)


class RankMemory:
    """Memory of a GPU that a rank shares. It stays until the last op that uses it is over, even
    where its rank has died.

    Attributes:
        address: where it begins.
        size: in bytes.
    """

    def __init__(self, device: GpuDevice, descriptor: int, size: int) -> None:
        self.device = device
        self.size = size
        self.address = 0
        self._users: set[int] = set()
        kind = load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with device.current():
            handle = call("cuMemImportFromShareableHandle", descriptor, kind)
            try:
                self.address = int(call("cuMemAddressReserve", size, 0, 0, 0))
                call("cuMemMap", self.address, size, 0, handle, 0)
            finally:
                call("cuMemRelease", handle)  # the mapping keeps the memory
            self.allow(device)

    def allow(self, device: GpuDevice) -> None:
        """Make it usable for a GPU that :meth:`GpuDevice.reaches` the one that has it."""
        if device.ordinal not in self._users:
            access = load().CUmemAccessDesc()
            access.location.type = load().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device.ordinal
            access.flags = load().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call("cuMemSetAccess", self.address, self.size, [access], 1)
            self._users.add(device.ordinal)

    def __del__(self) -> None:
        if self.address:
            self.device.releases.later(partial(_unmap, self.device, self.address, self.size))


def _unmap(device: GpuDevice, address: int, size: int) -> None:
    with device.current():
        load().cuMemUnmap(address, size)  # nothing may be mapped there yet
        call("cuMemAddressFree", address, size)


class GpuDevice:
    """A GPU in use, inside of :meth:`current`.

    Attributes:
        completions: tells when it has done something.
        releases: lets go of memory that it used.
    """

    def __init__(self, name: GpuName, poller: FencePoller) -> None:
        driver = load()
        self.name = name
        self.completions = Completions(poller)
        self.releases = Releases(f"gpu{name.ordinal}-releases")
        self.ordinal = name.ordinal
        self._handle = call("cuDeviceGet", name.ordinal)
        self._context = call("cuDevicePrimaryCtxRetain", self._handle)
        with self.current():
            self.stream = call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._processors = _attribute(self._handle, "MULTIPROCESSOR_COUNT")
        self._functions: dict[str, Any] = {}
        self._modules: list[Any] = []
        self._compiling = make_lock("gpu kernels")
        self._reachable: dict[int, bool] = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the GPU that this thread talks to.

        Finalizers do so as well, in the middle of what a thread does with another GPU.
        """
        call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")

    def reaches(self, other: GpuDevice) -> bool:
        """Return true if kernels here can use the memory of another GPU, or of this one."""
        if other is self:
            return True
        if other.ordinal not in self._reachable:
            able = call("cuDeviceCanAccessPeer", self._handle, other._handle)
            self._reachable[other.ordinal] = bool(able)
        return self._reachable[other.ordinal]

    # Work, in the order in which it is given

    def has(self, variant: Variant) -> bool:
        """Return true if a kernel is compiled already."""
        return variant.name in self._functions

    def launch(
        self,
        variant: Variant,
        inputs: Sequence[int],
        outputs: Sequence[int],
        numel: int,
        factor: float,
        divisor: float,
    ) -> None:
        """Fold ``numel`` elements at the addresses of inputs into all outputs."""
        function = self._function(variant)
        packed = np.frombuffer(
            kernels.arguments(variant, inputs, outputs, numel, factor, divisor), np.uint8
        )
        pointers = np.array([packed.ctypes.data], np.uint64)
        blocks, threads = kernels.grid(numel, variant, self._processors)
        shape = (blocks, 1, 1, threads, 1, 1)
        call("cuLaunchKernel", function, *shape, 0, self.stream, pointers.ctypes.data, 0)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between any addresses that the GPU reaches."""
        call("cuMemcpyAsync", target, source, nbytes, self.stream)

    def wait_for(self, point: GpuEvent) -> None:
        """Make later work wait for another GPU."""
        call("cuStreamWaitEvent", self.stream, point.handle, 0)

    def mark(self) -> GpuEvent:
        """The present point."""
        return GpuEvent(self)

    def _function(self, variant: Variant) -> Any:
        function = self._functions.get(variant.name)
        if function is None:
            with self._compiling:
                if variant.name not in self._functions:
                    image = kernels.compile_image(variant, self.name.architecture)
                    module = call("cuModuleLoadData", np.frombuffer(image, np.uint8).ctypes.data)
                    self._modules.append(module)
                    self._functions[variant.name] = call(
                        "cuModuleGetFunction", module, variant.name.encode()
                    )
                function = self._functions[variant.name]
        return function


def register(address: int, nbytes: int) -> int:
    """Register memory of the host with all GPUs; its address for them. In any GPU's context."""
    driver = load()
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    call("cuMemHostRegister", address, nbytes, flags)
    try:
        return int(call("cuMemHostGetDevicePointer", address, 0))
    except GpuFailed:
        unregister(address)
        raise


def unregister(address: int) -> None:
    """The inverse of :func:`register`."""
    call("cuMemHostUnregister", address)
