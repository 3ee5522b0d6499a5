"""The watchdog without a run: marking phases, and a rank that hangs before it closes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from titanlite.config.schema import CommConfig
from titanlite.distributed.watchdog import PERIOD, Watchdog
from titanlite.runtime.phases import Phase, mark_phase
from titanlite.tools.verify.pool import WorkerError

CPU = torch.device("cpu")


def mark_phases(folder: Path) -> list[tuple[int, str, float, str]]:
    mark_phase(Phase.UPDATE)  # nothing runs
    progress = SimpleNamespace(step=0)
    config = CommConfig(timeout_seconds=300, step_timeout_seconds=100)
    watchdog = Watchdog(config, folder, progress, CPU, compiling_steps={7})
    found = []
    for phase, step in (
        (Phase.LOAD, 0),
        (Phase.READ_DATA, 5),
        (Phase.BACKWARD, 5),  # for the times only
        (Phase.UPDATE, 6),
        (Phase.SAVE, 6),
        (Phase.READ_DATA, 7),
        (Phase.READ_DATA, 8),
    ):
        progress.step = step
        mark_phase(phase)
        marked = watchdog.marked
        found.append((marked.progress, marked.phase, marked.limit, marked.key))
    watchdog.close()
    mark_phase(Phase.UPDATE)  # nothing runs
    return found


def test_a_phase_has_the_limit_of_its_kind(pool, tmp_path):
    long, short = (300, "comm.timeout_seconds"), (100, "comm.step_timeout_seconds")
    expected = [
        (1, '"loading"', *long),
        (2, '"reading data" of step 5', *long),
        (2, '"reading data" of step 5', *long),
        (3, '"update" of step 6', *short),
        (4, '"saving" after step 6', *long),
        (5, '"reading data" of step 7', *long),
        (6, '"reading data" of step 8', *short),
    ]
    assert pool.run(2, mark_phases, tmp_path) == [expected] * 2
    assert not (tmp_path / "hang").exists()


def hang_before_closing(folder: Path) -> None:
    watchdog = Watchdog(CommConfig(timeout_seconds=1), folder, SimpleNamespace(step=0), CPU)
    mark_phase(Phase.DELETE_CHECKPOINTS)
    time.sleep(60 * dist.get_rank())
    watchdog.close()


@pytest.mark.slow
def test_a_rank_that_hangs_before_it_closes_is_named(pool, tmp_path):
    with pytest.raises(WorkerError):
        pool.run(2, hang_before_closing, tmp_path)
    for rank in range(2):
        report = (tmp_path / f"hang/rank-{rank}.txt").read_text()
        assert report.startswith("rank 1 (host ")
        assert 'in "deleting old checkpoints" (comm.timeout_seconds = 1)' in report
    assert "hang_before_closing" in (tmp_path / "hang/rank-1.txt").read_text()


def stands_still(folder: Path, device_type: str, phase: Phase) -> float:
    """Seconds that this process seems to stand still after it has computed for 1.5 s."""
    device = torch.device(device_type)
    watchdog = Watchdog(CommConfig(), folder, SimpleNamespace(step=0), device)
    mark_phase(phase)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
    still = watchdog.own.still
    watchdog.close()
    return still


@pytest.mark.parametrize(
    ("device_type", "phase", "progress"),
    [("cpu", Phase.LOAD, True), ("cuda", Phase.SAVE, True), ("cuda", Phase.LOAD, False)],
)
def test_cpu_time_is_progress_unless_a_gpu_may_be_waited_for(
    pool, tmp_path, device_type, phase, progress
):
    (still,) = pool.run(1, stands_still, tmp_path, device_type, phase)
    assert (still < 0.6) == progress, still


def errors_of_threads(folder: Path) -> list[str]:
    errors: list[str] = []
    threading.excepthook = lambda arguments: errors.append(repr(arguments.exc_value))
    watchdog = Watchdog(CommConfig(), folder, SimpleNamespace(step=0), CPU)
    time.sleep(3 * PERIOD)
    watchdog.close()
    return errors


@pytest.mark.parametrize("processes", [1, 2])
def test_heartbeats_are_exchanged_without_an_error(pool, tmp_path, processes):
    """Also by a process that has no others to read."""
    assert pool.run(processes, errors_of_threads, tmp_path) == [[]] * processes
