"""What the headers of the techniques say is sent, is sent: bytes per block, process and microbatch, by formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_builder import EVEN, build_stages
from torch.utils._python_dispatch import TorchDispatchMode

B, S, D, K, DH = 2, 16, EVEN.dim, EVEN.num_kv_heads, EVEN.head_dim
BYTES = 4  # fp32
BLOCK = 2 * D * D + 2 * D * K * DH + 3 * D * EVEN.ffn_dim + 2 * D  # parameters


class Traffic(TorchDispatchMode):
    """Adds up, by kind, the bytes that this process sends in collectives of `size` processes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.sent = size, dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "send"), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().replace("_allgather_base", "all_gather").replace("_reduce_scatter_base", "reduce_scatter")
        name = name.replace("allreduce", "all_reduce")
        kind = next((kind for kind in self.sent if f"::{kind}" in name or f"::_{kind}" in name), None)
        if kind and "c10d" in name:
            tensors = [a for a in args if isinstance(a, torch.Tensor)] or args[0]
            whole = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            if kind == "all_gather" and len(tensors) == 1:  # its argument is the part, not the result
                whole *= self.size
            times = {"all_reduce": 2, "send": self.size / (self.size - 1)}.get(kind, 1)
            self.sent[kind] += round(whole * times * (self.size - 1) / self.size)
        return func(*args, **(kwargs or {}))


def sent(parallel: dict, num_layers: int, size: int) -> dict[str, int]:
    stages = build_stages(parallel, llama=replace(EVEN, num_layers=num_layers))
    tokens = torch.randint(104, (B, S + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the first time a pipeline's processes greet each other
        with Traffic(size) as traffic:
            stages.forward_backward(tokens[:, :-1], tokens[:, 1:], torch.tensor(B * S))
    return traffic.sent


def per_block(pool, parallel: dict, size: int) -> dict[str, int]:
    """The traffic of a model with one more block than another, less that one's."""
    (more, *_), (less, *_) = (pool.run(size, sent, parallel, num_layers, size) for num_layers in (3, 2))
    return {kind: more[kind] - less[kind] for kind in more if more[kind] != less[kind]}


def part(size: int) -> float:
    return (size - 1) / size


@pytest.mark.parametrize("size", [2, 4])
def test_sharding(pool, size):
    found = per_block(pool, {"dp_shard": size, "reshard_after_forward": "always"}, size)
    assert found == {"all_gather": 2 * BYTES * BLOCK * part(size), "reduce_scatter": BYTES * BLOCK * part(size)}


def test_sharding_that_keeps_the_weights(pool):
    found = per_block(pool, {"dp_shard": 2, "reshard_after_forward": "never"}, 2)
    assert found == {"all_gather": BYTES * BLOCK * part(2), "reduce_scatter": BYTES * BLOCK * part(2)}


def test_replicas(pool):
    assert per_block(pool, {"dp_replicate": 2}, 2) == {"all_reduce": 2 * BYTES * BLOCK * part(2)}


def test_tensor_parallel(pool):
    found = per_block(pool, {"tp": 2}, 2)
    one = BYTES * B * S * D * part(2)
    norms = 2 * 2 * BYTES * D * part(2)  # an all-reduce of each norm's gradient
    assert found == {"all_gather": 4 * one, "reduce_scatter": 4 * one, "all_reduce": norms}


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel(pool, size):
    """Beyond what sharding the weights over the same processes sends."""
    sharding = per_block(pool, {"dp_shard": size}, size)
    found = per_block(pool, {"cp": size}, size)
    assert {kind: found[kind] - sharding[kind] for kind in found} == {
        "all_gather": 2 * BYTES * B * S * K * DH * part(size),
        "reduce_scatter": 2 * BYTES * B * S * K * DH * part(size),
    }


def test_pipeline_parallel(pool):
    """One boundary: the hidden states one way, their gradients the other, however many blocks."""
    assert per_block(pool, {"pp": 2}, 2) == {}
    for traffic in pool.run(2, sent, {"pp": 2}, 2, 2):
        assert traffic["send"] == BYTES * B * S * D
