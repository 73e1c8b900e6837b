"""The agent's tensor store: limits, ages, waits and counted downloads. No sockets."""

import hashlib
import mmap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from allfold_agent.tensors.spec import (
    TensorSpec,
)
from allfold_agent.tensors.store import LONGEST_TTL, ExposedTensor, TensorStore
from allfold_core.errors import ArenaExhausted, InvalidArgument, LocalError, PeerMissing

FOUR = np.arange(4, dtype=np.float32)


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> TensorStore:
    return TensorStore(max_bytes=100, max_tensor_bytes=64, clock=clock)


def expose(store: TensorStore, tensor_id: str = "a", **options: float) -> None:
    store.expose(tensor_id, FOUR, "float32", (4,), **options)  # type: ignore[arg-type]


def download(store: TensorStore, tensor: ExposedTensor, *, complete: bool = True) -> None:
    with store.reading(tensor, counts=True) as reading:
        reading.complete = complete


def test_an_exposed_tensor_is_shown_without_a_copy(store: TensorStore) -> None:
    memory = FOUR.copy()
    store.expose("a", memory, "float32", (2, 2))
    tensor = store.get("a")
    assert tensor.spec == TensorSpec.of("float32", (2, 2))
    memory[0] = 7
    assert np.frombuffer(tensor.view, np.float32)[0] == 7
    assert tensor.view.readonly


@pytest.mark.parametrize(
    "memory", [bytes(8), bytearray(8), memoryview(bytes(8)), np.zeros((2, 1), np.float32)]
)
def test_any_contiguous_memory_can_be_exposed(
    store: TensorStore, memory: bytes | bytearray | memoryview
) -> None:
    store.expose("a", memory, "int32", (2,))
    assert len(store.get("a").view) == 8


def test_an_mmap_can_be_exposed(store: TensorStore) -> None:
    with mmap.mmap(-1, 8) as memory:
        store.expose("a", memory, "int32", (2,))
        store.delete("a")


def test_strided_memory_is_refused_rather_than_copied(store: TensorStore) -> None:
    with pytest.raises(InvalidArgument, match="contiguous"):
        store.expose("a", np.zeros((4, 2), np.float32)[:, 0], "float32", (4,))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_a_tensor_without_elements_is_a_tensor(store: TensorStore, shape: tuple[int, ...]) -> None:
    store.expose("a", np.empty(shape, np.float32), "float32", shape)
    assert store.get("a").view.nbytes == 0
    assert store.get("a").spec.shape == shape


def test_memory_of_another_size_than_the_shape_is_invalid(store: TensorStore) -> None:
    with pytest.raises(InvalidArgument, match="20 bytes, its memory 16"):
        store.expose("a", FOUR, "float32", (5,))
    assert store.nbytes == 0


@pytest.mark.parametrize("tensor_id", ["s1:op-42:reduce.3", "A", "_", "...", "a" * 256])
def test_ids_name_session_op_phase_and_slice(store: TensorStore, tensor_id: str) -> None:
    expose(store, tensor_id)
    assert store.get(tensor_id).tensor_id == tensor_id


@pytest.mark.parametrize("tensor_id", ["", "a" * 257, "a/b", "a b", "ä", "a\n", ".", "..", "a%2F"])
def test_other_ids_are_invalid(store: TensorStore, tensor_id: str) -> None:
    with pytest.raises(InvalidArgument):
        expose(store, tensor_id)
    with pytest.raises(InvalidArgument):
        store.get(tensor_id)
    with pytest.raises(InvalidArgument):
        store.delete(tensor_id)


def test_exposing_twice_is_a_conflict_and_keeps_the_first(store: TensorStore) -> None:
    expose(store)
    with pytest.raises(LocalError, match="already") as caught:
        store.expose("a", bytes(4), "uint8", (4,))
    assert caught.value.details["http_status"] == 409
    assert store.get("a").spec.dtype.label == "float32"
    assert store.nbytes == 16


def test_a_tensor_over_its_limit_is_refused(store: TensorStore) -> None:
    with pytest.raises(LocalError, match="limit is 64") as caught:
        store.expose("a", bytes(65), "uint8", (65,))
    assert caught.value.details["http_status"] == 413


def test_all_tensors_together_have_a_limit_too(store: TensorStore) -> None:
    store.expose("a", bytes(64), "uint8", (64,))
    with pytest.raises(ArenaExhausted, match="limit of 100"):
        store.expose("b", bytes(37), "uint8", (37,))
    store.expose("c", bytes(36), "uint8", (36,))
    assert store.nbytes == 100


def test_no_memory_is_taken_for_a_shape_over_the_limit(store: TensorStore) -> None:
    with pytest.raises(LocalError, match="limit"):
        store.draft("a", TensorSpec.parse("float64", "9999999999,9999999999"))
    assert store.nbytes == 0


def test_memory_that_the_machine_has_not_got_is_an_error_of_its_own() -> None:
    store = TensorStore(max_bytes=2**80, max_tensor_bytes=2**80)
    with pytest.raises(ArenaExhausted, match="no memory"):
        store.draft("a", TensorSpec.of("uint8", (2**62,)))
    assert store.nbytes == 0


@pytest.mark.parametrize("max_downloads", [0, -1])
def test_max_downloads_of_nothing_is_refused_and_leaks_nothing(
    store: TensorStore, max_downloads: int
) -> None:
    with pytest.raises(InvalidArgument, match="max_downloads"):
        expose(store, max_downloads=max_downloads)
    assert (len(store), store.nbytes) == (0, 0)


@pytest.mark.parametrize("ttl", [0, -1.0, float("nan"), float("inf"), LONGEST_TTL + 1])
def test_a_tensor_lives_for_a_finite_time(store: TensorStore, ttl: float) -> None:
    with pytest.raises(InvalidArgument, match="ttl"):
        expose(store, ttl=ttl)
    assert store.nbytes == 0


def test_a_tensor_is_gone_after_as_many_complete_downloads_as_were_allowed(
    store: TensorStore,
) -> None:
    expose(store, max_downloads=2)
    tensor = store.get("a")
    download(store, tensor)
    assert store.get("a") is tensor
    download(store, tensor)
    with pytest.raises(PeerMissing):
        store.get("a")
    assert store.nbytes == 0


def test_a_download_that_broke_off_does_not_count(store: TensorStore) -> None:
    expose(store, max_downloads=1)
    for _ in range(3):
        download(store, store.get("a"), complete=False)
    download(store, store.get("a"))
    assert len(store) == 0


def test_a_partial_transfer_does_not_count(store: TensorStore) -> None:
    expose(store, max_downloads=1)
    with store.reading(store.get("a"), counts=False) as reading:
        reading.complete = True
    assert len(store) == 1


def test_a_tensor_is_never_downloaded_more_often_than_allowed_even_at_once(
    store: TensorStore,
) -> None:
    expose(store, max_downloads=1)
    tensor = store.get("a")
    with store.reading(tensor, counts=True) as first:
        with pytest.raises(PeerMissing), store.reading(tensor, counts=True):
            pass
        first.complete = True
    assert len(store) == 0


def test_who_waits_for_a_download_gets_the_place_of_one_that_broke_off() -> None:
    store = TensorStore()
    expose(store, max_downloads=1)
    tensor = store.get("a")
    with ThreadPoolExecutor(1) as pool, store.reading(tensor, counts=True):

        def second() -> None:
            with store.reading(tensor, counts=True, wait=30) as reading:
                reading.complete = True

        waiting = pool.submit(second)
        time.sleep(0.02)
        assert not waiting.done()
    waiting.result(5)
    assert len(store) == 0


def test_who_waits_for_a_download_learns_when_the_last_one_was_taken() -> None:
    store = TensorStore()
    expose(store, max_downloads=1)
    tensor = store.get("a")

    def second() -> None:
        with store.reading(tensor, counts=True, wait=30):
            pass

    with ThreadPoolExecutor(1) as pool:
        with store.reading(tensor, counts=True) as first:
            waiting = pool.submit(second)
            time.sleep(0.02)
            assert not waiting.done()
            first.complete = True
        with pytest.raises(PeerMissing):
            waiting.result(5)


def test_the_memory_of_a_dropped_tensor_counts_until_its_last_reader_is_done(
    store: TensorStore,
) -> None:
    expose(store)
    with store.reading(store.get("a"), counts=True):
        assert store.delete("a")
        assert (len(store), store.nbytes) == (0, 16)
        expose(store)  # the id is free at once
    assert store.nbytes == 16
    assert store.delete("a")
    assert store.nbytes == 0


def test_deleting_nothing_says_so(store: TensorStore) -> None:
    assert not store.delete("a")


def test_a_tensor_that_nobody_downloads_is_dropped_when_its_time_is_up(
    store: TensorStore, clock: Clock
) -> None:
    expose(store, "a", ttl=10)
    expose(store, "b", ttl=20)
    clock.now += 9.9
    assert len(store) == 2
    clock.now += 0.1
    with pytest.raises(PeerMissing):
        store.get("a")
    assert store.get("b")
    clock.now += 10
    assert (len(store), store.nbytes) == (0, 0)


def test_the_room_and_the_id_of_an_aged_tensor_are_free_for_the_next(
    store: TensorStore, clock: Clock
) -> None:
    store.expose("a", bytes(64), "uint8", (64,), ttl=1)
    clock.now += 1
    store.expose("a", bytes(64), "uint8", (64,), ttl=1)
    assert store.nbytes == 64


def test_a_tensor_that_ages_during_a_download_is_still_downloaded(
    store: TensorStore, clock: Clock
) -> None:
    expose(store, ttl=1, max_downloads=1)
    with store.reading(store.get("a"), counts=True) as reading:
        clock.now += 2
        assert len(store) == 0
        reading.complete = True
    assert store.nbytes == 0


def test_a_tensor_can_be_asked_for_before_it_is_exposed() -> None:
    store = TensorStore()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.get, "a", 30) for _ in range(4)]
        time.sleep(0.02)
        expose(store)
        assert {id(one.result(5)) for one in waiting} == {id(store.get("a"))}


def test_no_wake_up_is_lost_between_exposing_and_waiting() -> None:
    store = TensorStore()
    with ThreadPoolExecutor(2) as pool:
        for number in range(300):
            waiting = pool.submit(store.get, f"t{number}", 30)
            pool.submit(expose, store, f"t{number}", max_downloads=1).result(5)
            download(store, waiting.result(5))
    assert len(store) == 0


def test_waiting_ends_with_the_name_of_what_is_missing() -> None:
    began = time.monotonic()
    with pytest.raises(PeerMissing, match="s1:op-3") as caught:
        TensorStore().get("s1:op-3", 0.05)
    assert 0.04 < time.monotonic() - began < 2
    assert caught.value.details["tensor"] == "s1:op-3"


def test_waiting_ends_when_nobody_wants_the_tensor_any_more() -> None:
    began = time.monotonic()
    with pytest.raises(PeerMissing):
        TensorStore().get("a", 30, wanted=lambda: time.monotonic() < began + 0.1)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("wait", [-1, float("nan")])
def test_a_wait_without_sense_is_invalid(store: TensorStore, wait: float) -> None:
    with pytest.raises(InvalidArgument, match="wait"):
        store.get("a", wait)


def test_a_wait_is_cut_to_its_longest(store: TensorStore, clock: Clock) -> None:
    def wanted() -> bool:
        clock.now += 61
        return True

    with pytest.raises(PeerMissing, match="60 s"):
        store.get("a", float("inf"), wanted=wanted)


def test_a_draft_is_seen_by_nobody_before_it_is_exposed(store: TensorStore) -> None:
    with store.draft("a", TensorSpec.of("uint8", (3,))) as draft:
        draft.view[:] = b"abc"
        assert len(store) == 0
        assert store.nbytes == 3
        draft.expose()
    assert bytes(store.get("a").view) == b"abc"


def test_a_draft_that_fails_gives_its_room_back(store: TensorStore) -> None:
    with pytest.raises(ZeroDivisionError), store.draft("a", TensorSpec.of("uint8", (64,))):
        raise ZeroDivisionError
    assert (len(store), store.nbytes) == (0, 0)


def test_of_two_drafts_of_one_id_the_first_complete_one_wins(store: TensorStore) -> None:
    spec = TensorSpec.of("uint8", (8,))
    with store.draft("a", spec) as first, store.draft("a", spec) as second:
        second.expose()
        with pytest.raises(LocalError, match="already"):
            first.expose()
    assert store.nbytes == 8


def test_the_digest_is_computed_once_and_only_when_asked_for(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expose(store)
    tensor = store.get("a")
    assert tensor.digest == hashlib.sha256(FOUR.tobytes()).digest()
    monkeypatch.delattr(hashlib, "sha256")
    assert len(tensor.digest) == 32
