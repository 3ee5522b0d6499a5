"""The worker pool: results in the order of ranks, the earliest error, and workers that die or hang."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import time
from multiprocessing.synchronize import SemLock
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from messages import assert_mentions

from titanlite.tools.verify.pool import WorkerError


def rank_and_sum(start: int) -> tuple[int, int]:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def test_results_come_in_the_order_of_ranks(pool):
    assert pool.run(3, rank_and_sum, 10) == [(0, 33), (1, 33), (2, 33)]


def fail_on_rank_1() -> None:
    """The other rank fails later, since the first one has left."""
    if dist.get_rank() == 1:
        raise RuntimeError("the cause")
    time.sleep(0.3)
    raise RuntimeError("a consequence")


def test_the_earliest_error_is_raised(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(2, fail_on_rank_1)
    assert_mentions(str(caught.value), "rank 1:", "the cause", "fail_on_rank_1")


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_worker_that_dies_ends_the_call(pool):
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 died"):
        pool.run(2, die_on_rank_1)
    assert time.monotonic() - started < 30


def crash_on_rank_1() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    time.sleep(60)


def test_a_crash_in_c_is_reported_with_its_stack(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(2, crash_on_rank_1)
    assert_mentions(str(caught.value), "rank 1 died", "Segmentation fault", "crash_on_rank_1")


def write_pid_and_hang(folder: str) -> None:
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(60)


def test_a_call_out_of_time_leaves_no_process(pool, tmp_path):
    with pytest.raises(WorkerError) as caught:
        pool.run(2, write_pid_and_hang, str(tmp_path), timeout=2)
    assert_mentions(str(caught.value), "0, 1", "2", "in write_pid_and_hang")
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def semaphores_of_a_progress_bar() -> int:
    tqdm = pytest.importorskip("tqdm").tqdm
    with mock.patch.object(
        SemLock, "__init__", autospec=True, side_effect=SemLock.__init__
    ) as made:
        list(tqdm([0], disable=False, file=io.StringIO()))
    return made.call_count


def test_workers_leave_no_semaphores(pool):
    """The progress bars that torch's compiler draws leave none behind."""
    pytest.importorskip("tqdm")
    assert pool.run(1, semaphores_of_a_progress_bar) == [0]


def leave_a_mark() -> bool:
    """Whether no earlier call left one in this process."""
    first = not hasattr(torch, "mark_of_a_test")
    torch.mark_of_a_test = True
    return first


def test_each_call_has_new_workers(pool):
    assert pool.run(2, leave_a_mark) == pool.run(2, leave_a_mark) == [True, True]
