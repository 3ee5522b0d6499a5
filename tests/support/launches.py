"""Starts ./run_train.sh, waits for its steps, and leaves none of its processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from runs import rows

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    """This environment with the running interpreter first: run_train.sh takes it and installs nothing."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "LOG_RANK": "0", **variables}


def start(arguments: list[str], *command: str | Path, **variables: str) -> subprocess.Popen:
    """Starts run_train.sh, or another command."""
    return subprocess.Popen(
        [*(command or [ROOT / "run_train.sh"]), *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = 180) -> tuple[int, str]:
    """Ends the whole session of the process; returns its exit code and output."""
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    finally:
        if process.poll() is None:
            for pid in workers(process):  # they live in sessions of their own
                os.kill(pid, signal.SIGKILL)
            process.kill()


def workers(process: subprocess.Popen) -> list[int]:
    """The process ids of the training processes."""
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split(None, 2) for line in listing.splitlines()]
    return [
        int(pid)
        for pid, parent, command in lines
        if int(parent) == process.pid and "train.py" in command
    ]


def alive(pid: int) -> bool:
    """Whether the process runs. One that has ended may stay in the table until init reads its exit
    code.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Waits until metrics.jsonl has a line of `step` or later."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and any(row["step"] >= step for row in rows(folder)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {finish(process, 1)}")
