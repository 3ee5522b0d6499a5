"""A process is killed, the run starts again by itself and ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from launches import ROOT, environment, finish, start, wait_for_step, workers
from runs import curve


@pytest.fixture
def saving_run(arguments):
    """A run long enough for a process to be killed in."""
    return [
        *arguments,
        "--training.steps=40",
        "--training.global_batch_size=64",
        "--checkpoint.freq=10",
        "--validation.freq=0",
    ]


_whole: dict = {}


@pytest.fixture
def whole(saving_run, tmp_path):
    """The losses of a run that nothing happens to; once for all tests."""
    if not _whole:
        assert finish(start([*saving_run, "--run.name=whole"], NGPU="2"))[0] == 0
        _whole.update(curve(tmp_path / "whole"))
    return _whole


@pytest.mark.slow
def test_torchrun_restarts_and_the_losses_are_the_same(saving_run, tmp_path, whole):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--max-restarts=2",
        "--nproc-per-node=2",
    ]
    process = subprocess.Popen(
        [
            *command,
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            str(ROOT / "train.py"),
            *saving_run,
        ],
        env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for rank, step in ((0, 13), (1, 23)):  # rank 0 holds the lock of the run's folder
        wait_for_step(tmp_path / "debug", step, process)
        os.kill(workers(process)[rank], signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert "checkpoints/step-20 (saved by" in output
    assert curve(tmp_path / "debug") == whole


@pytest.mark.slow
def test_the_launcher_restarts_as_often_as_it_may(saving_run, tmp_path, whole):
    process = start(saving_run, NGPU="2", MAX_RESTARTS="1")
    wait_for_step(tmp_path / "debug", 13, process)
    os.kill(workers(process)[0], signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert output.count("restarting (1 of 1)") == 1
    assert curve(tmp_path / "debug") == whole


@pytest.mark.slow
def test_the_last_failure_is_the_run_s(saving_run, tmp_path):
    process = start(saving_run, NGPU="1", MAX_RESTARTS="1")
    for step in (3, 13):
        wait_for_step(tmp_path / "debug", step, process)
        deadline = time.monotonic() + 30
        while not (pids := workers(process)) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(pids[0], signal.SIGKILL)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL, output
    assert output.count("restarting") == 1


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_two_nodes_restart_together(saving_run, tmp_path, whole, node):
    # Below the ports that systems give away: the next is used too
    port = str(random.randrange(20_000, 30_000))
    shared = {
        "NGPU": "1",
        "NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "MAX_RESTARTS": "2",
    }
    nodes = [start(saving_run, **shared, NODE_RANK=str(rank)) for rank in range(2)]
    wait_for_step(tmp_path / "debug", 13, nodes[0])
    os.kill(workers(nodes[node])[0], signal.SIGKILL)
    outcomes = [finish(launcher) for launcher in nodes]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert all(output.count("restarting (1 of 2)") == 1 for _, output in outcomes)
    assert curve(tmp_path / "debug") == whole


@pytest.mark.slow
def test_a_launcher_that_waits_for_other_nodes_can_be_stopped(saving_run):
    """Its processes wait in code that runs no signal handlers."""
    port = str(random.randrange(20_000, 30_000))
    process = start(
        saving_run, NGPU="1", NNODES="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    deadline = time.monotonic() + 30
    while not workers(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)  # it imports torch, then waits
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, timeout=5)
    assert code == 75, output
    assert "Traceback" not in output


SRUN = """#!{python}
import os, signal, subprocess, sys
command = sys.argv[1 + sys.argv[1:].index("bash") :]
tasks = [subprocess.Popen(command, env={{**os.environ, "SLURM_NODEID": str(node)}}) for node in range(2)]
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_slurm_script_saves_and_requeues(saving_run, tmp_path, number):
    """The script in docs/multinode.md with stand-ins for srun and scontrol: only SIGUSR1 brings the
    job back.
    """
    (text,) = re.findall(
        r"^```bash\n(#!/bin/bash\n.*?)^```", (ROOT / "docs/multinode.md").read_text(), re.M | re.S
    )
    assert text.count("llama3_8b --run.folder=/shared/outputs") == 1
    files = {
        "job.sh": text.replace("llama3_8b --run.folder=/shared/outputs", ""),
        "srun": SRUN.format(python=sys.executable),
        "scontrol": '#!/bin/sh\n[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> '
        f"{tmp_path}/requeued\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "here"}
    variables = environment(**slurm, SLURM_JOB_ID=str(random.randrange(10_000)))
    process = subprocess.Popen(
        ["bash", str(tmp_path / "job.sh"), *saving_run],
        env=variables | {"PATH": f"{tmp_path}:{variables['PATH']}"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(tmp_path / "debug", 3, process)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 75, output
    if number == signal.SIGUSR1:
        assert (tmp_path / "requeued").read_text() == f"requeue {variables['SLURM_JOB_ID']}\n"
    else:
        assert not (tmp_path / "requeued").exists()
    assert len(list((tmp_path / "debug/checkpoints").glob("step-*"))) == 1
