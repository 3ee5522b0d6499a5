"""The watchdog without a run: marking phases, and a rank that hangs before it closes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from titanlite.config.schema import CommConfig
from titanlite.distributed.watchdog import PERIOD, Watchdog, mark_phase
from titanlite.tools.verify.pool import WorkerError


def mark_phases(folder: Path) -> list[tuple[int, str, float, str]]:
    mark_phase("nothing runs", in_step=True)
    now = [0]
    config = CommConfig(timeout_seconds=300, step_timeout_seconds=100)
    watchdog = Watchdog(config, folder, lambda: now[0], computes_here=True)
    found = []
    for name, step, in_step in (
        ("loading", 0, False),
        ("first", 5, True),
        ("next", 6, True),
        ("saving", 6, False),
    ):
        now[0] = step
        mark_phase(name, in_step)
        marked = watchdog._marked
        found.append((marked.progress, marked.phase, marked.limit, marked.key))
    watchdog.close()
    mark_phase("nothing runs", in_step=True)
    return found


def test_a_phase_has_the_limit_of_its_kind(pool, tmp_path):
    long, short = (300, "comm.timeout_seconds"), (100, "comm.step_timeout_seconds")
    expected = [
        (1, '"loading"', *long),
        (2, '"first" of step 5', *long),
        (3, '"next" of step 6', *short),
        (4, '"saving" after step 6', *long),
    ]
    assert pool.run(2, mark_phases, tmp_path) == [expected] * 2
    assert not (tmp_path / "hang").exists()


def hang_before_closing(folder: Path) -> None:
    watchdog = Watchdog(CommConfig(timeout_seconds=2), folder, lambda: 0, computes_here=True)
    mark_phase("the last steps")
    time.sleep(60 * dist.get_rank())
    watchdog.close()


def test_a_rank_that_hangs_before_it_closes_is_named(pool, tmp_path):
    with pytest.raises(WorkerError):
        pool.run(2, hang_before_closing, tmp_path)
    for rank in range(2):
        report = (tmp_path / f"hang/rank-{rank}.txt").read_text()
        assert report.startswith("rank 1 (host ")
        assert 'in "the last steps" (comm.timeout_seconds = 2)' in report
    assert "hang_before_closing" in (tmp_path / "hang/rank-1.txt").read_text()


def stands_still(folder: Path, computes_here: bool, on_host: bool) -> float:
    """Seconds that this process seems to stand still after it has computed for 1.5 s."""
    watchdog = Watchdog(CommConfig(), folder, lambda: 0, computes_here)
    mark_phase("computing", on_host=on_host)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
    still = watchdog._own.still
    watchdog.close()
    return still


@pytest.mark.parametrize(
    ("computes_here", "on_host"), [(True, False), (False, True), (False, False)]
)
def test_cpu_time_is_progress_unless_a_gpu_may_be_waited_for(
    pool, tmp_path, computes_here, on_host
):
    (still,) = pool.run(1, stands_still, tmp_path, computes_here, on_host)
    assert (still < 0.6) == (computes_here or on_host), still


def errors_of_threads(folder: Path) -> list[str]:
    errors: list[str] = []
    threading.excepthook = lambda arguments: errors.append(repr(arguments.exc_value))
    watchdog = Watchdog(CommConfig(), folder, lambda: 0, computes_here=True)
    time.sleep(3 * PERIOD)
    watchdog.close()
    return errors


@pytest.mark.parametrize("processes", [1, 2])
def test_heartbeats_are_exchanged_without_an_error(pool, tmp_path, processes):
    """Also by a process that has no others to read."""
    assert pool.run(processes, errors_of_threads, tmp_path) == [[]] * processes
