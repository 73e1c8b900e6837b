"""The folder of a user's jobs: one process at a time has it, and it is gone with the last job."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from allfold_cluster import job_folder
from allfold_cluster.job_folder import LOCK, claiming


def test_a_claim_that_somebody_keeps_is_waited_for_with_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_folder, "_CLAIM_SECONDS", 0.05)
    folder = tmp_path / "allfold" / "jobs"
    folder.mkdir(parents=True, mode=0o700)
    with (folder / LOCK).open("a") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"another process .* has locked it"), claiming(folder):
            raise AssertionError("it is claimed twice")


def test_the_folder_is_gone_with_what_was_in_it_and_not_before(tmp_path: Path) -> None:
    folder = tmp_path / "allfold" / "jobs"
    with claiming(folder):
        (folder / "job.sock").touch()
    assert folder.exists()
    with claiming(folder):
        (folder / "job.sock").unlink()
    assert not folder.parent.exists()
