"""The results of the fold kernels, run on the CPU: bit by bit those of the CPU's own kernels."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.gpu import kernels
from allfold_agent.gpu.kernels import Variant
from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from tests.node_agent.gpu.kernel_variants import (
    BEGUN,
    BF16,
    COUNTS,
    ENDED,
    EVERY,
    F16,
    F32,
    F64,
    OPS,
    WORLD_SIZE,
    finishing,
    folding,
)
from tests.support.elements import TORCH_DTYPES, array_of
from tests.support.require import requires

SHIM = Path(__file__).parents[2] / "support" / "fakes" / "fake_cuda" / "cuda_on_host.h"
SOURCE = Path(kernels.__file__).with_name("fold.cu")
OPTIONS = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-x", "c++"]
BUILD = ["g++", "-shared", "-fPIC", *OPTIONS]

FACTOR = 0.3

NUMELS = (0, 1, 7, 1023, 4096 + 3)

Run = Callable[..., None]


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
    kept = torch.empty(inputs[0].numel(), dtype=TORCH_DTYPES[how.kept_type])
    result = torch.empty(inputs[0].numel(), dtype=TORCH_DTYPES[how.given])
    with np.errstate(all="ignore"):  # as in the threads that fold
        how.fold_inputs(array_of(kept), list(map(array_of, inputs)))
        how.finish([array_of(result)], array_of(kept))
    return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with one pattern for all NaN: which one an operation gives, hardware decides."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.itemsize])


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize(("dtype", "op"), OPS, ids=lambda each: each.label)
def test_every_dtype_and_op_gives_the_bits_of_the_cpu(run: Run, dtype: DType, op: ReduceOp) -> None:
    for numel in NUMELS:
        inputs = [sample(dtype, numel, seed) for seed in range(WORLD_SIZE)]
        output = blank(dtype, numel)
        run(folding(dtype, op), inputs, [output])
        assert_same(output, on_cpu(dtype, op, inputs))


@pytest.mark.parametrize("dtype", DType, ids=lambda each: each.label)
@pytest.mark.parametrize("shifts", [(1, 1, 1, 1), (5, 5, 5, 5), (0, 1, 2, 3), (0, 0, 0, 1)])
def test_elements_may_lie_anywhere(run: Run, dtype: DType, shifts: tuple[int, ...]) -> None:
    for numel in NUMELS:
        inputs = [sample(dtype, numel, each, shift) for each, shift in enumerate(shifts[:-1])]
        output = blank(dtype, numel, shifts[-1])
        run(folding(dtype, ReduceOp.MAX), inputs, [output])
        assert_same(output, on_cpu(dtype, ReduceOp.MAX, inputs))


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
        how = arithmetic(variant.given, variant.op, numel)
        with np.errstate(all="ignore"):
            how.fold_inputs(array_of(expected), list(map(array_of, inputs)))
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
        how = arithmetic(variant.written, op, numel)
        with np.errstate(all="ignore"):
            how.finish([array_of(expected)], array_of(kept))
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
