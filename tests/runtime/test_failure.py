"""How a rank says that it failed: one line after another one has ended, and no error of its own is
shortened.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from titanlite.runtime.errors import EXIT_LOST
from titanlite.runtime.failure import lost_connection
from titanlite.tools.verify.pool import WorkerError


def end_on_rank_1(folder: str) -> None:
    """The others write down what they would print."""
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(9)
    try:
        while True:
            dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        Path(folder, str(dist.get_rank())).write_text(lost_connection(error, __file__))


def test_one_line_after_another_rank_has_ended(pool, tmp_path):
    with pytest.raises(WorkerError):
        pool.run(3, end_on_rank_1, str(tmp_path), grace=30)
    for path in (tmp_path / "0", tmp_path / "2"):
        line = path.read_text()
        assert line.startswith("lost its connection to another rank at line "), line
        assert "peer" in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            dist.DistNetworkError(
                "Failed to recv, got 0 bytes. Connection was likely closed. Did it crash?"
            ),
            "got 0 bytes",
        ),
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:1, remote process exited or there was a network error\ny"
            ),
            "remote process exited",
        ),
        (dist.DistStoreError("wait timeout after 300 s"), ""),
        (
            RuntimeError(
                "[gloo/transport/tcp/x.cc:81] Timed out waiting 1800000ms for recv operation to "
                "complete"
            ),
            "",
        ),
        (
            RuntimeError(
                "[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. socket: Too many "
                "open files"
            ),
            "",
        ),
        (RuntimeError("Broken pipe"), ""),
        (BrokenPipeError("gloo/transport: Broken pipe"), ""),
    ],
)
def test_what_is_a_lost_connection(error, shown):
    line = lost_connection(error, "train.py")
    assert bool(line) == bool(shown)
    assert shown in line
    assert "\n" not in line


@pytest.mark.parametrize("lost", [True, False])
def test_only_a_lost_connection_has_no_stack_trace(monkeypatch, capfd, lost):
    def main(config):
        raise RuntimeError(
            "gloo/transport: Connection closed by peer [127.0.0.1]:1" if lost else "of its own"
        )

    monkeypatch.setattr(train, "main", main)
    assert train.run(["debug"]) == (EXIT_LOST if lost else 1)
    error = capfd.readouterr().err
    assert ("Traceback" in error) != lost
    assert ("of its own" in error) != lost
