"""The GPUs of this machine: whether the agent folds there, and the memory that ranks share."""

from __future__ import annotations

import logging

from allfold_agent.gpu import kernels
from allfold_agent.gpu.device import Device, GpuName, RankMemory, find
from allfold_agent.gpu.driver import CudaUnavailable
from allfold_agent.gpu.fence_poller import FencePoller
from allfold_agent.gpu.kernels import KernelError, Variant
from allfold_agent.gpu.pins import Pins
from allfold_agent.gpu.proof import begins_with
from allfold_agent.runtime.locks import make_lock
from allfold_core.dtypes import DType
from allfold_core.errors import GpuFailed, InvalidArgument
from allfold_core.operations import ReduceOp

log = logging.getLogger(__name__)

_PROBE = Variant(
    DType.FLOAT32, DType.FLOAT32, DType.FLOAT32, ReduceOp.SUM, 2, scaled=False, divided=False
)
_PROOF_BYTES = 16


class Gpus:
    """The GPUs of the agent. Each is opened for the first tensor on it, because that costs memory.

    Attributes:
        names: those that ranks may share memory of, by UUID.
        reason: why there are none.
        pins: memory of the host that they reach.

    Args:
        wanted: whether they may be used.
        poller: sees when they have done something.
    """

    def __init__(self, wanted: bool, poller: FencePoller) -> None:
        self._poller = poller
        self.pins = Pins()
        self._lock = make_lock("gpus")
        self._devices: dict[str, Device] = {}
        self.names, self.reason = _probe(wanted)
        if self.names:
            listed = ", ".join(f"{each.name} ({uuid})" for uuid, each in self.names.items())
            log.info("folds on GPUs that ranks share memory of: %s", listed)
        else:
            log.info("folds on the CPU alone: %s", self.reason)

    def welcome(self) -> dict[str, object]:
        """The description of the GPUs that ranks get."""
        return {
            "gpus": {uuid: each.name for uuid, each in self.names.items()},
            "no_gpu": f"the agent folds on no GPU: {self.reason}",
        }

    def open(self, uuid: str, descriptor: int, size: int, proof: bytes) -> RankMemory:
        """Open memory that a rank shares.

        Args:
            descriptor: stands for it; is the caller's to close.
            proof: what the rank has written at its beginning.

        Raises:
            InvalidArgument: it cannot be opened, or is not what the rank says.
        """
        name = self.names.get(uuid)
        if name is None:
            raise InvalidArgument(f"the agent does not fold on the GPU {uuid}")
        if len(proof) != _PROOF_BYTES:
            raise InvalidArgument(f"a proof has {_PROOF_BYTES} bytes, got {len(proof)}")
        try:
            memory = RankMemory(self._device(name), descriptor, size)
            if not begins_with(memory, proof, self.pins):
                raise InvalidArgument("the file descriptor stands for other memory here")
        except GpuFailed as error:
            raise InvalidArgument(error.message) from error
        return memory

    def _device(self, name: GpuName) -> Device:
        with self._lock:
            device = self._devices.get(name.uuid)
            if device is None:
                device = self._devices[name.uuid] = Device(name, self._poller)
            return device


def _probe(wanted: bool) -> tuple[dict[str, GpuName], str]:
    """The GPUs that can be folded on, and why there are none."""
    if not wanted:
        return {}, "ALLFOLD_AGENT_GPU says so"
    try:
        found = find()
    except (CudaUnavailable, GpuFailed) as error:
        return {}, str(error)
    problems = {each: _problem(each) for each in {each.architecture for each in found}}
    for each in found:
        if problem := problems[each.architecture]:
            log.warning("does not fold on %s: %s", each.name, problem)
    names = {each.uuid: each for each in found if not problems[each.architecture]}
    reasons = [*filter(None, problems.values())] if found else ["the NVIDIA driver shows no GPU"]
    return names, "; ".join(reasons)


def _problem(architecture: str) -> str:
    """Return the reason why there are no kernels for GPUs of a kind; empty where there are."""
    try:
        kernels.compile_image(_PROBE, architecture)
    except KernelError as error:
        return f"kernels cannot be compiled: {error}"
    return ""
