"""The launcher's own pieces; whole runs are in tests/e2e/test_run_train.py."""

from __future__ import annotations

import os

import pytest
from messages import refused

from titanlite.tools.cli import launch


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_counts_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("NNODES", text)
    with refused(f"NNODES = '{text}'", "environment", "integer from 1 to"):
        launch.environment_number("NNODES", 1)
    monkeypatch.setenv("NNODES", "")
    assert launch.environment_number("NNODES", 3) == 3


def test_threads_in_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with refused("OMP_NUM_THREADS = 'many'", "environment", "integer"):
        launch.launch(["debug"])


def test_several_nodes_need_an_address(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with refused("MASTER_ADDR is not set", "NNODES = 2"):
        launch.launch(["debug"])


def test_a_device_that_is_not_there_is_found_before_any_data_is_prepared(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(launch, "prepare", None)
    with refused("run.device = cuda", "no such device", "auto, cpu"):
        launch.launch(["debug", "--run.device=cuda"])


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
        (
            set(range(8)),
            [],
            {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            set(range(8)),
            [],
            {"own": "0::/a/b\n", "a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"},
            3,
        ),
        (
            set(range(8)),
            [],
            {"own": "0::/a\n", "a/cpu.max": "300000 100000", "cpu.max": "200000 100000"},
            2,
        ),
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
        (
            set(range(8)),
            [],
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            8,
        ),
    ],
)
def test_cores_not_threads_and_no_more_than_allowed(machine, allowed, cores_of, files, expected):
    assert machine(allowed, cores_of, files) == expected


def test_this_machine_has_some():
    assert 1 <= launch.usable_cores() <= (os.cpu_count() or 1)
