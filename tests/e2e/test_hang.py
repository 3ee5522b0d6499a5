"""A process that hangs is named with what it was doing, and the run ends; one that is slow is left
alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launches import alive, environment, finish, start, wait_for_step, workers
from messages import assert_mentions
from runs import curve, train_run

ROOT = Path(__file__).resolve().parents[2]
# Since then gloo does, in the flight recorder
RECORDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
TIMEOUT = 4
# Seconds beyond the time-out: heartbeats, the report and the exit, on a busy machine. Less than the 60
# that a process sleeps.
PATIENCE = 20


@pytest.fixture
def long_run(arguments):
    return [
        *arguments,
        "--training.steps=100000",
        "--validation.freq=0",
        f"--comm.step_timeout_seconds={TIMEOUT}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])  # rank 0 serves the store
def test_a_frozen_process_is_named_and_killed(long_run, tmp_path, rank):
    process = start(long_run, NGPU="2")
    wait_for_step(tmp_path / "debug", 5, process)
    time.sleep(2)  # what is known of a frozen process is up to a second old
    pids = workers(process)
    os.kill(pids[rank], signal.SIGSTOP)
    frozen = time.monotonic()
    code, output = finish(process)
    assert time.monotonic() - frozen < TIMEOUT + PATIENCE
    assert code == 124, output
    last = output.splitlines()[-1]
    assert last.startswith(f"error: rank {rank} "), output
    assert_mentions(last, f"pid {pids[rank]}", '" of step ', "comm.step_timeout_seconds")
    assert output.count("error:") == 1
    assert "Traceback" not in output
    assert not any(alive(pid) for pid in pids)
    report = (tmp_path / f"debug/hang/rank-{1 - rank}.txt").read_text()
    assert "train.py" in report
    assert "all_reduce" in report.partition("flight recorder:")[2] or not RECORDS


SLEEPER = """
import sys, time
import torch.distributed as dist
import train
from titanlite.{module} import {owner}

original, calls = {owner}.{method}, iter(range(1, 1_000_000))


def sometimes_slow(*arguments, **options):
    if next(calls) == {call} and dist.get_rank() in {ranks}:
        {wait}
    return original(*arguments, **options)


{owner}.{method} = sometimes_slow
train.process_group.finish(train.run(sys.argv[1:]))
"""


def run_with(tmp_path, arguments, processes=2, **patch) -> tuple[int, str, float]:
    """train.py under plain torchrun with one method patched: (exit code, output, seconds since
    `wait` began).
    """
    script, started = tmp_path / "patched.py", tmp_path / "began"
    patch["wait"] = f"open({str(started)!r}, 'w').close(); {patch['wait']}"
    script.write_text(SLEEPER.format(**patch))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    result = subprocess.run(
        [*launcher, str(script), *arguments],
        env=environment(PYTHONPATH=str(ROOT), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stdout + result.stderr, time.time() - started.stat().st_mtime


# Where one of two processes waits in step 4
READS = {"module": "data.order", "owner": "Samples", "method": "pick", "call": 13}
SAVES = {"module": "checkpoint.async_save", "owner": "AsyncSaver", "method": "save", "call": 1}
VALIDATES = {"module": "parallel.stages", "owner": "Stages", "method": "evaluate", "call": 2}


@pytest.mark.slow  # naming a rank that sleeps: tests/distributed/test_watchdog.py
def test_a_process_that_sleeps_is_named_with_its_line(long_run, tmp_path):
    code, output, seconds = run_with(tmp_path, long_run, **READS, ranks=(1,), wait="time.sleep(60)")
    assert code != 0
    assert seconds < TIMEOUT + PATIENCE
    (line,) = (line for line in output.splitlines() if line.startswith("error:"))
    assert line.startswith("error: rank 1 ")
    assert_mentions(line, "titanlite/data/stream.py:", '"reading data" of step 4')
    assert "in sometimes_slow" in (tmp_path / "debug/hang/rank-1.txt").read_text()
    assert (tmp_path / "debug/hang/rank-0.txt").exists()


@pytest.mark.slow
def test_saving_has_the_longer_time_out(arguments, tmp_path):
    waits = [
        "--comm.step_timeout_seconds=1",
        f"--comm.timeout_seconds={TIMEOUT}",
        "--checkpoint.freq=3",
    ]
    code, output, _ = run_with(
        tmp_path, [*arguments, *waits], **SAVES, ranks=(0, 1), wait="time.sleep(60)"
    )
    assert code != 0
    assert_mentions(output, "error: ", "rank 0 ", '"saving" after step 3', "comm.timeout_seconds")


@pytest.mark.slow
def test_a_process_alone_is_watched_too(long_run, tmp_path):
    code, output, seconds = run_with(
        tmp_path, long_run, 1, **READS, ranks=(0,), wait="time.sleep(60)"
    )
    assert code != 0
    assert seconds < TIMEOUT + PATIENCE
    assert "error: rank 0 " in output


BUSY = "end = time.time() + 5\n        while time.time() < end: pass"


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    [
        {**SAVES, "ranks": (0, 1), "wait": "time.sleep(5)"},
        {**VALIDATES, "ranks": (1,), "wait": "time.sleep(5)"},
        {**READS, "ranks": (1,), "wait": BUSY},
    ],
    ids=["saving", "validating", "computing"],
)
def test_a_slow_run_is_left_alone(arguments, tmp_path, patch):
    code, output, _ = run_with(tmp_path, [*arguments, "--comm.step_timeout_seconds=2"], **patch)
    assert code == 0, output
    assert len(curve(tmp_path / "debug")) == 6


@pytest.mark.slow
def test_a_run_stopped_as_a_whole_goes_on(long_run, tmp_path):
    """As a laptop that sleeps, or a scheduler that suspends a job."""
    process = start([*long_run, "--comm.step_timeout_seconds=2"], NGPU="2")
    wait_for_step(tmp_path / "debug", 5, process)
    pids = workers(process)
    for number, pause in ((signal.SIGSTOP, 6), (signal.SIGCONT, 0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(pause)
    wait_for_step(tmp_path / "debug", max(curve(tmp_path / "debug")) + 5, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert "error:" not in output


def test_a_short_time_out_does_not_hurry_a_healthy_run(pool, arguments, tmp_path):
    assert pool.run(2, train_run, [*arguments, "--comm.step_timeout_seconds=3"]) == [0, 0]
    assert not (tmp_path / "debug/hang").exists()
