"""The fold kernel's variants: how each is compiled, what it is launched with and on what grid.

The kernel is ``fold.cu``. It is compiled for one variant and one architecture when first needed,
with NVRTC, which comes as a package: no CUDA toolkit has to be installed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp

# As in fold.cu.
MAX_OPERANDS = 128
THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 4
_VECTOR_BYTES = 16
_OLDEST = 70  # architecture; __grid_constant__ needs it

_HEADER = struct.Struct("<QQddQ")
# Bits must equal those of the CPU: no fused multiply-add, no flushed subnormals, IEEE division.
_EXACT = ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true"]
# What the scaling and the division leave of these is a sum.
_SUMS = (ReduceOp.MEAN, ReduceOp.PREMUL_SUM)
_COMPARES = (ReduceOp.MIN, ReduceOp.MAX, None)


class KernelError(RuntimeError):
    """A kernel cannot be compiled: NVRTC is missing, refuses the source or knows no such device."""


class Variant(NamedTuple):
    """A variant of the kernel. Those with the same :attr:`name` are the same kernel.

    Attributes:
        given: type of the inputs.
        kept: type in which they are folded: the given one, or float32 for half types.
        written: type of the outputs: the kept one, or a half type for float32.
        op: the reduction; ``None`` for one input that only moves.
        inputs: how many, 1 to :data:`MAX_OPERANDS`.
        scaled: whether each input is multiplied by the factor first, in the kept type.
        divided: whether the result is divided by the divisor once, before it is rounded.
    """

    given: DType
    kept: DType
    written: DType
    op: ReduceOp | None
    inputs: int
    scaled: bool = False
    divided: bool = False

    @property
    def name(self) -> str:
        """The kernel's, with eight fields: ``fold_bfloat16_float32_bfloat16_sum_4_0_1``."""
        return "_".join(["fold", *self._fields_of_name()])

    @property
    def options(self) -> list[str]:
        """The macros that select it, for any C++ compiler."""
        names = ("GIVEN", "KEPT", "WRITTEN", "OP", "INPUTS", "SCALED", "DIVIDED")
        fields = zip(names, self._fields_of_name(), strict=True)
        return [f"-DALLFOLD_NAME={self.name}", *(f"-DALLFOLD_{key}={each}" for key, each in fields)]

    @property
    def width(self) -> int:
        """Elements that a thread loads and stores at once, where all pointers are aligned."""
        return _VECTOR_BYTES // max(self.given.itemsize, self.written.itemsize)

    def check(self) -> None:
        """``ValueError`` if there is no such kernel."""
        if not 1 <= self.inputs <= MAX_OPERANDS:
            raise ValueError(f"a fold has 1 to {MAX_OPERANDS} inputs, not {self.inputs}")
        if self.op is None and self.inputs != 1:
            raise ValueError(f"{self.inputs} inputs, but no reduction")
        for narrow in (self.given, self.written):
            if narrow is not self.kept and not (narrow.is_half and self.kept is DType.FLOAT32):
                raise ValueError(f"{narrow.label} is not folded in {self.kept.label}")
        if self.op and (refusal := self.op.refusal(self.kept)):
            raise ValueError(refusal)
        exact = self.op in _COMPARES and not (self.scaled or self.divided)
        if not exact and self.kept.is_half:
            raise ValueError(f"{self.name} would round to {self.kept.label} at every step")
        if (self.scaled or self.divided) and not self.kept.is_float:
            raise ValueError(f"{self.kept.label} is neither scaled nor divided")

    def _fields_of_name(self) -> list[str]:
        op = ReduceOp.SUM if self.op in _SUMS else self.op
        return [
            self.given.label,
            self.kept.label,
            self.written.label,
            op.label if op else "move",
            str(self.inputs),
            str(int(self.scaled)),
            str(int(self.divided)),
        ]


def arguments(
    variant: Variant,
    inputs: Sequence[int],
    outputs: Sequence[int],
    numel: int,
    factor: float = 1.0,
    divisor: float = 1.0,
) -> bytes:
    """The kernel's one parameter, passed by value: at most 2088 bytes.

    Its layout, little-endian: at byte 0 numel, at 8 the elements before the first aligned one (see
    :func:`head`), both 64-bit integers; at 16 the factor and at 24 the divisor, float64; at 32 the
    number of outputs; at 40 room for 128 addresses of outputs; at 1064 those of the inputs.

    ``ValueError`` for a wrong number of addresses, or one that its elements cannot lie at. An
    output may be an input, but must not overlap one by a part.
    """
    if len(inputs) != variant.inputs:
        raise ValueError(f"{variant.name} has {variant.inputs} inputs, not {len(inputs)}")
    if not 1 <= len(outputs) <= MAX_OPERANDS:
        raise ValueError(f"a fold has 1 to {MAX_OPERANDS} outputs, not {len(outputs)}")
    if numel < 0:
        raise ValueError(f"{numel} elements")
    ahead = head(variant, inputs, outputs, numel)
    room = [*outputs, *[0] * (MAX_OPERANDS - len(outputs)), *inputs]
    packed = _HEADER.pack(numel, ahead, factor, divisor, len(outputs))
    return packed + struct.pack(f"<{len(room)}Q", *room)


def head(variant: Variant, inputs: Sequence[int], outputs: Sequence[int], numel: int) -> int:
    """Elements that come before the first one at which all addresses are aligned for wide access.

    All of them, ``numel``, if there is none: then the kernel handles each element by itself.
    """
    ahead = {_ahead(address, variant.given, variant.width) for address in inputs}
    ahead |= {_ahead(address, variant.written, variant.width) for address in outputs}
    return min(*ahead, numel) if len(ahead) == 1 else numel


def _ahead(address: int, dtype: DType, width: int) -> int:
    index, apart = divmod(address, dtype.itemsize)
    if apart:
        raise ValueError(f"no {dtype.label} can lie at address {address:#x}")
    return -index % width


def grid(numel: int, variant: Variant, multiprocessors: int) -> tuple[int, int]:
    """Blocks and threads of each: no more than the device runs at once, and at least one block."""
    needed = -(-numel // (variant.width * THREADS))
    return max(1, min(needed, multiprocessors * _BLOCKS_PER_MULTIPROCESSOR)), THREADS


def compile_image(variant: Variant, architecture: str) -> bytes:
    """Compile a variant to machine code for an architecture such as ``sm_90``.

    For a newer one than NVRTC knows it is PTX for the newest that it knows, which the driver
    translates. ``ValueError`` for no variant; :class:`KernelError`, with NVRTC's log, where there
    is no NVRTC, or it cannot compile.
    """
    variant.check()
    target = _target(architecture)
    options = [f"--gpu-architecture={target}", *_EXACT, *variant.options]
    return _compile(variant.name, options, ptx=target.startswith("compute_"))


def _target(architecture: str) -> str:
    match = re.fullmatch(r"sm_(\d+)", architecture)
    if not match:
        raise ValueError(f"no architecture: {architecture!r}; expected such as sm_90")
    wanted, known = int(match[1]), [each for each in _supported() if each >= _OLDEST]
    if wanted in known:
        return architecture
    older = [each for each in known if each < wanted]
    if not older:
        raise KernelError(f"NVRTC compiles for sm_{min(known)} and newer, not for {architecture}")
    return f"compute_{max(older)}"


@cache
def _source() -> bytes:
    return resources.files(__package__).joinpath("fold.cu").read_bytes()


@cache
def _supported() -> frozenset[int]:
    """The architectures that NVRTC compiles for."""
    return frozenset(_checked("nvrtcGetSupportedArchs"))


def _compile(name: str, options: Sequence[str], ptx: bool) -> bytes:
    program = _checked("nvrtcCreateProgram", _source(), b"fold.cu", 0, [], [])
    try:
        result, *_ = _nvrtc().nvrtcCompileProgram(
            program, len(options), [option.encode("ascii") for option in options]
        )
        if result != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
            log = _text(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
            raise KernelError(f"NVRTC cannot compile {name} ({result.name}):\n{log}")
        return _text(program, "PTX" if ptx else "CUBIN")
    finally:
        _checked("nvrtcDestroyProgram", program)


def _text(program: Any, what: str) -> bytes:
    buffer = bytearray(_checked(f"nvrtcGet{what}Size", program))
    _checked(f"nvrtcGet{what}", program, buffer)
    return bytes(buffer)


def _checked(function: str, *args: Any) -> Any:
    """Call a function of NVRTC and return its results; :class:`KernelError` where it fails."""
    nvrtc = _nvrtc()
    try:
        result, *values = getattr(nvrtc, function)(*args)
    except RuntimeError as error:  # the bindings load the library when it is first called
        raise KernelError(f"NVRTC cannot be loaded: {error}") from error
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"{function} failed: {result.name}")
    return values[0] if values else None


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise KernelError(f"the CUDA bindings are not installed: {error}") from error
    return nvrtc
