"""What the techniques do to an untouched model: nothing that can be seen from outside."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_builder import build_stages, full, small_model
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config.load import load_config
from titanlite.config.schema import Config, ConfigError, RecomputeConfig, TrainingConfig
from titanlite.distributed.mesh import LOSS_AXES, Mesh, data_rank, sum_over
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.compile import apply_compile, missing_for_inductor
from titanlite.parallel.layout import AXES
from titanlite.parallel.parallelize import compute_dtypes, reason_blocks_not_compiled, resolve_auto

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
        apply_ac(block, RecomputeConfig(mode=mode), index)
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
            apply_ac(block, RecomputeConfig(mode=mode, every=every), index)
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
    apply_ac(block, RecomputeConfig(mode=mode), 0)
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
        if mode != "full":
            apply_ac(block, RecomputeConfig(mode=mode), index)
        apply_compile(block, "aot_eager")
        if mode == "full":
            apply_ac(block, RecomputeConfig(mode=mode), index)
    assert_same(gradients(model), expected, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "three blocks, one graph"


def sharded_gradients(parallel: dict) -> tuple[dict, dict]:
    """Full weights and gradients of a model sharded over all ranks, each rank with a row of its own."""
    stages = build_stages(parallel)
    model, rank, size = stages.parts[0], dist.get_rank(), dist.get_world_size()
    tokens = TOKENS.repeat(2, 1)[rank : rank + 1]
    stages.forward_backward(tokens[:, :-1], tokens[:, 1:], torch.tensor(11 * size))
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
        assert_same(weights, {name: p.detach() for name, p in plain.named_parameters()}, rtol=0, atol=0)
        assert_same(found, {name: p.grad for name, p in plain.named_parameters()}, rtol=1e-4, atol=1e-6)


def rope_dtype_in_a_block() -> list[torch.dtype]:
    """dtypes that a bf16 block gets: its input, and the RoPE table."""
    model = build_stages({"dp_shard": 1}, compute_dtype="bfloat16").parts[0]
    seen = []
    model.layers["1"].register_forward_pre_hook(lambda module, args: seen.extend([args[0].dtype, args[1].dtype]))
    model(TOKENS)
    return seen


def test_bf16_compute_leaves_the_rope_table_in_fp32(pool):
    assert pool.run(1, rope_dtype_in_a_block) == [[torch.bfloat16, torch.float32]]


def mesh_facts(degrees: dict[str, int]) -> tuple:
    mesh = Mesh("cpu", {axis: degrees.get(axis, 1) for axis in AXES}, 77)
    groups = [mesh[axis].get_group() for axis in (*AXES, "dp_shard_cp")]
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    assert timeouts == {77}
    ranks = tuple(mesh[axis].get_local_rank() for axis in (*AXES, "dp_shard_cp"))
    return ranks, data_rank(mesh), int(sum_over(torch.tensor(10 ** dist.get_rank()), mesh, LOSS_AXES))


@pytest.mark.parametrize(
    ("degrees", "ranks", "data", "total"),
    [  # of the last process: its place on each axis and on dp_shard_cp; (rank, size) among readers; sum over LOSS_AXES
        ({"dp_shard": 4}, (0, 0, 3, 0, 0, 3), (3, 4), 1111),
        ({"dp_replicate": 2, "dp_shard": 2}, (0, 1, 1, 0, 0, 1), (3, 4), 1111),
        ({"dp_replicate": 4}, (0, 3, 0, 0, 0, 0), (3, 4), 1111),
        ({"dp_shard": 2, "cp": 2}, (0, 0, 1, 1, 0, 3), (1, 2), 1111),
        ({"pp": 2, "tp": 2}, (1, 0, 0, 0, 1, 0), (0, 1), 1010),  # the two of a tp line hold the same loss
        ({"cp": 2, "tp": 2}, (0, 0, 0, 1, 1, 1), (0, 1), 1010),
    ],
)
def test_mesh_axes_ranks_and_sums(pool, degrees, ranks, data, total):
    assert pool.run(4, mesh_facts, degrees)[3] == (ranks, data, total)


@pytest.mark.parametrize(
    ("given", "dim", "device", "native", "expected"),
    [
        ("auto", 128, "cuda", False, torch.bfloat16),
        ("auto", 512, "cpu", True, torch.bfloat16),
        ("auto", 128, "cpu", True, torch.float32),  # its casts cost more than its products gain
        ("auto", 512, "cpu", False, torch.float32),
        ("float32", 512, "cpu", True, torch.float32),
        ("float32", 512, "cuda", True, torch.float32),
        ("bfloat16", 128, "cpu", False, torch.bfloat16),
    ],
)
def test_dtype_of_computation(monkeypatch, given, dim, device, native, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    config = Config(training=TrainingConfig(compute_dtype=given, reduce_dtype="float32"))
    assert compute_dtypes(config, dim, device) == (expected, torch.float32)
    assert resolve_auto(config, dim, device).training.compute_dtype == str(expected).removeprefix("torch.")


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is one, and looks anew for what the compiler needs."""

    def pretend(capability: tuple[int, int] = (9, 0), triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr("titanlite.parallel.compile.has_triton_package", lambda: triton)
        missing_for_inductor.cache_clear()

    yield pretend
    missing_for_inductor.cache_clear()


@pytest.mark.parametrize(
    ("options", "dim", "device", "pp", "expected"),
    [
        ([], 128, "cuda", 1, True),
        ([], 128, "cpu", 1, False),
        ([], 512, "cpu", 1, sys.platform == "linux"),
        (["--compile.enabled"], 128, "cpu", 1, True),
        (["--compile.enabled=false"], 2048, "cuda", 1, False),
        (["--recompute.mode=memory_budget"], 128, "cpu", 1, True),
        (["--parallel.pp_schedule=ZBVZeroBubble"], 2048, "cuda", 2, False),
        (["--parallel.pp_schedule=ZBVZeroBubble"], 512, "cpu", 2, False),
        (["--parallel.pp_schedule=ZBVZeroBubble"], 2048, "cuda", 1, True),
        (["--parallel.pp_schedule=Interleaved1F1B"], 2048, "cuda", 2, True),
        (["--parallel.cp_method=ring"], 2048, "cuda", 1, False),
    ],
)
def test_what_auto_compiles(gpu, options, dim, device, pp, expected):
    gpu()
    mesh = SimpleNamespace(device_type=device, degrees={"pp": pp, "cp": 2})
    assert (reason_blocks_not_compiled(load_config(["cpu_25m", *options]), dim, mesh) == "") is expected


@pytest.fixture
def compiler(gpu, monkeypatch):
    """Sets the compilers for C and C++, on a machine with a GPU."""

    def use(program: str, **of_the_gpu: Any) -> None:
        for name in ("CC", "CXX"):
            monkeypatch.setenv(name, program)
        gpu(**of_the_gpu)

    return use


ON_CUDA, ON_CPU = (SimpleNamespace(device_type=name, degrees=dict.fromkeys(AXES, 1)) for name in ("cuda", "cpu"))


def test_without_a_compiler_auto_is_off_and_true_an_error(compiler, tmp_path):
    compiler("no-such-program")
    assert (
        reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA) == "CC = 'no-such-program' is no program"
    )
    assert reason_blocks_not_compiled(load_config(["llama3_1b", "--compile.backend=aot_eager"]), 2048, ON_CUDA) == ""
    with pytest.raises(ConfigError, match=r"compile\.enabled = true needs a compiler: CC .*compile\.enabled = false"):
        reason_blocks_not_compiled(load_config(["llama3_1b", "--compile.enabled"]), 2048, ON_CUDA)
    with pytest.raises(ConfigError, match=r"memory_budget needs a compiler: CXX .* or another recompute\.mode"):
        reason_blocks_not_compiled(load_config(["cpu_25m", "--recompute.mode=memory_budget"]), 512, ON_CPU)
    compiler("")
    assert reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA) == "CC = '' is no program"
    works, fails = tmp_path / "works", tmp_path / "fails"
    for path, code in ((works, 0), (fails, 1)):
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)
    compiler(str(fails))
    assert "finds no Python.h" in reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA)
    compiler(str(works))
    assert reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA) == ""
    compiler(str(works), capability=(6, 1))
    assert "below 7.0" in reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA)
    compiler(str(works), triton=False)
    assert reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA).startswith("no Triton")


def ask_where_one_has_no_compiler() -> tuple[str, str]:
    """What both processes are told for auto, and for true."""
    os.environ["CXX"] = "g++" if dist.get_rank() == 0 else "no-such-program"
    missing_for_inductor.cache_clear()
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | {"tp": 2}, 77)
    try:
        reason_blocks_not_compiled(load_config(["cpu_25m", "--compile.enabled"]), 512, mesh)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return reason_blocks_not_compiled(load_config(["cpu_25m"]), 512, mesh), refused


def test_all_processes_compile_or_none(pool):
    for auto, refused in pool.run(2, ask_where_one_has_no_compiler):
        assert auto.startswith("rank ")
        assert "no-such-program" in auto
        assert "compile.enabled = true needs a compiler: rank " in refused
