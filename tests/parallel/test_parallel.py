"""What the techniques do to an untouched model: nothing that can be seen from outside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from model_builder import SMALL, small_model
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config import Compile, Parallel, Recompute
from titanlite.model.llama import Llama
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.mesh import AXES, build_mesh, data_rank, sum_over_data
from titanlite.parallel.recompute import apply_recompute
from titanlite.parallel.shard import apply_shard, assign_shard, reduce_gradients_when

TOKENS = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module, tokens: torch.Tensor = TOKENS) -> dict[str, torch.Tensor]:
    (cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found: dict, expected: dict, **tolerance) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recompute_changes_no_bit(mode):
    expected, model = gradients(small_model()), small_model()
    for index, block in enumerate(model.layers.values()):
        apply_recompute(block, Recompute(mode=mode), index)
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
        for index, block in enumerate(model.layers.values()):
            apply_recompute(block, Recompute(mode=mode, every=every), index)
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
    block = model.layers["0"]
    apply_recompute(block, Recompute(mode=mode), 0)
    x = torch.randn(1, 8, 32, requires_grad=True)
    with Counter():
        block(x, model.rope[:8]).sum().backward()
    return counts


def test_selective_recomputes_half_of_the_matmuls_and_no_attention():
    attention, matmul = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::mm"
    none, selective, full = (count_forwards(mode) for mode in ("none", "selective", "full"))
    assert [counts[attention] for counts in (none, selective, full)] == [1, 1, 2]
    forward = 7  # q, k, v, o, w1, w2, w3; the last need not be computed again by an early-stopping recomputation
    assert none[matmul] == 3 * forward
    assert selective[matmul] - none[matmul] == 3
    assert full[matmul] - none[matmul] >= forward - 1


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_blocks_give_the_same_gradients_and_compile_once(mode):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, model = gradients(small_model()), small_model()
    for index, block in enumerate(model.layers.values()):
        apply_recompute(block, Recompute(mode=mode), index)
        apply_compile(block, Compile(enabled=True, backend="aot_eager"))
    assert_same(gradients(model), expected, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "three blocks, one graph"


def sharded(parallel: dict, dtype=torch.float32) -> Llama:
    """A small model sharded over all ranks."""
    mesh = build_mesh(
        "cpu", dp_replicate=parallel.pop("dp_replicate", 1), dp_shard=parallel.pop("dp_shard"), timeout_seconds=77
    )
    with torch.device("meta"):
        model = Llama(SMALL, 16)
    apply_shard(model, [[block] for block in model.layers.values()], Parallel(**parallel), mesh, dtype, torch.float32)
    model.to_empty(device="cpu")
    model.init_weights(0, assign_shard)
    return model


def sharded_gradients(parallel: dict) -> tuple[dict, dict]:
    """Full weights and gradients of a model sharded over all ranks, each rank with a row of its own."""
    model = sharded(dict(parallel))
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = TOKENS.repeat(2, 1)[rank : rank + 1]
    reduce_gradients_when(model, True, Parallel())
    (cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / (11 * size)).backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return weights, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


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
        assert_same(weights, {name: p.detach() for name, p in plain.named_parameters()}, rtol=0, atol=0)
        assert_same(found, {name: p.grad for name, p in plain.named_parameters()}, rtol=1e-4, atol=1e-6)


def rope_dtype_in_a_block() -> list[torch.dtype]:
    """dtypes that a bf16 block gets: its input, and the RoPE table."""
    model = sharded({"dp_shard": 1}, torch.bfloat16)
    seen = []
    model.layers["1"].register_forward_pre_hook(lambda module, args: seen.extend([args[0].dtype, args[1].dtype]))
    model(TOKENS)
    return seen


def test_bf16_compute_leaves_the_rope_table_in_fp32(pool):
    assert pool.run(1, rope_dtype_in_a_block) == [[torch.bfloat16, torch.float32]]


def mesh_facts(dp_replicate: int, dp_shard: int) -> tuple:
    mesh = build_mesh("cpu", dp_replicate=dp_replicate, dp_shard=dp_shard, timeout_seconds=77)
    groups = [mesh.get_group(axis) for axis in AXES]
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    assert timeouts == {77}
    return mesh.mesh_dim_names, data_rank(mesh), int(sum_over_data(torch.tensor(10 ** dist.get_rank()), mesh))


def test_mesh_axes_ranks_and_sums(pool):
    for degrees in ((1, 4), (2, 2), (4, 1)):
        for rank, (names, data, total) in enumerate(pool.run(4, mesh_facts, *degrees)):
            assert names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
            assert data == (rank, 4)
            assert total == 1111
