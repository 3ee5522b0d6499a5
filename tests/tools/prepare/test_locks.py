"""One process alone, or several that share, with locks of the file system and without."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import threading

import pytest
from messages import refused

from titanlite.tools.prepare import locks
from titanlite.tools.prepare.locks import hold


@pytest.fixture(params=["locks", errno.ENOSYS, errno.ENOLCK])
def folder(request, tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(request.param, os.strerror(request.param))

    if request.param != "locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "POLL", 0.01)
    return tmp_path / "data [1]"


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_a_process_alone_excludes_others(folder, first, second):
    with hold(folder, first), refused(str(folder), "works in this folder"), hold(folder, second):
        pass
    with hold(folder, second):
        pass
    assert not os.listdir(folder.parent)


def test_shared_processes_admit_each_other(folder):
    with hold(folder, shared=True):
        with hold(folder, shared=True):
            pass
        with refused("works in this folder"), hold(folder):
            pass
    assert not os.listdir(folder.parent)


def test_processes_that_wait_come_one_after_the_other(folder):
    inside, most = [], []

    def work():
        with hold(folder, wait=lambda text: None):
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4
    assert not os.listdir(folder.parent)


def test_a_process_that_was_killed_is_forgotten_on_its_computer(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "POLL", 0.01)
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = tmp_path / f".data.lock-alone-{ended.pid}-00ff-{socket.gethostname()}"
    here.touch()
    with hold(tmp_path / "data"):
        assert not here.exists()
    there = tmp_path / f".data.lock-alone-{ended.pid}-00ff-another-host"
    there.touch()
    with refused(str(ended.pid), "another-host", f"delete {there}"), hold(tmp_path / "data"):
        pass
