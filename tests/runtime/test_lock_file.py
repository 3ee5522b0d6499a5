"""One process at a time holds a lock, and the file is gone when none does."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from titanlite.runtime import lock_file as module
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.lock_file import lock_file


def test_a_second_one_is_refused_or_waits(tmp_path):
    path = tmp_path / ".lock"
    waiting = threading.Event()
    order = []

    def wait() -> None:
        waiting.set()
        with lock_file(path, "busy", wait=True):
            order.append("second")

    with lock_file(path, "busy"):
        with pytest.raises(ConfigError, match="busy"), lock_file(path, "busy"):
            pass
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert not path.exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(tmp_path, monkeypatch):
    path = tmp_path / ".lock"
    opened = []

    def open_and_lose(name: object, *arguments: int) -> int:
        opened.append(os_open(name, *arguments))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    os_open = os.open
    monkeypatch.setattr(module.os, "open", open_and_lose)
    with lock_file(path, "busy"):
        assert len(opened) == 2
        assert os.path.samestat(os.fstat(opened[1]), path.stat())


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch, caplog):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    with lock_file(tmp_path / ".lock", "busy"):
        pass
    assert "the file system has no locks" in caplog.text
