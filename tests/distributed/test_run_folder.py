"""The run's folder: one run at a time, and the same folder on all ranks."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from messages import assert_mentions
from runs import train_run

from titanlite.config.schema import RunConfig
from titanlite.data.stream import TrainStream
from titanlite.distributed import run_folder
from titanlite.distributed.run_folder import RunFolder, lock
from titanlite.runtime.errors import ConfigError


class FastClock:
    """Ten times as fast: a folder that differs is given ten seconds to appear."""

    sleep = staticmethod(time.sleep)

    @staticmethod
    def monotonic() -> float:
        return 10 * time.monotonic()


def claim(folder: Path, other: Path | None = None) -> list[str]:
    """Problems of claiming the folder, or on later ranks the other one."""
    run_folder.time = FastClock
    try:
        path = other if other and dist.get_rank() else folder
        RunFolder(RunConfig(folder=str(path.parent), name=path.name))
    except ConfigError as error:
        return error.problems
    return []


def test_a_folder_is_made_and_claimed(pool, tmp_path):
    assert pool.run(2, claim, tmp_path / "deep/run") == [[], []]
    assert pool.run(2, claim, tmp_path / "deep/run") == [[], []], "the lock ends with its process"


def test_a_folder_that_is_locked_is_refused_on_all_ranks(pool, tmp_path):
    held = lock(tmp_path / ".lock")
    for problems in pool.run(2, claim, tmp_path):
        assert_mentions("".join(problems), str(tmp_path), "another", "run.name")
    held.close()


def test_a_folder_that_cannot_be_made_is_refused_on_all_ranks(pool, tmp_path):
    (tmp_path / "file").write_text("")
    for problems in pool.run(2, claim, tmp_path / "file/run"):
        assert_mentions("".join(problems), "run.folder", str(tmp_path / "file/run"))


def test_ranks_that_see_different_folders_are_refused(pool, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.lock").write_text("the token of another run")
    for problems in pool.run(2, claim, tmp_path / "run", tmp_path / "other"):
        assert_mentions("".join(problems), "rank 1", "folder differs", "rank 0")


def train_and_try_to_lock(arguments: list[str], folder: Path) -> list[bool]:
    """Whether the folder was free, before each step."""
    free, original = [], TrainStream.next_step

    def next_step(stream):
        try:
            lock(folder / ".lock").close()
            free.append(True)
        except BlockingIOError:
            free.append(False)
        return original(stream)

    TrainStream.next_step = next_step
    assert train_run(arguments) == 0
    return free


@pytest.mark.slow
def test_a_run_holds_its_folder_as_long_as_it_trains(pool, arguments, tmp_path):
    assert pool.run(1, train_and_try_to_lock, arguments, tmp_path / "debug") == [[False] * 6]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch, caplog, number):
    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    lock(tmp_path / ".lock").close()
    assert "the file system has no locks" in caplog.text
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        lock(tmp_path / ".lock")
