"""The traffic that the headers of the techniques state: bytes per block, process and local batch,
by formula.

What is measured: each collective that a process calls, in forward and backward, those inside
DTensor's operators included. A call counts the size of its fp32 tensors times the part that an
ideal ring of n processes sends of them:
(n - 1)/n, and twice that for an all-reduce. A message to another stage counts once. Bytes on a wire
are not measured, and neither are bf16, `cp_method = ulysses`: gloo runs
other collectives for them, or none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_builder import EVEN, build_stages
from torch.distributed.tensor import DTensor, Partial, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.schema import RecomputeConfig
from titanlite.data.rows import Batch

B, S, D, K, DH = 2, 16, EVEN.dim, EVEN.num_kv_heads, EVEN.head_dim
BYTES = 4  # fp32
BLOCK = 2 * D * D + 2 * D * K * DH + 3 * D * EVEN.ffn_dim + 2 * D  # parameters


class Traffic(TorchDispatchMode):
    """Adds up, by kind, the bytes that this process sends in collectives of `size` processes, each
    an ideal ring.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "send"), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first, so the collectives inside it are seen
        name = (
            func.name()
            .replace("_allgather_base", "all_gather")
            .replace("_reduce_scatter_base", "reduce_scatter")
        )
        name = name.replace("allreduce", "all_reduce")
        kind = next(
            (kind for kind in self.sent if f"::{kind}" in name or f"::_{kind}" in name), None
        )
        if kind and "c10d" in name:
            tensors = [a for a in args if isinstance(a, torch.Tensor)] or args[0]
            whole = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            # Its argument is the part, not the result
            if kind == "all_gather" and len(tensors) == 1:
                whole *= self.size
            times = {"all_reduce": 2, "send": self.size / (self.size - 1)}.get(kind, 1)
            self.sent[kind] += round(whole * times * (self.size - 1) / self.size)
        return func(*args, **(kwargs or {}))


def sent(
    parallel: dict, num_layers: int, size: int, mode: str = "none", local_batches: int = 1
) -> dict[str, int]:
    recompute = RecomputeConfig(mode=mode)
    stages = build_stages(parallel, 0, replace(EVEN, num_layers=num_layers), recompute)
    tokens = torch.randint(104, (B, S + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the first run of a pipeline sends additional messages
        with Traffic(size) as traffic:
            for number in range(1, local_batches + 1):
                batch = Batch(tokens[:, :-1], tokens[:, 1:])
                targets = torch.tensor(B * S)
                stages.forward_backward(batch, targets, last=number == local_batches)
    return traffic.sent


def sent_per_block(parallel: dict, size: int, mode: str, local_batches: int) -> dict[str, int]:
    """The traffic of a model with three blocks minus that of a model with two."""
    more = sent(parallel, 3, size, mode, local_batches)
    less = sent(parallel, 2, size, mode, local_batches)
    return {kind: more[kind] - less[kind] for kind in more if more[kind] != less[kind]}


def per_block(
    pool, parallel: dict, size: int, mode: str = "none", local_batches: int = 1
) -> dict[str, int]:
    """The traffic of a block on the first process; `mode`: of recomputation."""
    traffic, *_ = pool.run(size, sent_per_block, parallel, size, mode, local_batches)
    return traffic


def sent_inside_an_operator() -> dict[str, int]:
    terms = DTensor.from_local(torch.ones(10), init_device_mesh("cpu", (2,)), [Partial()])
    with Traffic(2) as traffic:
        terms.relu()  # needs the sum of both ranks' terms, which DTensor makes by an all-reduce
    return traffic.sent


def test_collectives_inside_operators_are_seen(pool):
    for traffic in pool.run(2, sent_inside_an_operator):
        assert {kind: count for kind, count in traffic.items() if count} == {
            "all_reduce": 2 * 10 * BYTES // 2
        }


def part(size: int) -> float:
    return (size - 1) / size


@pytest.mark.parametrize(
    ("size", "mode"), [pytest.param(2, "none", marks=pytest.mark.slow), (4, "none"), (2, "full")]
)
def test_sharding(pool, size, mode):
    """Recomputation sends nothing more: it runs while the backward has the weights gathered."""
    found = per_block(pool, {"dp_shard": size, "reshard_after_forward": "always"}, size, mode)
    assert found == {
        "all_gather": 2 * BYTES * BLOCK * part(size),
        "reduce_scatter": BYTES * BLOCK * part(size),
    }


def test_sharding_that_keeps_the_weights(pool):
    """They are gathered once for two local batches."""
    found = per_block(pool, {"dp_shard": 2, "reshard_after_forward": "never"}, 2, local_batches=2)
    assert found == {
        "all_gather": BYTES * BLOCK * part(2),
        "reduce_scatter": 2 * BYTES * BLOCK * part(2),
    }


def test_replicas(pool):
    assert per_block(pool, {"dp_replicate": 2}, 2) == {"all_reduce": 2 * BYTES * BLOCK * part(2)}


@pytest.mark.parametrize(
    ("mode", "all_gathers", "reduce_scatters"),
    [
        # Slow: `full` sends what the others do and more
        pytest.param("none", 4, 4, marks=pytest.mark.slow),
        pytest.param("selective", 6, 4, marks=pytest.mark.slow),
        ("full", 6, 5),
    ],
)
def test_tensor_parallel(pool, mode, all_gathers, reduce_scatters):
    """Recomputation repeats the forward's two all-gathers, and `full` the first of its two
    reduce-scatters: nothing in the backward needs the result of the second.
    """
    found = per_block(pool, {"tp": 2}, 2, mode)
    one = BYTES * B * S * D * part(2)
    norms = 2 * 2 * BYTES * D * part(2)  # an all-reduce of each norm's gradient
    assert found == {
        "all_gather": all_gathers * one,
        "reduce_scatter": reduce_scatters * one,
        "all_reduce": norms,
    }


@pytest.mark.slow
def test_ends_of_the_model_under_tensor_parallel(pool):
    """Half the traffic of a block, and three all-reduces of a number per token in the loss."""
    (whole, *_), block = pool.run(2, sent, {"tp": 2}, 2, 2), per_block(pool, {"tp": 2}, 2)
    ends = {kind: count - 2 * block[kind] for kind, count in whole.items() if count}
    one = BYTES * B * S * D * part(2)
    norm, loss = 2 * BYTES * D * part(2), 3 * 2 * BYTES * B * S * part(2)
    assert ends == {"all_gather": 2 * one, "reduce_scatter": 2 * one, "all_reduce": norm + loss}


@pytest.mark.parametrize(
    ("size", "mode", "all_gathers"),
    [
        # Slow: `full` sends what `none` does and more
        pytest.param(2, "none", 1, marks=pytest.mark.slow),
        pytest.param(4, "none", 1, marks=pytest.mark.slow),
        # Slow: `full` gathers them again too
        pytest.param(2, "selective", 2, marks=pytest.mark.slow),
        (2, "full", 2),
    ],
)
def test_context_parallel(pool, size, mode, all_gathers):
    """In addition to the traffic of weights sharded over the same processes.

    Recomputation gathers keys and values again.
    """
    sharding = per_block(pool, {"dp_shard": size}, size, mode)
    found = per_block(pool, {"cp": size}, size, mode)
    assert {kind: found[kind] - sharding[kind] for kind in found} == {
        "all_gather": all_gathers * 2 * BYTES * B * S * K * DH * part(size),
        "reduce_scatter": 2 * BYTES * B * S * K * DH * part(size),
    }


def test_pipeline_parallel(pool):
    """One boundary between stages: hidden states forward, their gradients back, whatever the number
    of blocks.
    """
    assert per_block(pool, {"pp": 2}, 2) == {}
    for traffic in pool.run(2, sent, {"pp": 2}, 2, 2):
        assert traffic["send"] == BYTES * B * S * D
