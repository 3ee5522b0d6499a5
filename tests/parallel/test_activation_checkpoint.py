"""Activation checkpointing: the same gradients bit for bit, less memory, and what is recomputed."""

from __future__ import annotations

import pytest
import torch
from model_builder import TOKENS, assert_same, gradients, small_model
from torch import nn

from titanlite.config.schema import RecomputeConfig
from titanlite.parallel.activation_checkpoint import apply_ac


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recompute_changes_no_bit(mode):
    expected, model = gradients(small_model()), small_model()
    apply_ac(model, RecomputeConfig(mode=mode))
    assert_same(gradients(model), expected, rtol=0, atol=0)


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
    from torch.utils._python_dispatch import TorchDispatchMode

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
