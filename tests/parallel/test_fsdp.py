"""Sharded parameters: equal to the plain model in every layout, and cast where they should be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from model_builder import EVEN, TOKENS, assert_same, build_stages, full, small_model
from torch.distributed.tensor import DTensor

from titanlite.data.rows import Batch
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.parallelize import assign_shard


def sharded_gradients(parallel: dict) -> tuple[dict, dict]:
    """Full weights and gradients of a model sharded over all ranks that gives each rank a different
    row.
    """
    stages = build_stages(parallel)
    model, rank, size = stages.model_parts[0], dist.get_rank(), dist.get_world_size()
    tokens = TOKENS.repeat(2, 1)[rank : rank + 1]
    stages.forward_backward(Batch(tokens[:, :-1], tokens[:, 1:]), torch.tensor(11 * size))
    assert all(isinstance(p, DTensor) == (size > 1) for p in model.parameters())
    weights = {name: full(p).detach() for name, p in model.named_parameters()}
    return weights, {name: full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (1, {"dp_shard": 1}),
        (2, {"dp_shard": 2}),
        (3, {"dp_shard": 3}),  # 101 rows and 32 columns do not divide by 3
        (4, {"dp_shard": 4, "reshard_after_forward": "never"}),
        (4, {"dp_replicate": 2, "dp_shard": 2}),
        (4, {"dp_replicate": 4, "dp_shard": 1}),
    ],
)
def test_weights_are_bit_equal_and_gradients_equal_in_every_layout(pool, world_size, parallel):
    plain = small_model()
    tokens = TOKENS.repeat(2, 1)[:world_size]
    (cross_entropy_sum(plain(tokens[:, :-1]), tokens[:, 1:]) / (11 * world_size)).backward()
    for weights, found in pool.run(world_size, sharded_gradients, parallel):
        assert_same(
            weights, {name: p.detach() for name, p in plain.named_parameters()}, rtol=0, atol=0
        )
        assert_same(
            found, {name: p.grad for name, p in plain.named_parameters()}, rtol=1e-4, atol=1e-6
        )


def rows_of_wq() -> tuple[str, list[int]]:
    """The placements of a wq of 32 rows, and the rows that this rank holds."""
    model = build_stages({"dp_shard": 2, "tp": 2}, llama=EVEN).model_parts[0]
    weight = model.layers["0"].attention.wq.weight
    numbered = torch.arange(32.0)[:, None].expand(32, 32)
    assign_shard(weight.detach(), numbered)
    return str(weight.placements), weight.to_local()[:, 0].int().tolist()


def test_with_tp_the_rows_of_a_rank_are_a_part_of_its_half_of_tp(pool):
    """tp cuts first: FSDP divides what tp leaves to a rank, although dp_shard is the outer axis."""
    placements, rows = zip(*pool.run(4, rows_of_wq), strict=True)
    assert set(placements) == {"(_StridedShard(dim=0, sf=2), Shard(dim=0))"}
    starts = [0, 16, 8, 24]  # of ranks 0 to 3: (dp_shard, tp) = (0, 0), (0, 1), (1, 0), (1, 1)
    assert list(rows) == [list(range(start, start + 8)) for start in starts]


def rope_dtype_in_a_block() -> list[torch.dtype]:
    """dtypes that a bf16 block gets: its input, and the RoPE table."""
    model = build_stages({"dp_shard": 1}, compute_dtype="bfloat16").model_parts[0]
    seen = []
    model.layers["1"].register_forward_pre_hook(
        lambda module, args: seen.extend([args[0].dtype, args[1].dtype])
    )
    model(TOKENS)
    return seen


def test_bf16_compute_leaves_the_rope_table_in_fp32(pool):
    assert pool.run(1, rope_dtype_in_a_block) == [[torch.bfloat16, torch.float32]]
