"""Tensors between two agents: straight into memory, counted, whole; uploads and deletion."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from allfold_agent.tensors.client import delete, upload
from allfold_agent.tensors.download import download
from allfold_agent.tensors.store import TensorStore
from allfold_core.errors import (
    ArenaExhausted,
    InvalidArgument,
    LocalError,
    PeerLost,
    PeerMissing,
    PeerSentIncoherentTensor,
)
from tests.node_agent.tensors.source import (
    MIB,
    TOKEN,
    Source,
    answering,
    expose_bytes,
    serving,
    wait_until_empty,
)

LABELS = [
    "float32", "float64", "float16", "bfloat16", "int8",
    "int16", "int32", "int64", "uint8", "bool",
]  # fmt: skip


@pytest.mark.parametrize("dtype", LABELS)
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (2, 0, 3)])
def test_a_tensor_comes_back_as_it_was(source: Source, dtype: str, shape: tuple[int, ...]) -> None:
    original = torch.arange(6).to(getattr(torch, dtype))[: max(1, len(shape) * 3)]
    original = original.reshape(shape) if len(shape) == 2 else original[0].expand(shape).clone()
    raw = original.reshape(-1).view(torch.uint8).numpy() if original.numel() else b""
    upload(source.address, "a", raw, dtype, shape)
    tensor = download(source.address, "a", expect=(dtype, shape))
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    assert torch.equal(tensor.torch(), original)
    if dtype == "bfloat16":
        assert tensor.numpy().dtype == np.uint16
    else:
        assert np.array_equal(tensor.numpy(), original.numpy())
    assert tensor.numpy().shape == shape


def test_arrays_share_the_memory_of_the_download(source: Source) -> None:
    upload(source.address, "a", np.ones(4, np.float32), "float32", (4,))
    tensor = download(source.address, "a")
    tensor.torch()[0] = 5
    assert tensor.numpy()[0] == 5


def test_a_download_goes_straight_into_the_memory_it_is_given(source: Source) -> None:
    upload(source.address, "a", np.arange(4, dtype=np.float32), "float32", (4,))
    memory = np.zeros(4, np.float32)
    tensor = download(source.address, "a", into=memory.data)
    assert memory.tolist() == [0, 1, 2, 3]
    assert np.shares_memory(tensor.numpy(), memory)


def test_memory_of_another_size_is_a_mistake_before_anything_is_asked() -> None:
    with pytest.raises(InvalidArgument, match="16 bytes"):
        download("127.0.0.1:1", "a", into=memoryview(bytearray(12)), expect=("float32", (4,)))
    with pytest.raises(InvalidArgument, match="read-only"):
        download("127.0.0.1:1", "a", into=memoryview(bytes(16)))


@pytest.mark.parametrize(
    "expect", [("float64", (2,)), ("float32", (2, 2)), ("float32", (5,)), ("int32", (4,))]
)
def test_another_dtype_or_shape_than_expected_names_both(
    source: Source, expect: tuple[str, tuple[int, ...]]
) -> None:
    upload(source.address, "a", np.zeros(4, np.float32), "float32", (4,))
    with pytest.raises(PeerSentIncoherentTensor, match=r"float32\[4\]") as caught:
        download(source.address, "a", expect=expect)
    assert caught.value.details["expected"].startswith(expect[0])
    assert caught.value.details["got"] == "float32[4]"


def test_a_tensor_larger_than_the_memory_for_it_is_not_received(source: Source) -> None:
    upload(source.address, "a", bytes(8), "uint8", (8,), max_downloads=1)
    with pytest.raises(PeerSentIncoherentTensor, match="expected 4 bytes"):
        download(source.address, "a", into=memoryview(bytearray(4)))
    with pytest.raises(PeerSentIncoherentTensor, match="7 bytes at most"):
        download(source.address, "a", max_bytes=7, timeout=10)


def test_a_tensor_that_was_refused_or_damaged_does_not_count_as_downloaded(source: Source) -> None:
    expose_bytes(source, b"abc", max_downloads=1)
    source.store.get("a")._digest = bytes(32)
    for _ in range(5):
        with pytest.raises(PeerSentIncoherentTensor, match="expected int8"):
            download(source.address, "a", expect=("int8", (3,)), timeout=10)
        with pytest.raises(PeerSentIncoherentTensor, match="digest"):
            download(source.address, "a", timeout=10)
    assert len(source.store) == 1


def test_a_download_waits_until_the_tensor_is_exposed(source: Source) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(download, source.address, "a", timeout=20)
        time.sleep(0.05)
        expose_bytes(source, b"late")
        assert bytes(waiting.result(5).data) == b"late"


def test_a_tensor_that_never_comes_names_peer_and_id(source: Source) -> None:
    began = time.monotonic()
    with pytest.raises(PeerMissing, match="s1:op-2") as caught:
        download(source.address, "s1:op-2", timeout=0.3)
    assert 0.2 < time.monotonic() - began < 2
    assert source.address in str(caught.value)
    assert caught.value.details == {"address": source.address, "tensor": "s1:op-2"}


def test_eight_downloads_at_once_are_eight_whole_tensors(source: Source) -> None:
    data = os.urandom(MIB) * 4
    expose_bytes(source, data, max_downloads=8)
    with ThreadPoolExecutor(8) as pool:
        tensors = pool.map(lambda _: download(source.address, "a", timeout=30), range(8))
        assert all(bytes(tensor.data) == data for tensor in tensors)
    wait_until_empty(source.store)


def test_more_downloads_than_allowed_are_missing(source: Source) -> None:
    upload(source.address, "a", b"x", "uint8", (1,), max_downloads=1)
    download(source.address, "a")
    with pytest.raises(PeerMissing):
        download(source.address, "a", timeout=0.2)


@pytest.mark.parametrize("size", [0, 10, 3 * MIB])
@pytest.mark.parametrize("digest", [True, False])
def test_an_upload_arrives(source: Source, size: int, digest: bool) -> None:
    data = os.urandom(size)
    upload(source.address, "a", data, "uint8", (size,), digest=digest, ttl=9.5)
    assert bytes(source.store.get("a").view) == data


@pytest.mark.parametrize("size", [10, 8 * MIB])
def test_a_second_upload_of_an_id_is_a_conflict(source: Source, size: int) -> None:
    upload(source.address, "a", b"x", "uint8", (1,))
    with pytest.raises(LocalError, match="already") as caught:
        upload(source.address, "a", bytes(size), "uint8", (size,))
    assert caught.value.details["http_status"] == 409


def test_an_upload_that_finds_no_room_is_told_so() -> None:
    with serving(TensorStore(max_bytes=4 * MIB)) as source:
        with pytest.raises(ArenaExhausted, match="limit"):
            upload(source.address, "a", bytes(8 * MIB), "uint8", (8 * MIB,))
        upload(source.address, "a", b"x", "uint8", (1,))


def test_an_upload_of_another_size_than_its_shape_is_not_sent() -> None:
    with pytest.raises(InvalidArgument, match="8 bytes, its memory 3"):
        upload("127.0.0.1:1", "a", b"abc", "float32", (2,))


def test_an_agent_that_breaks_an_upload_is_lost() -> None:
    for size in (1, 2 * MIB):
        with answering(b"") as address, pytest.raises(PeerLost, match=address):
            upload(address, "a", bytes(size), "uint8", (size,), timeout=5)


def test_delete_says_whether_there_was_something(source: Source) -> None:
    upload(source.address, "a", b"x", "uint8", (1,))
    assert delete(source.address, "a")
    assert not delete(source.address, "a")


def test_each_call_needs_the_token() -> None:
    with serving(token=TOKEN) as source:
        upload(source.address, "a", b"x", "uint8", (1,), token=TOKEN)
        assert bytes(download(source.address, "a", token=TOKEN).data) == b"x"
        for token in (None, "wrong"):
            with pytest.raises(LocalError, match="token"):
                download(source.address, "a", token=token)
            with pytest.raises(LocalError, match="token"):
                upload(source.address, "b", b"x", "uint8", (1,), token=token)
            with pytest.raises(LocalError, match="token"):
                delete(source.address, "a", token=token)
        assert delete(source.address, "a", token=TOKEN)


@pytest.mark.parametrize("tensor_id", ["", "a/b", "a?b", ".."])
def test_an_id_that_cannot_be_is_refused_before_anything_is_sent(tensor_id: str) -> None:
    for call in (download, delete):
        with pytest.raises(InvalidArgument, match="tensor id"):
            call("127.0.0.1:1", tensor_id)
    with pytest.raises(InvalidArgument, match="tensor id"):
        upload("127.0.0.1:1", tensor_id, b"", "uint8", (0,))


@pytest.mark.slow
def test_a_tensor_over_512_mib_is_uploaded_and_downloaded(source: Source) -> None:
    size = 600 * MIB
    data = np.arange(size // 8, dtype=np.int64)
    upload(source.address, "a", data, "int64", data.shape, max_downloads=1, timeout=100)
    tensor = download(source.address, "a", timeout=100)
    assert np.array_equal(tensor.numpy(), data)
    wait_until_empty(source.store)
