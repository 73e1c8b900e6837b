"""Files that are read again when they change, or when they could not be read for another reason."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from allfold_core.errors import InvalidArgument
from allfold_service import watched_files
from allfold_service.watched_files import WatchedFiles


class Reader:
    """Reads a file, unless something else is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        if self.problem:
            raise InvalidArgument(self.problem)
        return self.path.read_text()


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    (tmp_path / "file").write_text("old")
    return Reader(tmp_path / "file")


def test_a_file_that_stays_is_read_once(reader: Reader) -> None:
    files = WatchedFiles([reader.path], reader, "the file")
    assert [files.content for _ in range(3)] == ["old"] * 3
    assert reader.count == 1


def test_what_is_wrong_beside_the_files_may_pass_without_a_change_of_theirs(
    reader: Reader, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = WatchedFiles([reader.path], reader, "the file")
    reader.problem = "the clock is wrong"
    reader.path.write_text("new")
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(watched_files, "_RETRY_SECONDS", 0.0)
        assert [files.content for _ in range(3)] == ["old"] * 3
        reader.problem = ""
        assert files.content == "new"
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    count = reader.count
    assert files.content == "new"
    assert reader.count == count


def test_files_of_no_use_are_not_read_each_time(reader: Reader) -> None:
    files = WatchedFiles([reader.path], reader, "the file")
    reader.problem = "it is of no use"
    reader.path.write_text("new")
    assert [files.content for _ in range(5)] == ["old"] * 5
    assert reader.count == 2


def test_a_file_whose_permissions_change_is_read_again(reader: Reader) -> None:
    files = WatchedFiles([reader.path], reader, "the file")
    reader.path.chmod(0o640)
    assert files.content == "old"
    assert reader.count == 2
