"""./run_train.sh as a user runs it: processes, signals, exit codes, messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import curve, rows

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    """This environment with the running interpreter first, so run_train.sh takes it and installs nothing."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "LOG_RANK": "0", **variables}


def start(arguments: list[str], **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [ROOT / "run_train.sh", *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = 90) -> tuple[int, str]:
    """(exit code, output). Nothing of the process's session is left, whatever happened."""
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    finally:
        if process.poll() is None:
            process.kill()


def workers(process: subprocess.Popen) -> list[int]:
    """The process ids of the training processes."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in listing.splitlines()]
    return [int(pid) for pid, parent, command in lines if int(parent) == process.pid and "train.py" in command]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Returns when metrics.jsonl has a line of `step` or later."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and any(row["step"] >= step for row in rows(folder)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {finish(process, 1)}")


@pytest.fixture
def slow_arguments(arguments):
    """A run long enough to be interrupted."""
    return [*arguments, "--training.steps=40", "--checkpoint.freq=10", "--validation.freq=0"]


def test_trains_prints_a_sample_and_what_to_try_next(arguments, tmp_path):
    code, output = finish(start([*arguments, "--run.sample_tokens=20"], NGPU="2"))
    assert code == 0, output
    assert "step 6/6  loss" in output
    assert "eta 0:00" in output
    assert "a sample" in output
    assert f"titanlite generate {tmp_path}/debug" in output  # the command itself, or python -m titanlite
    assert "Traceback" not in output
    assert (tmp_path / "debug/log.txt").read_text().count("step 6/6") == 2
    again, text = finish(start([str(tmp_path / "debug/config.toml"), "--training.steps=8"], NGPU="1"))
    assert again == 0, text
    assert f"resumed from {tmp_path}/debug/checkpoints/step-6" in text
    assert list(curve(tmp_path / "debug")) == list(range(1, 9))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_launcher_saves_and_exits_75(slow_arguments, tmp_path, number):
    process = start(slow_arguments, NGPU="2")
    wait_for_step(tmp_path / "debug", 3, process)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 75, output
    assert "asked to stop" in output
    assert "the same command goes on from here" in output
    assert "Traceback" not in output
    code, output = finish(start(slow_arguments, NGPU="1"))
    assert code == 0, output
    assert sorted(curve(tmp_path / "debug")) == list(range(1, 41))


def test_killed_run_goes_on_from_its_last_checkpoint_bit_identically(slow_arguments, tmp_path):
    whole = [*slow_arguments, "--run.name=whole"]
    assert finish(start(whole, NGPU="2"))[0] == 0
    process = start(slow_arguments, NGPU="2")
    wait_for_step(tmp_path / "debug", 13, process)
    os.kill(workers(process)[1], signal.SIGKILL)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL, output
    assert "error: the process of rank 1 was killed by SIGKILL" in output
    code, output = finish(start(slow_arguments, NGPU="2"))
    assert code == 0, output
    assert "resumed from" in output
    assert curve(tmp_path / "debug") == curve(tmp_path / "whole")


def test_second_signal_leaves_at_once(arguments, tmp_path):
    long_steps = ["--training.global_batch_size=16384", "--training.local_batch_size=8", "--validation.freq=1"]
    process = start([*arguments, *long_steps], NGPU="1")
    wait_for_step(tmp_path / "debug", 0, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, timeout=5)
    assert code == 128 + signal.SIGTERM, output
    assert not list((tmp_path / "debug").glob("checkpoints/*"))


def test_mistakes_are_told_before_torch_is_imported(arguments):
    started = time.monotonic()
    code, output = finish(start(["debug", "--trainig.steps=5", "--training.seqlen", "7", "--optimizer.lr=fast"]))
    assert time.monotonic() - started < 2
    assert code == 2
    assert "unknown key trainig.steps; did you mean training.steps?" in output
    assert "unknown key training.seqlen; did you mean training.seq_len?" in output
    assert 'optimizer.lr = "fast": expected a number' in output
    assert "Traceback" not in output


def test_impossible_layout_is_one_error(arguments):
    code, output = finish(start([*arguments, "--parallel.dp_shard=3"], NGPU="2"))
    assert code == 2
    assert output.count("error:") == 1
    assert "parallel.dp_replicate = 1 times parallel.dp_shard = 3 is 3, but there are 2 processes" in output
    code, output = finish(start(arguments, NGPU="two"))
    assert code == 2
    assert "NGPU = 'two' in the environment: expected an integer, at least 1" in output


def test_help_lists_every_key():
    from titanlite.configure import all_keys

    started = time.monotonic()
    code, output = finish(start(["--help"]))
    assert code == 0
    assert time.monotonic() - started < 2  # a second, and some room for a busy machine
    assert all(f"--{key} " in output for key in all_keys())


def test_two_nodes(arguments, tmp_path):
    """Two launchers on one machine, one process each, find each other at MASTER_ADDR and MASTER_PORT."""
    shared = {"NGPU": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
    nodes = [start(arguments, **shared, NODE_RANK=str(rank)) for rank in (0, 1)]
    outcomes = [finish(node) for node in nodes]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert "CPU x 2" in outcomes[0][1]
    assert len(curve(tmp_path / "debug")) == 6
