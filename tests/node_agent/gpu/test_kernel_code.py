"""The machine code of the fold kernels: architectures, accesses, arguments, grid, refusals."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from allfold_agent.gpu import kernels
from allfold_agent.gpu.kernels import KernelError, Variant
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp
from tests.node_agent.gpu.kernel_variants import (
    BF16,
    EVERY,
    F16,
    F32,
    F64,
    MOVED,
    contribution,
    folding,
)
from tests.support.require import requires
from tests.support.tiers import one_in


@pytest.mark.parametrize("variant", one_in(12, EVERY), ids=lambda each: each.name)
def test_every_variant_becomes_machine_code(variant: Variant) -> None:
    requires("nvrtc")
    image = kernels.compile_image(variant, "sm_90")
    assert image.startswith(b"\x7fELF") and variant.name.encode() in image


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_89", "sm_100", "sm_120"])
def test_every_architecture_gets_machine_code(architecture: str) -> None:
    requires("nvrtc")
    for variant in (folding(BF16, ReduceOp.MEAN, 17), folding(F16, ReduceOp.MAX), MOVED[0]):
        assert kernels.compile_image(variant, architecture).startswith(b"\x7fELF")


def test_an_architecture_newer_than_the_compiler_gets_text_that_ends() -> None:
    requires("nvrtc")
    image = kernels.compile_image(folding(F32, ReduceOp.SUM), "sm_999")
    assert b".visible .entry fold_float32_" in image
    assert image.endswith(b"\0")  # the driver asks for no length


def ptx(variant: Variant, architecture: str = "compute_80") -> list[str]:
    """The lines of the virtual machine code, compiled with the options of the agent."""
    requires("nvrtc")
    options = [f"--gpu-architecture={architecture}", *kernels._EXACT, *variant.options]
    text = kernels._compile(variant.name, options, ptx=True)
    return text.rstrip(b"\0").decode("ascii").splitlines()


@pytest.mark.parametrize(
    "variant",
    [
        folding(F32, ReduceOp.SUM, 4),
        folding(F64, ReduceOp.PRODUCT, 4),
        folding(BF16, ReduceOp.MEAN, 4),
        folding(F16, ReduceOp.MIN, 4),
        folding(DType.INT8, ReduceOp.SUM, 4),
        folding(DType.INT64, ReduceOp.BXOR, 4),
    ],
    ids=lambda each: each.name,
)
def test_inputs_and_outputs_are_accessed_16_bytes_at_a_time(variant: Variant) -> None:
    text = ptx(variant)
    wide = [line for line in text if re.search(r"ld\.global\.(v4\.[a-z]32|v2\.[a-z]64)", line)]
    assert len(wide) == variant.inputs
    assert any("st.global.v4.u32" in line for line in text)
    # Read-only loads may miss what was written in place; local memory is slow.
    assert not any("ld.global.nc" in line or ".local" in line for line in text)


def test_what_is_widened_is_stored_16_bytes_at_a_time() -> None:
    text = ptx(contribution(BF16))
    assert any("ld.global.v2.u32" in line for line in text)
    assert any("st.global.v4.u32" in line for line in text)


def test_products_and_sums_are_not_fused() -> None:
    text = ptx(folding(F32, ReduceOp.PREMUL_SUM))
    assert any("mul.rn.f32" in line for line in text)
    assert not any("fma" in line or ".ftz" in line for line in text)


def test_a_mean_is_a_true_division() -> None:
    assert any("div.rn.f32" in line for line in ptx(folding(F32, ReduceOp.MEAN)))


@pytest.mark.parametrize("variant", EVERY, ids=lambda each: each.name)
def test_a_name_has_eight_fields(variant: Variant) -> None:
    first, given, kept, written, op, inputs, scaled, divided = variant.name.split("_")
    assert first == "fold" and op != "mean"
    assert [DType.from_label(each) for each in (given, kept, written)] == list(variant[:3])
    assert (int(inputs), bool(int(scaled)), bool(int(divided))) == variant[4:]


def test_arguments_have_the_documented_layout() -> None:
    variant = folding(F32, ReduceOp.SUM, 2)
    packed = kernels.arguments(variant, [8, 24], [40], 100, 0.5, 4.0)
    assert len(packed) == 1064 + 2 * 8
    words = memoryview(packed).cast("Q")
    assert [words[place] for place in (0, 1, 4, 5, 6, 133, 134)] == [100, 2, 1, 40, 0, 8, 24]
    assert list(memoryview(packed).cast("d")[2:4]) == [0.5, 4.0]
    assert len(kernels.arguments(folding(F32, ReduceOp.SUM, 128), [16] * 128, [16], 1)) == 2088


@pytest.mark.parametrize(
    ("inputs", "outputs", "numel", "expected"),
    [
        ([0, 16], [32], 100, 0),
        ([2, 18], [34], 100, 7),
        ([14, 14], [14], 100, 1),
        ([2, 2], [2], 5, 5),
        ([0, 16], [34], 100, 100),
        ([0, 2], [0], 100, 100),
    ],
)
def test_wide_access_starts_where_all_addresses_are_aligned(
    inputs: list[int], outputs: list[int], numel: int, expected: int
) -> None:
    assert kernels.head(folding(BF16, ReduceOp.SUM, 2), inputs, outputs, numel) == expected


def test_the_grid_is_what_the_device_runs_at_once() -> None:
    variant = folding(F32, ReduceOp.SUM)
    assert kernels.grid(0, variant, 132) == (1, 256)
    assert kernels.grid(1025, variant, 132) == (2, 256)
    assert kernels.grid(1 << 40, variant, 132) == (528, 256)


@pytest.mark.parametrize(
    ("inputs", "outputs", "numel", "match"),
    [
        ([16], [16], 1, "has 2 inputs, not 1"),
        ([16, 16], [], 1, "1 to 128 outputs, not 0"),
        ([16, 16], [16] * 129, 1, "1 to 128 outputs, not 129"),
        ([16, 16], [16], -1, "-1 elements"),
        ([16, 18], [16], 1, "no float32 can lie at address 0x12"),
    ],
)
def test_wrong_arguments_are_refused(
    inputs: list[int], outputs: list[int], numel: int, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        kernels.arguments(folding(F32, ReduceOp.SUM, 2), inputs, outputs, numel)


@pytest.mark.parametrize(
    ("variant", "match"),
    [
        (folding(F32, ReduceOp.SUM, 0), "1 to 128 inputs"),
        (folding(F32, ReduceOp.SUM, 129), "1 to 128 inputs"),
        (Variant(F32, F32, F32, None, 2), "no reduction"),
        (Variant(F32, F64, F64, ReduceOp.SUM, 2), "float32 is not folded in float64"),
        (Variant(F32, F32, DType.INT8, ReduceOp.SUM, 2), "int8 is not folded in float32"),
        (Variant(BF16, BF16, BF16, ReduceOp.SUM, 2), "round to bfloat16 at every step"),
        (Variant(BF16, BF16, BF16, ReduceOp.MAX, 2, scaled=True), "round to bfloat16"),
        (Variant(DType.INT8, DType.INT8, DType.INT8, None, 1, divided=True), "nor divided"),
        (folding(F32, ReduceOp.BAND), "band of float32 is not defined"),
    ],
)
def test_what_is_no_variant_is_refused(variant: Variant, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kernels.compile_image(variant, "sm_90")


def test_the_compilers_log_is_part_of_the_error() -> None:
    with pytest.raises(KernelError, match=r"fold_float32_.*\n.*architecture"):
        ptx(MOVED[0], "compute_1")


def test_unknown_and_too_old_architectures_are_refused() -> None:
    requires("nvrtc")
    with pytest.raises(ValueError, match="no architecture: 'gfx90a'"):
        kernels.compile_image(MOVED[0], "gfx90a")
    with pytest.raises(KernelError, match="not for sm_20"):
        kernels.compile_image(MOVED[0], "sm_20")


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "cuda.bindings", missing)
    with pytest.raises(KernelError, match="CUDA bindings are not installed"):
        kernels.compile_image(MOVED[0], "sm_90")
