"""Cores and memory, read from made-up files of Linux."""

from __future__ import annotations

import math
import os

import pytest

from titanlite.runtime import limits


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of so many threads, some of which share a core, and a control group."""
    monkeypatch.setattr(limits, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "groups/own")
    monkeypatch.setattr(limits, "TOPOLOGY", tmp_path / "cpu")

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
        return limits.usable_cores()

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
    assert 1 <= limits.usable_cores() <= (os.cpu_count() or 1)


GIB = 1 << 30
AVAILABLE = "MemTotal: 99 kB\nMemAvailable:   4194304 kB\nSwapFree: 1048576 kB\n"  # 4 and 1 GiB


@pytest.mark.parametrize(
    ("available", "files", "expected"),
    [
        (AVAILABLE, {}, 5 * GIB),
        (AVAILABLE, {"memory.max": "max\n"}, 5 * GIB),
        (AVAILABLE, {"own": "0::/a/b\n", "a/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        (AVAILABLE, {"own": "4:memory:/a\n", "memory/a/memory.limit_in_bytes": f"{GIB}"}, GIB),
        (AVAILABLE, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 5 * GIB),
        ("MemTotal: 99 kB\n", {"memory.max": "1\n"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_memory_of_the_control_group_or_available(
    machine, monkeypatch, tmp_path, available, files, expected
):
    machine({0}, [], files)
    monkeypatch.setattr(limits, "MEMORY", tmp_path / "meminfo")
    if available:
        (tmp_path / "meminfo").write_text(available)
    assert limits.usable_memory() == expected
