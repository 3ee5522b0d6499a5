"""Activation checkpointing and offload: the same gradients bit for bit, less memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from allocations import Largest
from model_builder import EVEN, TOKENS, assert_same, gradients, small_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.schema import RecomputeConfig
from titanlite.parallel import activation_offload
from titanlite.parallel.activation_checkpoint import MATMULS, apply_ac
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.float8 import Scaled, scaled_matmul


class Saved:
    """Counts the bytes that autograd keeps for the backward."""

    def __init__(self, model: nn.Module) -> None:
        kept: dict[int, int] = {}
        own = {p.data_ptr() for p in model.parameters()}

        def pack(tensor):
            if tensor.data_ptr() not in own:
                kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.loss = model(TOKENS).sum()
        self.bytes = sum(kept.values())


def test_full_recompute_keeps_less_and_every_second_block_lies_between():
    found = []
    for mode, every in (("none", 1), ("full", 2), ("full", 1)):
        model = small_model()
        apply_ac(model, RecomputeConfig(mode=mode, every=every))
        found.append(Saved(model).bytes)
    assert found[0] > 1.3 * found[1] > 1.3 * found[2]


def count_forwards(mode: str) -> dict[str, int]:
    """How often attention and the matmuls run in forward and backward of one block."""
    counts: dict[str, int] = {}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[func.name()] = counts.get(func.name(), 0) + 1
            return func(*args, **(kwargs or {}))

    model = small_model()
    apply_ac(model, RecomputeConfig(mode=mode))
    x = torch.randn(1, 8, 32, requires_grad=True)
    with Counter():
        model.layers["0"](x, model.rope[:8]).sum().backward()
    return counts


def test_selective_recomputes_half_of_the_matmuls_and_no_attention():
    attention, matmul = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::mm"
    none, selective, full = (count_forwards(mode) for mode in ("none", "selective", "full"))
    assert [counts[attention] for counts in (none, selective, full)] == [1, 1, 2]
    # q, k, v, o, w1, w2, w3; the last need not be computed again by an early-stopping recomputation
    forward = 7
    assert none[matmul] == 3 * forward
    assert selective[matmul] - none[matmul] == 3
    assert full[matmul] - none[matmul] >= forward - 1


def test_selective_knows_the_operator_that_multiplies_float8():
    """Another operator would be computed again in each backward, without a message."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    matrix = Scaled(torch.eye(16).to(torch.float8_e4m3fn), torch.ones(()))
    with Seen():
        product = scaled_matmul(matrix, matrix, torch.float32, emulate=False, fast=False)
    assert torch.equal(product, torch.eye(16))
    assert len(set(seen) & set(MATMULS)) == 1, seen


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
