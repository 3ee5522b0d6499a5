"""`--processes 2` of generate and evaluate, as a user starts them: the output of one process,
and one message if something fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from launches import ROOT, alive, environment
from messages import refused
from model_builder import EXPORTED, make_file

from titanlite.runtime.errors import LAUNCHED
from titanlite.tools.cli import processes
from titanlite.tools.cli.main import main
from titanlite.tools.cli.several import is_to_start, join, start

KILLED = (
    "error: the process of rank 1 was killed by SIGKILL\n"
    "error: Linux kills a process that needs more memory than there is; titanlite plan CONFIG says "
    "how much a run needs\n"
)
TWO = ["--processes", "2", "--device", "cpu"]
HALF = "632,384 of them in the process of rank 0 of 2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    make_file(path, EXPORTED["debug"])
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "titanlite", *arguments]


def on_two(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments, *TWO),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.slow
def test_a_prompt_is_continued_as_by_one_process(checkpoint, capsys):
    options = ["generate", str(checkpoint), "--prompt", "def f", "--max-new-tokens", "20"]
    assert main([*options, "--device", "cpu"]) == 0
    result = on_two(*options)
    assert (result.returncode, result.stdout) == (0, capsys.readouterr().out)
    assert result.stderr.count("\n") == 1
    assert HALF in result.stderr


@pytest.mark.slow
def test_the_perplexity_of_a_text_is_that_of_one_process(checkpoint, text_file, tmp_path):
    options = ["evaluate", str(checkpoint), "--perplexity", str(text_file), "--seq-len=64"]
    options += ["--limit=21", "--batch-size=4"]
    assert main([*options, "--device=cpu", f"--json={tmp_path / 'one'}"]) == 0
    result = on_two(*options, f"--json={tmp_path / 'two'}")
    assert result.returncode == 0
    assert HALF in result.stderr
    assert result.stdout.count("loss") == 1
    one = json.loads((tmp_path / "one").read_bytes())["results"]["numbers"]
    two = json.loads((tmp_path / "two").read_bytes())["results"]["numbers"]
    assert one["tokens"] == 21 * 64
    assert two == pytest.approx(one, rel=1e-9)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_message(checkpoint, tmp_path):
    damaged = tmp_path / "damaged.pt"
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 255
    damaged.write_bytes(content)
    result = on_two("generate", str(damaged), "--max-new-tokens", "3")
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "is damaged" in line


def children_of(process: subprocess.Popen) -> list[int]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [line.split() for line in listing.splitlines()]
    return sorted(int(pid) for pid, parent in pairs if int(parent) == process.pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGKILL, 137, KILLED),
        (signal.SIGINT, 130, ""),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_a_killed_process_and_ctrl_c_end_all(checkpoint, number, code, message):
    """While a text is generated that takes minutes."""
    process = subprocess.Popen(
        command("generate", str(checkpoint), "--max-new-tokens=100000", "--temperature=0", *TWO),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert HALF in process.stderr.readline()
        pids = children_of(process)
        assert len(pids) == 2
        target = pids[1] if number == signal.SIGKILL else process.pid
        os.kill(target, number)
        assert process.wait(timeout=90) == code
        assert process.stderr.read() == message
        deadline = time.monotonic() + 30
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("chosen", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_freed_weights_go_back_to_the_system_unless_the_user_has_chosen(monkeypatch, chosen):
    """The variable is glibc's; with it, `keep_freed_memory` does nothing."""
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    given: list[dict[str, str]] = []

    def run(program: list[str], variables: dict[str, str], group: object, signals: object) -> int:
        given.append(variables)
        return 7

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(processes, "Signals", lambda: Namespace(requests=0))
    assert start("generate", ["x"], 2) == 7
    assert ("MALLOC_MMAP_THRESHOLD_" in given[0]) == (not chosen)


@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [(signal.SIGTERM, 75, 143), (signal.SIGUSR1, 75, 138), (signal.SIGTERM, 0, 0)],
)
def test_a_signal_is_the_exit_code_unless_all_had_finished(monkeypatch, number, code, expected):
    signals = Namespace(requests=1, number=number)
    monkeypatch.setattr(processes, "run", lambda *arguments: code)
    monkeypatch.setattr(processes, "Signals", lambda: signals)
    assert start("generate", ["x"], 2) == expected


def test_only_the_first_process_starts_others(monkeypatch):
    monkeypatch.delenv(LAUNCHED, raising=False)
    assert is_to_start(Namespace(processes=2))
    assert not is_to_start(Namespace(processes=1))
    monkeypatch.setenv(LAUNCHED, "[]")
    assert not is_to_start(Namespace(processes=2))


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with refused("--processes 3", "2 CUDA devices", "--device cpu"):
        join(Namespace(processes=3, device="auto"))
