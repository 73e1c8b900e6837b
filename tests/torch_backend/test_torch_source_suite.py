"""torch's own tests out of its source repository, where a copy of that is at hand."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.services import Services
from tests.torch_backend import torch_source_suite
from tests.torch_backend.torch_source_suite import FILES, compare, row

SOURCE = os.environ.get("ALLFOLD_TORCH_SOURCE")

THREE_KINDS = """
    import time
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
    import torch

    class TestKinds(MultiProcessTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def _group(self):
            store = dist.FileStore(self.file_name, 2)
            dist.init_process_group("nccl", store=store, rank=self.rank, world_size=2)

        @skip_if_lt_x_gpu(2)
        def test_of_gpus(self):
            self._group()
            tensor = torch.ones(2, device=f"cuda:{self.rank}")
            dist.all_reduce(tensor)
            self.assertEqual(tensor.tolist(), [2.0, 2.0])

        def test_of_gloo_alone(self):
            self._group()
            self.assertEqual(dist.get_backend(), "gloo")

        def test_without_a_group(self):
            pass

"""


@pytest.fixture
def environment(services: Services) -> Iterator[dict[str, str]]:
    sockets = ",".join(agent.socket for agent in services.agents.values())
    temporary = {"TMPDIR": str(services.folder)}
    yield services.env | temporary | {"ALLFOLD_SOCKETS": sockets}


@pytest.mark.long
@pytest.mark.timeout(torch_source_suite.FILE_SECONDS * 3)
@pytest.mark.parametrize("name", FILES)
def test_allfold_passes_what_gloo_passes(environment: dict[str, str], name: str) -> None:
    if SOURCE is None:
        pytest.skip("ALLFOLD_TORCH_SOURCE names no copy of torch's repository")
    path = Path(SOURCE, "test", "distributed", name)
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    _, differing = row(name, compare(path, environment))
    assert not differing


@pytest.mark.long
def test_a_file_is_compared_case_by_case(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "test_kinds.py"
    path.write_text(textwrap.dedent(THREE_KINDS))
    line, differing = row("test_kinds.py", compare(path, environment))
    assert line == "| test_kinds.py | 2 | 2 | 1 |"
    (only,) = differing
    assert only.startswith("test_kinds.py: TestKinds.test_of_gloo_alone: failed: AssertionError")


@pytest.mark.long
def test_a_case_that_hangs_is_ended_with_its_ranks_and_the_others_run(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_source_suite, "CASE_SECONDS", 5.0)
    path = tmp_path / "test_hanging.py"
    path.write_text(
        textwrap.dedent("""
        import threading
        from unittest import TestCase

        class TestHanging(TestCase):
            def test_first(self):
                threading.Event().wait()

            def test_second(self):
                pass
        """)
    )
    answers = torch_source_suite.SourceFile(path, "gloo", environment).run()
    outcomes = {case.rpartition(".")[2]: answer["outcome"] for case, answer in answers.items()}
    assert outcomes == {"test_first": "hung", "test_second": "passed"}
