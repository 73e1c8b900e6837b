"""The fold kernel: NVRTC compiles it, and on the CPU it computes what folding.py does, to the bit.

One library has all variants, from the same source that NVRTC gets: see ``cuda_on_host.h``.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.require import requires

from allfold_agent.folding import TORCH_DTYPES, Arithmetic
from allfold_agent.gpu import kernels
from allfold_agent.gpu.kernels import KernelError, Variant
from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, Kind, ReduceOp

SHIM = Path(__file__).parents[1] / "support" / "fake_cuda" / "cuda_on_host.h"
SOURCE = Path(kernels.__file__).with_name("fold.cu")
OPTIONS = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-x", "c++"]
BUILD = ["g++", "-shared", "-fPIC", *OPTIONS]
WORLD_SIZE = 3
FACTOR = 0.3
F16, BF16, F32, F64 = DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64
NUMELS = (0, 1, 7, 1023, 4096 + 3)
COUNTS = (1, 2, 7, 8, 9, 17, 128)

Run = Callable[..., None]


def folding(dtype: DType, op: ReduceOp, inputs: int = WORLD_SIZE) -> Variant:
    """The whole of an op."""
    mean, premul = op is ReduceOp.MEAN, op is ReduceOp.PREMUL_SUM
    return Variant(dtype, op.accumulation_dtype(dtype), dtype, op, inputs, premul, mean)


def contribution(dtype: DType, op: ReduceOp = ReduceOp.SUM, inputs: int = WORLD_SIZE) -> Variant:
    """What stays in the accumulation type, because it goes on to other nodes."""
    kept = op.accumulation_dtype(dtype)
    return Variant(dtype, kept, kept, op, inputs, op is ReduceOp.PREMUL_SUM)


def finishing(dtype: DType, divided: bool) -> Variant:
    """What comes from other nodes, to be rounded."""
    kept = ReduceOp.SUM.accumulation_dtype(dtype)
    return Variant(kept, kept, dtype, None, 1, divided=divided)


OPS = [(dtype, op) for dtype in DType for op in ReduceOp if op.refusal(dtype) is None]
WHOLE = [folding(dtype, op) for dtype, op in OPS]
COUNTED = [folding(dtype, ReduceOp.SUM, count) for dtype in (F32, BF16) for count in COUNTS]
BEGUN = [
    contribution(each, op) for each in (F16, BF16) for op in (ReduceOp.SUM, ReduceOp.PREMUL_SUM)
]
ENDED = [finishing(dtype, divided) for dtype in (F16, BF16, F32) for divided in (False, True)]
WIDENED = [Variant(dtype, F32, F32, None, 1) for dtype in (F16, BF16)]
MOVED = [Variant(dtype, dtype, dtype, None, 1) for dtype in DType]
EVERY = list(
    {each.name: each for each in [*WHOLE, *COUNTED, *BEGUN, *ENDED, *WIDENED, *MOVED]}.values()
)


def wrapper(variants: Sequence[Variant]) -> str:
    lines = [f'#define ALLFOLD_SOURCE "{SOURCE}"', "#define ALLFOLD_ENTRY_BY_NAME"]
    for variant in variants:
        pairs = [option.removeprefix("-D").split("=") for option in variant.options]
        lines += [f"#define {name} {value}" for name, value in pairs]
        lines += [f'#include "{SHIM}"', *(f"#undef {name}" for name, _ in pairs)]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a variant on the CPU, as a launch does on a GPU."""
    requires("g++")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "all.cpp").write_text(wrapper(EVERY))
    subprocess.run([*BUILD, folder / "all.cpp", "-o", folder / "all.so"], check=True, timeout=90)
    library = ctypes.CDLL(str(folder / "all.so"))

    def launch(
        variant: Variant, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        numel = inputs[0].numel()
        read, written = ([each.data_ptr() for each in side] for side in (inputs, outputs))
        packed = kernels.arguments(variant, read, written, numel, FACTOR, WORLD_SIZE)
        entry = library[f"run_{variant.name}"]
        entry(*kernels.grid(numel, variant, 2), ctypes.create_string_buffer(packed))

    return launch


def sample(dtype: DType, numel: int, seed: int, shift: int = 0) -> torch.Tensor:
    """Elements that meet every special case, ``shift`` elements behind an aligned address."""
    random = torch.Generator().manual_seed(seed)
    into = torch.empty(numel + shift + 16, dtype=TORCH_DTYPES[dtype])
    into = into[-(into.data_ptr() // into.itemsize) % 16 + shift :][:numel]
    if dtype is DType.BOOL:
        return into.copy_(torch.randint(0, 2, (numel,), generator=random))
    if not dtype.is_float:
        limits = torch.iinfo(into.dtype)
        return into.random_(limits.min, limits.max, generator=random)
    finfo = torch.finfo(into.dtype)
    inf, nan, tiny = float("inf"), float("nan"), finfo.tiny
    special = torch.tensor([inf, -inf, nan, 0.0, -0.0, tiny, -tiny / 8, finfo.max, finfo.min, 1.0])
    into.copy_(torch.randn(numel, generator=random, dtype=torch.float64) * 100)
    chosen = torch.rand(numel, generator=random) < 0.3
    picks = torch.randint(0, len(special), (int(chosen.sum()),), generator=random)
    into[chosen] = special[picks].to(into.dtype)
    return into


def blank(dtype: DType, numel: int, shift: int = 0) -> torch.Tensor:
    return sample(dtype, numel, 999, shift)


def arithmetic(dtype: DType, op: ReduceOp, numel: int) -> Arithmetic:
    what = Fingerprint(Kind.ALL_REDUCE, op, dtype, (numel,), -1, "auto", factor=FACTOR)
    return Arithmetic(what, WORLD_SIZE)


def on_cpu(dtype: DType, op: ReduceOp, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    how = arithmetic(dtype, op, inputs[0].numel())
    kept = torch.empty(inputs[0].numel(), dtype=how.kept_dtype)
    how.fold_inputs(kept, inputs)
    result = torch.empty(inputs[0].numel(), dtype=how.dtype)
    how.finish([result], kept)
    return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with one pattern for all NaN: which one an operation gives, hardware decides."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.itemsize])


def assert_same(got: torch.Tensor, expected: torch.Tensor, op: ReduceOp | None = None) -> None:
    if op in (ReduceOp.MIN, ReduceOp.MAX) and got.is_floating_point():
        # Which zero is the smaller one, torch itself decides by an element's place.
        got, expected = got + 0.0, expected + 0.0
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize(("dtype", "op"), OPS, ids=lambda each: each.label)
def test_every_dtype_and_op_gives_the_bits_of_the_cpu(run: Run, dtype: DType, op: ReduceOp) -> None:
    for numel in NUMELS:
        inputs = [sample(dtype, numel, seed) for seed in range(WORLD_SIZE)]
        output = blank(dtype, numel)
        run(folding(dtype, op), inputs, [output])
        assert_same(output, on_cpu(dtype, op, inputs), op)


@pytest.mark.parametrize("dtype", DType, ids=lambda each: each.label)
@pytest.mark.parametrize("shifts", [(1, 1, 1, 1), (5, 5, 5, 5), (0, 1, 2, 3), (0, 0, 0, 1)])
def test_elements_may_lie_anywhere(run: Run, dtype: DType, shifts: tuple[int, ...]) -> None:
    for numel in NUMELS:
        inputs = [sample(dtype, numel, each, shift) for each, shift in enumerate(shifts[:-1])]
        output = blank(dtype, numel, shifts[-1])
        run(folding(dtype, ReduceOp.MAX), inputs, [output])
        assert_same(output, on_cpu(dtype, ReduceOp.MAX, inputs), ReduceOp.MAX)


@pytest.mark.parametrize("dtype", [F32, BF16, DType.INT8], ids=lambda each: each.label)
@pytest.mark.parametrize("place", range(WORLD_SIZE))
def test_an_output_may_be_an_input(run: Run, dtype: DType, place: int) -> None:
    for shift in (0, 3):
        inputs = [sample(dtype, 4099, seed, shift) for seed in range(WORLD_SIZE)]
        expected = on_cpu(dtype, ReduceOp.SUM, inputs)
        run(folding(dtype, ReduceOp.SUM), inputs, [inputs[place]])
        assert_same(inputs[place], expected)


@pytest.mark.parametrize("outputs", [2, 5, 128])
def test_all_outputs_get_the_result(run: Run, outputs: int) -> None:
    inputs = [sample(BF16, 1023, seed) for seed in range(WORLD_SIZE)]
    expected = on_cpu(BF16, ReduceOp.MEAN, inputs)
    others = [blank(BF16, 1023) for _ in range(outputs - 1)]
    run(folding(BF16, ReduceOp.MEAN), inputs, [inputs[1], *others])
    for each in [inputs[1], *others]:
        assert_same(each, expected)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda each: each.label)
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_inputs_is_folded_in_order(run: Run, dtype: DType, count: int) -> None:
    random = torch.Generator().manual_seed(count)
    rows = (torch.randn(count, 1029, generator=random) * 2.0**20).to(TORCH_DTYPES[dtype])
    output = blank(dtype, 1029)
    run(folding(dtype, ReduceOp.SUM, count), list(rows), [output])
    assert_same(output, on_cpu(dtype, ReduceOp.SUM, list(rows)))


def test_nothing_beside_the_output_is_written(run: Run) -> None:
    for shift in range(9):
        inputs = [sample(BF16, 45, seed, shift) for seed in range(WORLD_SIZE)]
        around = blank(BF16, 45 + 32)
        before = around.clone()
        run(folding(BF16, ReduceOp.SUM), inputs, [around[8 + shift :][:45]])
        assert_same(around[: 8 + shift], before[: 8 + shift])
        assert_same(around[8 + shift + 45 :], before[8 + shift + 45 :])


@pytest.mark.parametrize("variant", BEGUN, ids=lambda each: each.name)
def test_what_goes_to_other_nodes_is_not_rounded(run: Run, variant: Variant) -> None:
    assert variant.op
    for numel in NUMELS:
        inputs = [sample(variant.given, numel, seed, shift=2) for seed in range(WORLD_SIZE)]
        expected, output = blank(F32, numel), blank(F32, numel, shift=2)
        arithmetic(variant.given, variant.op, numel).fold_inputs(expected, inputs)
        run(variant, inputs, [output])
        assert_same(output, expected)


@pytest.mark.parametrize("variant", ENDED, ids=lambda each: each.name)
def test_what_comes_from_other_nodes_is_divided_and_rounded_once(
    run: Run, variant: Variant
) -> None:
    op = ReduceOp.MEAN if variant.divided else ReduceOp.SUM
    for numel in NUMELS:
        kept = sample(variant.given, numel, 1)
        expected, output = blank(variant.written, numel), blank(variant.written, numel)
        arithmetic(variant.written, op, numel).finish([expected], kept)
        run(variant, [kept], [output])
        assert_same(output, expected)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda each: each.label)
def test_every_half_widens_and_every_tie_is_rounded_as_torch_does(run: Run, dtype: DType) -> None:
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(TORCH_DTYPES[dtype])
    wide = torch.empty(halves.numel(), dtype=torch.float32)
    run(Variant(dtype, F32, F32, None, 1), [halves], [wide])
    assert_same(wide, halves.float())
    ties = (wide[1:].double() + wide[:-1].double()).div(2).float()
    near = [torch.nextafter(ties, torch.full_like(ties, to)) for to in (-torch.inf, torch.inf)]
    # The first is what a GPU's arithmetic gives for NaN; rounding it as a number would overflow.
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    values = torch.cat([wide, ties, *near, nans, torch.tensor([65519.99, 65520.0, 3.4e38, 1e-45])])
    rounded = torch.empty(values.numel(), dtype=TORCH_DTYPES[dtype])
    run(finishing(dtype, divided=False), [values], [rounded])
    assert_same(rounded, values.to(rounded.dtype))


@pytest.mark.parametrize("dtype", DType, ids=lambda each: each.label)
def test_a_move_keeps_every_bit(run: Run, dtype: DType) -> None:
    random = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (4096 + 24,), dtype=torch.uint8, generator=random)
    if dtype is DType.BOOL:
        raw %= 2
    moved = torch.zeros_like(raw)
    run(
        Variant(dtype, dtype, dtype, None, 1),
        [raw.view(TORCH_DTYPES[dtype])],
        [moved.view(TORCH_DTYPES[dtype])],
    )
    assert torch.equal(moved, raw)


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=lambda each: each.label)
def test_of_equal_values_the_later_one_wins_everywhere(run: Run, dtype: DType) -> None:
    zeros = torch.zeros(67, dtype=TORCH_DTYPES[dtype])
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        for last in (zeros, -zeros):
            output = blank(dtype, 67)
            run(folding(dtype, op), [zeros, -zeros, last], [output])
            assert_same(output, last)


def test_one_kernel_makes_one_library(tmp_path: Path) -> None:
    requires("g++")
    variant = folding(F32, ReduceOp.SUM, 2)
    target = tmp_path / "kernel.so"
    macros = [f'-DALLFOLD_SOURCE="{SOURCE}"', *variant.options]
    subprocess.run([*BUILD, *macros, SHIM, "-o", target], check=True, timeout=60)
    library = ctypes.CDLL(str(target))
    one, other = torch.arange(99.0), torch.ones(99)
    packed = kernels.arguments(variant, [one.data_ptr(), other.data_ptr()], [one.data_ptr()], 99)
    assert ctypes.c_uint64.in_dll(library, "kernel_arguments_size").value == len(packed)
    library.run_kernel(1, 32, ctypes.create_string_buffer(packed))
    assert torch.equal(one, torch.arange(99.0) + 1)


@pytest.mark.parametrize("variant", EVERY, ids=lambda each: each.name)
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


def ptx(variant: Variant) -> list[str]:
    requires("nvrtc")
    return kernels.compile_ptx(variant, "compute_80").splitlines()


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
    requires("nvrtc")
    with pytest.raises(KernelError, match=r"fold_float32_.*\n.*architecture"):
        kernels.compile_ptx(MOVED[0], "compute_1")


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
