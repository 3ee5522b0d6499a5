"""The launcher's own pieces; whole runs are in tests/e2e/test_run_train.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from messages import assert_mentions, refused

from titanlite.cli import launch


def test_children_by_proc_and_by_ps(monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process.pid in launch._children()
        monkeypatch.setattr(launch, "Path", lambda path: launch.TRAIN.parent / "no such file")
        assert process.pid in launch._children()
    finally:
        process.kill()
        process.wait()


def test_a_signal_before_there_are_processes_ends_the_launcher(monkeypatch):
    monkeypatch.setattr(launch, "_children", list)
    monkeypatch.setattr(launch, "_forwarded", [])
    monkeypatch.setattr(launch.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        launch._forward(signal.SIGTERM)
    assert caught.value.code == 143


def test_a_signal_is_forwarded_once_a_second_and_then_kills(monkeypatch):
    sent = []
    monkeypatch.setattr(launch, "_children", lambda: [123])
    monkeypatch.setattr(launch.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(launch, "_forwarded", [])
    launch._forward(signal.SIGINT)
    launch._forward(signal.SIGTERM)
    assert sent == [(123, signal.SIGTERM)]
    launch._forwarded[0] -= 2
    launch._forward(signal.SIGTERM)
    assert sent[1:] == [(123, signal.SIGKILL)]


@pytest.mark.parametrize(
    ("codes", "expected", "message"),
    [
        ({0: 75, 1: 75}, 75, ()),
        ({0: 75, 1: -signal.SIGTERM}, 75, ()),
        ({1: 2}, 2, ()),
        ({0: 124, 1: -signal.SIGKILL}, 124, ()),
        ({0: 1, 1: -signal.SIGKILL}, 137, ("rank 1", "SIGKILL")),
        ({0: -signal.SIGTERM, 3: 1}, 1, ("rank 3", "exit code 1")),
        ({0: -signal.SIGTERM}, 143, ("rank 0", "SIGTERM")),
    ],
)
def test_exit_codes_of_the_processes_become_one(codes, expected, message, capsys):
    assert launch._explain(codes) == expected
    error = capsys.readouterr().err
    assert_mentions(error, *message)
    assert bool(error) == bool(message)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_counts_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("NNODES", text)
    with refused(f"NNODES = '{text}'", "environment", "integer from 1 to"):
        launch._number("NNODES", 1)
    monkeypatch.setenv("NNODES", "")
    assert launch._number("NNODES", 3) == 3


def test_threads_in_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with refused("OMP_NUM_THREADS = 'many'", "environment", "integer"):
        launch.launch(["debug"])


def test_processes_that_a_forwarded_signal_ends_early_were_stopped(monkeypatch, capsys):
    """While they import torch they handle nothing; there is nothing to save yet, and the run may start again."""
    monkeypatch.setattr(launch, "_forwarded", [1.0])
    assert launch._explain({0: -signal.SIGTERM, 1: -signal.SIGTERM}) == 75
    assert launch._explain({0: -signal.SIGTERM, 1: 75}) == 75
    assert capsys.readouterr().err == ""
    assert launch._explain({0: -signal.SIGKILL, 1: -signal.SIGTERM}) == 137


# Usable cores, read from made-up files of Linux


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of so many threads, some of which share a core, and a control group."""
    monkeypatch.setattr(launch, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(launch, "OWN_GROUPS", tmp_path / "groups/own")
    monkeypatch.setattr(launch, "TOPOLOGY", tmp_path / "cpu")

    def make(allowed: set[int], cores_of: list[str], files: dict[str, str]) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
        for siblings in cores_of:
            first, _, last = siblings.partition("-")
            for thread in range(int(first), int(last or first) + 1):
                folder = tmp_path / f"cpu/cpu{thread}/topology"
                folder.mkdir(parents=True)
                (folder / "thread_siblings_list").write_text(siblings + "\n")
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return launch.usable_cores()

    return make


@pytest.mark.parametrize(
    ("allowed", "cores_of", "files", "expected"),
    [
        ({0, 1, 2, 3}, ["0", "1", "2", "3"], {}, 4),
        ({0, 1, 2, 3}, ["0-1", "2-3"], {}, 2),
        ({0, 1}, ["0-1", "2-3"], {}, 1),
        ({1, 2}, ["0-1", "2-3"], {}, 2),
        (set(range(64)), [], {}, 64),  # no topology: a container that hides it
        (set(range(64)), [], {"cpu.max": "200000 100000\n"}, 2),
        (set(range(64)), [], {"cpu.max": "150000 100000\n"}, 2),
        (set(range(64)), [], {"cpu.max": "10000 100000\n"}, 1),
        (set(range(64)), [], {"cpu.max": "max 100000\n"}, 64),
        (set(range(64)), [], {"cpu.max": "damaged"}, 64),
        ({0}, [], {"cpu.max": "800000 100000\n"}, 1),
        (set(range(8)), [], {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        (set(range(8)), [], {"own": "0::/a/b\n", "a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        (set(range(8)), [], {"own": "0::/a\n", "a/cpu.max": "300000 100000", "cpu.max": "200000 100000"}, 2),
        (set(range(8)), [], {"own": "0::/host/only\n", "cpu.max": "400000 100000"}, 4),
        (set(range(8)), [], {"own": "0::/../b\n", "b/cpu.max": "400000 100000"}, 8),
        (
            set(range(8)),
            [],
            {
                "own": "4:cpu,cpuacct:/a\n1:name=systemd:/b\n",
                "cpu/a/cpu.cfs_quota_us": "200000\n",
                "cpu/a/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (set(range(8)), [], {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_cores_not_threads_and_no_more_than_allowed(machine, allowed, cores_of, files, expected):
    assert machine(allowed, cores_of, files) == expected


def test_this_machine_has_some():
    assert 1 <= launch.usable_cores() <= (os.cpu_count() or 1)
