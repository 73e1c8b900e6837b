"""torch's tensors of every kind and dtype: they work, or are refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from allfold import _tensors
from allfold._arena import Arena, host_memory
from allfold_core.errors import InvalidArgument

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
QUANTIZED = [each for each in DTYPES if str(each).startswith("torch.q")]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what torch has in trial


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena(host_memory(lambda *_: None))
    yield arena
    arena.close()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [each for each in DTYPES if each not in QUANTIZED], ids=str)
def test_a_tensor_of_any_plain_dtype_is_moved(
    arena: Arena, dtype: torch.dtype, strided: bool
) -> None:
    step = 2 if strided else 1
    bits = torch.arange(4 * step * dtype.itemsize, dtype=torch.uint8).reshape(2, -1) % 2
    given, got = bits.view(dtype)[:, ::step], torch.empty_like(bits).view(dtype)[:, ::step]
    nbytes, start = 4 * dtype.itemsize, 16
    block = arena.allocate(start + nbytes)
    _tensors.view(given, written=False, folded=False).copy_to(block, start)
    _tensors.view(got, written=True, folded=False).copy_from(block, start)
    word = WORDS[dtype.itemsize]
    assert block.memory is not None
    moved = block.memory[start:]
    assert moved.tolist() == given.view(word).contiguous().view(torch.uint8).flatten().tolist()
    assert torch.equal(got.view(word), given.view(word))


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_quantized_tensor_is_refused(dtype: torch.dtype, written: bool) -> None:
    with pytest.raises(InvalidArgument, match=rf"quantized \({dtype}\); use tensor.int_repr\(\)"):
        _tensors.view(torch.empty(4, dtype=dtype), written=written, folded=False)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda ones: ones.to_sparse(), "sparse_coo; use tensor.to_dense"),
        (lambda ones: ones.to_sparse_csr(), "sparse_csr; use tensor.to_dense"),
        (lambda ones: ones.to("meta"), "on meta and has no data"),
        (lambda ones: torch.nested.nested_tensor([ones]), "nested; .* tensor.unbind"),
        (
            lambda ones: torch.nested.nested_tensor([ones], layout=torch.jagged),
            "nested; .* tensor.unbind",
        ),
    ],
    ids=["sparse", "sparse rows", "meta", "nested", "jagged"],
)
def test_what_is_no_plain_array_is_refused(
    make: Callable[[torch.Tensor], torch.Tensor], says: str, written: bool
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        _tensors.view(make(torch.ones(2, 3)), written=written, folded=False)


@pytest.mark.parametrize("name", ["complex32", "float8_e5m2", "bits8", "int4"])
def test_what_cannot_be_reduced_says_what_can(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is not supported; .* bfloat16"):
        _tensors.view(torch.empty(4, dtype=getattr(torch, name)), folded=True)
