"""Notebooks where nothing runs: the cells of docs/start.md, and others, in a kernel of Jupyter.

`make test-clients` installs it; without it these tests are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allfold_cluster.environment import free_port
from chaos.home import Home
from tests.support.processes.services import ROOT
from tests.support.waiting import wait_until

pytest.importorskip("accelerate")
pytest.importorskip("ipykernel")
pytest.importorskip("nbclient")

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

SECONDS = 120.0
GONE_SECONDS = 10.0
ALONE = "[1. 1. 1. 1.]"
RIGHT = "[3.0, 3.0, 3.0, 3.0]"

WITHOUT_TORCH = """
import multiprocessing, os

def main(rank):
    group = allfold.init(rank=rank, world_size=2)
    print(f"rank {rank}:", group.all_reduce(np.full(4, rank + 1.0)).tolist(), flush=True)
    allfold.shutdown()

with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(main, range(2), chunksize=1)
    # Not by a signal: torch's launcher has left a handler of SIGTERM, and a worker that is just
    # about to wait for more would not run it.
    pool.close()
    pool.join()
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * SECONDS)]


class Notebook:
    """A notebook with a kernel that runs, of a user who has never started anything."""

    def __init__(self, home: Home, client: NotebookClient) -> None:
        self._home = home
        self._client = client

    def run(self, source: str) -> str:
        """Run one more cell and return what it prints; an error in it fails the test."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return "".join(str(each.get("text", "")) for each in cell.outputs)

    def restart(self) -> None:
        """Kill the kernel and start another one, as the button does."""
        self._client.km.restart_kernel(now=True)
        self._client.kc.wait_for_ready(SECONDS)

    def await_no_services(self) -> None:
        """Wait until no service is left that cells have started."""
        home = self._home
        wait_until(
            lambda: not (home.agents or home.orchestrators or home.supervisors or home.files()),
            "the end of its services",
            GONE_SECONDS,
        )


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as home:
        yield home


@contextmanager
def notebook(home: Home) -> Iterator[Notebook]:
    """Open one; closing it ends the kernel, and all else has to end with that."""
    manager = KernelManager(kernel_name="python3")
    client = NotebookClient(
        nbformat.v4.new_notebook(), km=manager, timeout=SECONDS, startup_timeout=SECONDS
    )
    folders = {"IPYTHONDIR": str(home.folder / "ipython"), "CUDA_VISIBLE_DEVICES": ""}
    with client.setup_kernel(cleanup_kc=True, env=home.environment() | folders):
        yield Notebook(home, client)
    wait_until(lambda: not home.left(), "the end of all that it has started", GONE_SECONDS)


def cells_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "start.md").read_text()
    return re.findall(r"<!-- notebook -->\n```python\n(.*?)```", page, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def _files_of_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))


def test_a_kernel_that_is_a_rank_starts_ranks_and_goes_on_as_one(home: Home) -> None:
    alone, several = cells_of_the_page()
    launched = several.replace("num_processes=2", f'num_processes=2, use_port="{free_port()}"')
    with notebook(home) as pages:
        assert ALONE in pages.run(alone)
        assert pages.run(launched).count(RIGHT) == 2
        assert pages.run(WITHOUT_TORCH).count(RIGHT) == 2
        assert ALONE in pages.run("print(allfold.all_reduce(np.ones(4)))")
        assert len(home.agents) >= 1


def test_a_kernel_that_is_restarted_leaves_no_services_and_starts_others(home: Home) -> None:
    alone, _ = cells_of_the_page()
    with notebook(home) as pages:
        assert ALONE in pages.run(alone)
        (first,) = home.agents
        pages.restart()
        pages.await_no_services()
        assert ALONE in pages.run(alone)
        (second,) = home.agents
        assert second != first
