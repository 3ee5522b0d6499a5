"""The launcher's own pieces; whole runs are in tests/e2e/test_run_train.py."""

from __future__ import annotations

import pytest
from messages import refused

from titanlite.tools.cli import launch


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_counts_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("NNODES", text)
    with refused(f"NNODES = '{text}'", "environment", "integer from 1 to"):
        launch.environment_number("NNODES", 1)
    monkeypatch.setenv("NNODES", "")
    assert launch.environment_number("NNODES", 3) == 3


def test_threads_in_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with refused("OMP_NUM_THREADS = 'many'", "environment", "integer"):
        launch.launch(["debug"])


def test_several_nodes_need_an_address(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with refused("MASTER_ADDR is not set", "NNODES = 2"):
        launch.launch(["debug"])


def test_a_device_that_is_not_there_is_found_before_any_data_is_prepared(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(launch, "prepare", None)
    with refused("run.device = cuda", "no such device", "auto, cpu"):
        launch.launch(["debug", "--run.device=cuda"])
