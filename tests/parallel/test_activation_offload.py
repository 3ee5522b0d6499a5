"""Inputs of blocks in CPU memory: the same gradients bit for bit, and nothing else kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from allocations import Largest
from model_builder import EVEN, TOKENS, assert_same, gradients, small_model

from titanlite.config.schema import RecomputeConfig
from titanlite.parallel import activation_offload
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.compile import apply_compile


def offloaded(every: int = 1, compiled: bool = False) -> torch.nn.Module:
    model, config = small_model(), RecomputeConfig(mode="full", offload=True, every=every)
    if compiled:
        torch._dynamo.reset()
        apply_compile(model, "aot_eager", config)
    apply_ac(model, config)
    return model


@pytest.mark.parametrize(("every", "compiled"), [(1, False), (2, False), (1, True)])
def test_gradients_do_not_change(monkeypatch, every, compiled):
    copied = []
    original = activation_offload.to_cpu
    monkeypatch.setattr(
        activation_offload, "to_cpu", lambda tensor: copied.append(tensor.shape) or original(tensor)
    )
    found = gradients(offloaded(every, compiled))
    assert copied == [(2, 11, 32)] * (3 if every == 1 else 2), (
        "one tensor of each block: not weights, not the table"
    )
    # The compiler rounds differently, with and without offloading
    tolerance = 1e-5 if compiled else 0
    assert_same(found, gradients(small_model()), rtol=tolerance, atol=tolerance)


def test_inputs_are_freed_in_the_forward(monkeypatch):
    """Copies are arrays here, which do not count as memory of the device."""
    monkeypatch.setattr(activation_offload, "to_cpu", lambda tensor: (tensor.numpy().copy(), None))
    monkeypatch.setattr(
        activation_offload, "to_device", lambda kept, device: torch.from_numpy(kept[0])
    )
    found = []
    for offload in (False, True):
        model = small_model(config=EVEN)
        apply_ac(model, RecomputeConfig(mode="full", offload=offload))
        with Largest() as memory:
            loss = model(TOKENS).sum()
            found.append(memory.now)
            loss.backward()
    inputs = EVEN.num_layers * TOKENS.numel() * EVEN.dim * np.dtype("float32").itemsize
    assert found[0] - found[1] == inputs
