"""Staging: what is copied, and the pieces that go through pinned buffers, on a GPU that is
pretended.
"""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from titanlite.checkpoint import staging
from titanlite.checkpoint.staging import BUFFERS, Staging

CPU = torch.device("cpu")


@pytest.mark.parametrize("keep", [False, True])
def test_memory_is_kept_only_on_request(keep):
    weight, copier = torch.arange(6.0).view(2, 3), Staging(CPU, keep)
    first = copier.copy({"model": {"w": weight}}, True, None)["model"]["w"]
    assert torch.equal(first, weight)
    weight += 1
    second = copier.copy({"model": {"w": weight}}, True, None)["model"]["w"]
    assert torch.equal(second, weight)
    assert (first.data_ptr() == second.data_ptr()) == keep


def test_what_is_on_the_host_is_copied_only_on_request():
    weight = torch.ones(3)
    assert Staging(CPU, False).copy({"model": {"w": weight}}, False, None)["model"]["w"] is weight


def test_a_tensor_with_gaps_is_refused():
    """Bytes in memory order would be those of another tensor."""
    with pytest.raises(RuntimeError, match="view"):
        Staging(CPU, False).copy({"model": {"w": torch.ones(4, 4).t()[:3]}}, True, None)


@pytest.fixture
def gpu(monkeypatch):
    """Tensors count as those of a GPU, and what is copied without blocking arrives when its stream
    is synchronised.

    Returns the streams.
    """
    streams, current, copy = [], threading.local(), torch.Tensor.copy_

    class Stream:
        def __init__(self, device):
            self.device, self.thread, self.pending, self.waited = (
                device,
                threading.get_ident(),
                [],
                None,
            )
            streams.append(self)

        def wait_event(self, event):
            self.waited = event

        def synchronize(self):
            assert threading.get_ident() == self.thread, "each thread has its own stream"
            time.sleep(0.001)
            for target, source in self.pending:
                copy(target, source)
            self.pending.clear()

    @contextlib.contextmanager
    def use(stream):
        current.stream = stream
        yield
        current.stream = None

    def copy_later(target, source, non_blocking=False):
        assert non_blocking
        assert current.stream.waited == "ready", "the state may not be complete yet"
        current.stream.pending.append((target, source))

    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(staging, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(
        staging, "_pinned", lambda size: torch.full((size,), 255, dtype=torch.uint8)
    )
    monkeypatch.setattr(staging, "PIECE", 1000)
    return streams


def test_pieces_go_through_a_few_buffers(gpu):
    """Sizes that the pieces do not divide, a scalar, nothing at all, another dtype; two times."""
    copier = Staging(torch.device("cuda", 1), True)
    state = {
        "model": {
            "a": torch.randn(123, 45),
            "b": torch.randn(1000).bfloat16(),
            "none": torch.zeros(0, 4),
        },
        "optimizer": {"a.step": torch.tensor(7.0), "a.exp_avg": torch.randn(999)},
    }
    for _ in range(2):
        copies = copier.copy(state, True, "ready")
        for part, values in state.items():
            for name, value in values.items():
                assert torch.equal(copies[part][name], value), name
                assert copies[part][name].data_ptr() != value.data_ptr() or not value.numel()
                value += 1
    assert 1 <= len(gpu) <= BUFFERS
    assert {stream.device for stream in gpu} == {torch.device("cuda", 1)}


def test_a_copy_that_fails_is_an_error(gpu, monkeypatch):
    def no_memory(size):
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(staging, "_pinned", no_memory)
    with pytest.raises(RuntimeError, match="no pinned memory"):
        Staging(torch.device("cuda"), False).copy({"model": {"a": torch.ones(5)}}, True, "ready")
