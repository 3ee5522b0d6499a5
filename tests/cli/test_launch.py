"""The launcher's own pieces; whole runs are in tests/e2e/test_run_train.py."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from titanlite.cli import launch


def test_children_by_proc_and_by_ps(monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process.pid in launch._children()
        monkeypatch.setattr(launch, "Path", lambda path: launch.TRAIN.parent / "no such file")
        assert process.pid in launch._children()
    finally:
        process.kill()
        process.wait()


def test_a_signal_before_there_are_processes_ends_the_launcher(monkeypatch):
    monkeypatch.setattr(launch, "_children", list)
    monkeypatch.setattr(launch, "_passed_on", [])
    monkeypatch.setattr(launch.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        launch._pass_on(signal.SIGTERM)
    assert caught.value.code == 143


def test_a_signal_is_passed_on_once_a_second_and_then_kills(monkeypatch):
    sent = []
    monkeypatch.setattr(launch, "_children", lambda: [123])
    monkeypatch.setattr(launch.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(launch, "_passed_on", [])
    launch._pass_on(signal.SIGINT)
    launch._pass_on(signal.SIGTERM)
    assert sent == [(123, signal.SIGTERM)]
    launch._passed_on[0] -= 2
    launch._pass_on(signal.SIGTERM)
    assert sent[1:] == [(123, signal.SIGKILL)]


@pytest.mark.parametrize(
    ("codes", "expected", "message"),
    [
        ({0: 75, 1: 75}, 75, ""),
        ({0: 75, 1: -signal.SIGTERM}, 75, ""),
        ({1: 2}, 2, ""),
        ({0: 124, 1: -signal.SIGKILL}, 124, ""),
        ({0: 1, 1: -signal.SIGKILL}, 137, "rank 1 was killed by SIGKILL"),
        ({0: -signal.SIGTERM, 3: 1}, 1, "rank 3 failed with exit code 1"),
        ({0: -signal.SIGTERM}, 143, "rank 0 was killed by SIGTERM"),
    ],
)
def test_exit_codes_of_the_processes_become_one(codes, expected, message, capsys):
    assert launch._explain(codes) == expected
    error = capsys.readouterr().err
    assert message in error
    assert bool(error) == bool(message)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_counts_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("NNODES", text)
    with pytest.raises(launch.ConfigError, match=r"NNODES = .* in the environment: expected an integer from 1 to"):
        launch._number("NNODES", 1)
    monkeypatch.setenv("NNODES", "")
    assert launch._number("NNODES", 3) == 3


def test_threads_in_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(launch.ConfigError, match=r"OMP_NUM_THREADS = 'many' in the environment: expected an integer"):
        launch.launch(["debug"])


def test_processes_that_a_passed_on_signal_ends_early_were_stopped(monkeypatch, capsys):
    """While they import torch they handle nothing; there is nothing to save yet, and the run may start again."""
    monkeypatch.setattr(launch, "_passed_on", [1.0])
    assert launch._explain({0: -signal.SIGTERM, 1: -signal.SIGTERM}) == 75
    assert launch._explain({0: -signal.SIGTERM, 1: 75}) == 75
    assert capsys.readouterr().err == ""
    assert launch._explain({0: -signal.SIGKILL, 1: -signal.SIGTERM}) == 137
