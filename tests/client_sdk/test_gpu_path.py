"""The way that tensors on a GPU take is chosen by what the user, this process and the agent say."""

from __future__ import annotations

import pathlib
from itertools import product

import pytest

import allfold
from allfold._cuda.gpu import ordinal_of_device
from allfold._process.settings import VARIABLE, Path, choose, wanted
from allfold_core.errors import InvalidArgument

UUID, OTHER = "fa4e" + "0" * 28, "beef" + "0" * 28
SEES = {UUID: "NVIDIA H100", OTHER: "NVIDIA L4"}
SEES_OTHERS = {OTHER: "NVIDIA L4"}
NONE: dict[str, str] = {}
NO_GPU = "the agent folds on no GPU: the NVIDIA driver shows no GPU"
NO_CUDA = "there is no NVIDIA driver"
FASTEST = None

# (what the user asks for, why this process has no CUDA, what the agent sees): (path, why)
CHOICES: dict[tuple[Path | None, str | None, str], tuple[Path, str]] = {
    (FASTEST, None, "this"): (Path.IPC, "the agent folds on it as well, as NVIDIA H100"),
    (FASTEST, None, "others"): (Path.PINNED, "the agent does not see this GPU, but"),
    (FASTEST, None, "none"): (Path.PINNED, NO_GPU),
    (Path.IPC, None, "this"): (Path.IPC, "the agent folds on it as well, as NVIDIA H100"),
    (Path.IPC, None, "others"): (Path.PINNED, "the agent does not see this GPU, but"),
    (Path.IPC, None, "none"): (Path.PINNED, NO_GPU),
    **{
        (Path.PINNED, None, agent): (Path.PINNED, f"{VARIABLE} says so")
        for agent in ("this", "others", "none")
    },
    **{
        (asked, NO_CUDA, agent): (Path.HOST, NO_CUDA)
        for asked in (FASTEST, Path.IPC, Path.PINNED)
        for agent in ("this", "others", "none")
    },
    **{
        (Path.HOST, unavailable, agent): (Path.HOST, f"{VARIABLE} says so")
        for unavailable in (None, NO_CUDA)
        for agent in ("this", "others", "none")
    },
}
AGENTS = {"this": SEES, "others": SEES_OTHERS, "none": NONE}


def test_the_table_has_every_case() -> None:
    assert set(CHOICES) == set(product((FASTEST, *Path), (None, NO_CUDA), AGENTS))


@pytest.mark.parametrize(
    ("case", "expected"), CHOICES.items(), ids=lambda each: "-".join(map(str, each))
)
def test_the_way_and_its_reason(
    case: tuple[Path | None, str | None, str], expected: tuple[Path, str]
) -> None:
    asked, unavailable, agent = case
    chosen, why = choose(asked, unavailable, AGENTS[agent], UUID, NO_GPU)
    assert chosen is expected[0]
    assert why.startswith(expected[1])


def test_who_has_another_gpu_than_the_agent_is_told_which_that_has() -> None:
    assert OTHER in choose(None, None, SEES_OTHERS, UUID, NO_GPU).why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, None) for text in ("", "auto", "AUTO", "  ", " auto ")),
        *((f" {path.value}\n", path) for path in Path),
        *((path.value.upper(), path) for path in Path),
    ],
)
def test_the_variable_names_a_way(text: str, expected: Path | None) -> None:
    assert wanted({VARIABLE: text}) is expected


def test_without_the_variable_it_is_the_fastest() -> None:
    assert wanted({}) is None


@pytest.mark.parametrize("text", ["cuda", "GPU", "ipc,host", "0", "none"])
def test_what_is_no_way_is_refused_with_the_ways_that_there_are(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"auto, ipc, pinned, host, got '{text}'"):
        wanted({VARIABLE: text})


def test_init_refuses_what_is_no_way_before_it_looks_for_an_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv(VARIABLE, "x")
    with pytest.raises(InvalidArgument, match=f"{VARIABLE} is auto, .*, got 'x'"):
        allfold.init(rank=0, world_size=1, agent=str(tmp_path / "nobody"))
    assert not allfold.is_initialized()


def test_this_process_has_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "pinned")
    assert wanted() is Path.PINNED


@pytest.mark.parametrize(
    ("name", "ordinal"),
    [("cpu", None), ("cpu:0", None), ("cuda:0", 0), ("cuda:11", 11), ("cuda", 0), ("cuda:", 0)],
)
def test_a_device_is_named_as_torch_does(name: str, ordinal: int | None) -> None:
    assert ordinal_of_device(name) == ordinal


@pytest.mark.parametrize("name", ["", "gpu", "0", "cuda:-1", "cuda:one", "CUDA:0", 0, None])
def test_what_is_no_device_is_refused(name: object) -> None:
    with pytest.raises(InvalidArgument, match="'cpu', 'cuda' or 'cuda:<number>'"):
        ordinal_of_device(name)
