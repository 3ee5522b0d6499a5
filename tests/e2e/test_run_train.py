"""./run_train.sh as a user runs it: processes, signals, exit codes, messages."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from launches import ROOT, alive, environment, finish, start, wait_for_step, workers
from messages import assert_mentions
from runs import curve, train_run

import train
from titanlite.distributed.run_folder import lock
from titanlite.runtime.errors import LAUNCHED


@pytest.fixture
def slow_arguments(arguments):
    """A run long enough to be interrupted."""
    return [
        *arguments,
        "--training.steps=20",
        "--training.global_batch_size=32",
        "--checkpoint.freq=10",
        "--validation.freq=0",
    ]


def test_trains_prints_a_sample_and_what_to_try_next(pool, arguments, tmp_path):
    code, output = finish(
        start([*arguments, "--validation.prompts=def", "--validation.prompt_tokens=20"], NGPU="2")
    )
    assert code == 0, output
    assert "step 6/6  loss" in output
    assert "eta 0:00" in output
    assert "a sample" in output
    # The command itself, or python -m titanlite
    assert f"titanlite generate {tmp_path}/debug" in output
    assert "Traceback" not in output
    assert (tmp_path / "debug/log.txt").read_text().count("step 6/6") == 2
    assert f"\n  NGPU=2 ./run_train.sh {tmp_path}/debug --training.steps=12  " in output
    again = [str(tmp_path / "debug"), "--training.steps=8"]
    assert pool.run(1, train_run, again) == [0]
    resumed = f"resumed from {tmp_path}/debug/checkpoints/step-6"
    assert resumed in (tmp_path / "debug/log.txt").read_text()
    assert list(curve(tmp_path / "debug")) == list(range(1, 9))


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        (signal.SIGINT, "1"),
        pytest.param(signal.SIGINT, "2", marks=pytest.mark.slow),
        # below, together with one for each worker
        pytest.param(signal.SIGTERM, "2", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "2", marks=pytest.mark.slow),
    ],
)
def test_signal_to_the_launcher_saves_and_exits_75(
    pool, slow_arguments, tmp_path, number, processes
):
    """And the run is not started again, as it would be after a failure."""
    process = start(slow_arguments, NGPU=processes, MAX_RESTARTS="3")
    wait_for_step(tmp_path / "debug", 3, process)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 75, output
    assert_mentions(output, "stop requested", "the same command")
    assert "Traceback" not in output
    assert "restarting" not in output
    assert pool.run(1, train_run, slow_arguments) == [0]
    assert sorted(curve(tmp_path / "debug")) == list(range(1, 21))


def run_without_data(arguments: list[str], folder: str, errors: str) -> int:
    """The exit code of a rank whose prepared folder is gone; what it prints is in `errors`."""
    os.environ[LAUNCHED] = json.dumps([folder])
    os.dup2(os.open(errors + str(dist.get_rank()), os.O_WRONLY | os.O_CREAT), 2)
    return train.run(arguments)


def test_prepared_data_that_vanishes_before_a_rank_reads_it(pool, arguments, tmp_path):
    assert pool.run(
        1, run_without_data, arguments, str(tmp_path / "gone"), str(tmp_path / "errors")
    ) == [1]
    expected = f"error: rank 0: {tmp_path}/gone/manifest.json: No such file or directory\n"
    assert (tmp_path / "errors0").read_text() == expected


@pytest.mark.slow
def test_killed_run_goes_on_from_its_last_checkpoint_bit_identically(
    pool, slow_arguments, tmp_path
):
    assert pool.run(2, train_run, [*slow_arguments, "--run.name=whole"]) == [0, 0]
    process = start(slow_arguments, NGPU="2")
    wait_for_step(tmp_path / "debug", 13, process)
    os.kill(workers(process)[1], signal.SIGKILL)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL, output
    assert_mentions(output, "error: ", "rank 0 lost its connection", "rank 1", "SIGKILL")
    assert "SIGKILL" in output.splitlines()[-2]  # the last line says that memory can be the reason
    assert "Traceback" not in output
    assert pool.run(2, train_run, slow_arguments) == [0, 0]
    assert (
        f"resumed from {tmp_path}/debug/checkpoints/step-10 "
        in (tmp_path / "debug/log.txt").read_text()
    )
    assert curve(tmp_path / "debug") == curve(tmp_path / "whole")


@pytest.fixture
def endless_arguments(arguments):
    """Steps so long that a run is always within one."""
    return [
        *arguments,
        "--training.global_batch_size=16384",
        "--training.local_batch_size=8",
        "--validation.freq=1",
    ]


@pytest.mark.slow
def test_second_signal_leaves_at_once(endless_arguments, tmp_path):
    process = start(endless_arguments, NGPU="2")
    wait_for_step(tmp_path / "debug", 0, process)
    first, second = workers(process)
    os.kill(second, signal.SIGSTOP)  # so the other waits in a collective, where no handler runs
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, timeout=10)
    assert code == 128 + signal.SIGKILL, output
    assert not list((tmp_path / "debug").glob("checkpoints/*"))
    assert not any(alive(pid) for pid in (first, second))


@pytest.mark.slow
def test_a_signal_to_every_process_at_once_saves(slow_arguments, tmp_path):
    """As Slurm and systemd do it: each worker gets its own, and the one that the launcher passes
    on.
    """
    process = start(slow_arguments, NGPU="2")
    wait_for_step(tmp_path / "debug", 3, process)
    for pid in (*workers(process), process.pid, *workers(process)):
        os.kill(pid, signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert len(list((tmp_path / "debug").glob("checkpoints/step-*"))) == 1


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 3], ids=["that start", "that train"])
@pytest.mark.parametrize("command", [(), (*TORCHRUN, ROOT / "train.py")], ids=["ours", "torchrun"])
def test_workers_leave_when_their_launcher_is_killed(slow_arguments, tmp_path, command, steps):
    arguments = [*slow_arguments, "--training.steps=100000"]
    # With the latter, torchrun does not serve the store by which the processes find each other
    process = start(arguments, *command, NGPU="2", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    deadline = time.monotonic() + 120
    while len(orphans := workers(process)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # Python itself has started
    if steps:
        wait_for_step(tmp_path / "debug", steps, process)
    process.kill()
    while any(alive(pid) for pid in orphans) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in orphans)
    assert bool(list((tmp_path / "debug").glob("checkpoints/step-*"))) == (steps > 0)


def test_a_folder_that_another_run_holds_is_one_error(arguments, tmp_path):
    """That a run holds it as long as it trains: tests/distributed/test_run_folder.py."""
    (tmp_path / "debug").mkdir()
    held = lock(tmp_path / "debug/.lock")
    code, output = finish(start(arguments, NGPU="2"))
    held.close()
    assert code == 2, output
    assert output.count("error:") == 1
    assert_mentions(output, str(tmp_path / "debug"), "another", "run.name")
    assert "Traceback" not in output


@pytest.mark.slow
def test_folder_that_cannot_be_written_is_one_error(arguments, tmp_path):
    """Only the processes find out, and the launcher does not start them again."""
    (tmp_path / "debug").write_text("")
    code, output = finish(start(arguments, MAX_RESTARTS="3"))
    assert code == 2, output
    assert output.count("error:") == 1
    assert_mentions(output, "run.folder, run.name", f"{tmp_path}/debug")
    assert "restarting" not in output


@pytest.mark.slow
def test_a_closed_console_stops_nothing(arguments, tmp_path):
    command = f"{ROOT}/run_train.sh {' '.join(arguments)} 2>&1 | head -1"
    result = subprocess.run(
        ["bash", "-c", command],
        env=environment(NGPU="1"),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.stdout.count("\n") == 1
    assert "Logging error" not in result.stderr
    assert len(curve(tmp_path / "debug")) == 6


def test_mistakes_are_reported_before_torch_is_imported(arguments):
    started = time.monotonic()
    code, output = finish(
        start(["debug", "--trainig.steps=5", "--training.seqlen", "7", "--optimizer.lr=fast"])
    )
    # a fraction of a second, and some room for a busy machine
    assert time.monotonic() - started < 3
    assert code == 2
    assert_mentions(output, "unknown key trainig.steps", "did you mean training.steps?")
    assert_mentions(output, "unknown key training.seqlen", "did you mean training.seq_len?")
    assert_mentions(output, 'optimizer.lr = "fast"', "number")
    assert "Traceback" not in output


def test_impossible_layout_is_one_error(arguments):
    code, output = finish(start([*arguments, "--parallel.dp_shard=3"], NGPU="2"))
    assert code == 2
    assert output.count("error:") == 1
    assert_mentions(output, "parallel.dp_shard = 3", "2 processes")
    code, output = finish(start(arguments, NGPU="two"))
    assert code == 2
    assert_mentions(output, "NGPU = 'two'", "environment", "integer from 1")


def test_help_lists_every_key():
    from titanlite.config.keys import all_keys

    code, output = finish(start(["--help"]))
    assert code == 0
    assert all(f"--{key} " in output for key in all_keys())


def test_independent_problems_are_told_together(arguments):
    wrong = [
        "--model.dim=7",
        "--parallel.dp_shard=3",
        "--data.path=/no/such",
        "--data.tokenizer=/no/such",
        "--checkpoint.initial_load=/no/such",
    ]
    code, output = finish(start([*arguments, *wrong], NGPU="2"))
    assert code == 2
    assert output.count("error:") == 5, output


def two_nodes(*arguments: list[str]) -> list[tuple[int, str]]:
    """Outcomes of two launchers on one machine, one process each, which find each other at
    MASTER_ADDR:MASTER_PORT.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"NGPU": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = [start(own, **shared, NODE_RANK=str(rank)) for rank, own in enumerate(arguments)]
    return [finish(node) for node in nodes]


@pytest.mark.slow  # that two launchers meet: the test below
def test_two_nodes(arguments, tmp_path):
    outcomes = two_nodes(arguments, arguments)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert "CPU x 2" in outcomes[0][1]
    assert len(curve(tmp_path / "debug")) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "fact"),
    [
        ("parallel.tp=2", "configuration"),
        # Slow: tests/distributed compares these facts without launchers.
        pytest.param("optimizer.lr=2", "configuration", marks=pytest.mark.slow),
        pytest.param("run.folder=other", "folder differs", marks=pytest.mark.slow),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(arguments, tmp_path, monkeypatch, option, fact):
    monkeypatch.chdir(tmp_path)
    outcomes = two_nodes(arguments, [*arguments, f"--{option}"])
    assert [code for code, _ in outcomes] == [2, 2], outcomes
    assert_mentions(outcomes[0][1], "rank 1", fact, "rank 0")
    assert "Traceback" not in outcomes[0][1] + outcomes[1][1]
