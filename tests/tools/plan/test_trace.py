"""A step is counted on pretended processes as it is on real ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.distributed.mesh import Mesh
from titanlite.model import moe
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import AXES, num_processes
from titanlite.tools.plan.estimate import estimate
from titanlite.tools.plan.trace import AS_IT_IS, Numbers, count_step, trace, trace_rank

SMALL = [
    "debug",
    "--run.device=cpu",
    "--model.dim=32",
    "--model.num_layers=4",
    "--model.num_heads=4",
    "--model.num_kv_heads=2",
    "--model.ffn_dim=64",
    "--model.vocab_size=128",
    "--training.seq_len=16",
    "--training.local_batch_size=2",
    "--training.global_batch_size=16",
    "--training.compute_dtype=float32",
    "--compile.enabled=false",
]

EXPERTS = ["model.num_experts=8", "model.experts_per_token=2", "model.expert_ffn_dim=48"]

QUICK = [["pp=2", "dp_shard=2", "model.embeddings=tied"]]
SLOW = [
    ["pp=2", "dp_shard=2", "recompute.mode=selective"],
    ["dp_shard=2"],
    ["dp_shard=2", "tp=2", "recompute.mode=selective"],
    ["pp=2", "dp_shard=2", "tp=2"],
    ["dp_replicate=2", "cp=2", "loss.num_chunks=2", "recompute.mode=full"],
    ["dp_replicate=2"],
    ["dp_replicate=2", "dp_shard=2", "training.local_batch_size=1"],
    ["tp=2"],
    ["tp=4", "recompute.mode=full", "model.num_kv_heads=4"],
    ["cp=2"],
    ["cp=2", "tp=2", "recompute.mode=selective"],
    ["pp=2", "parallel.pp_schedule=GPipe"],
    ["pp=4", "training.local_batch_size=8"],
    ["pp=2", "parallel.pp_schedule=Interleaved1F1B"],
    ["pp=2", "parallel.pp_schedule=LoopedBFS"],
    ["pp=2", "parallel.pp_schedule=InterleavedZeroBubble"],
    ["pp=2", "parallel.pp_schedule=ZBVZeroBubble"],
    ["pp=2", "parallel.pp_schedule=DualPipeV", "training.local_batch_size=4"],
    ["dp_shard=4", "model.embeddings=tied", "loss.num_chunks=4"],
    ["dp_shard=2", "parallel.reshard_after_forward=never"],
    ["dp_shard=4", "parallel.reshard_after_forward=2"],
    ["dp_shard=2", "parallel.reduce_every_microbatch=false"],
    ["dp_shard=2", "training.compute_dtype=bfloat16", "training.reduce_dtype=float32"],
    ["dp_shard=2", "training.param_dtype=bfloat16", "optimizer.state_dtype=bfloat16"],
    ["dp_shard=2", "lora.rank=4", "recompute.mode=selective"],
    ["dp_shard=2", "model.num_layers=4", "training.frozen=tok_embeddings.*, layers.[01].*"],
    ["dp_shard=2", "optimizer.name=muon"],
    ["dp_shard=2", "data.document_mask=true", "ema.decay=0.9"],
    ["pp=2", "dp_shard=2", "cp=2", "recompute.mode=full"],
    ["pp=2", "dp_shard=2", "parallel.reshard_after_forward=always"],
    [
        *("pp=2", "dp_shard=2", "parallel.pp_schedule=Interleaved1F1B"),
        "parallel.reshard_after_forward=always",
    ],
    [*EXPERTS, "dp_shard=2", "recompute.mode=selective"],
    [*EXPERTS, "dp_shard=2", "ep=2"],
    [*EXPERTS, "dp_shard=4", "ep=2", "recompute.mode=full"],
    [*EXPERTS, "dp_shard=2", "cp=2", "ep=4", "recompute.mode=selective"],
    [*EXPERTS, "dp_shard=2", "tp=2", "ep=2", "recompute.mode=full"],
    [*EXPERTS, "dp_replicate=2", "dp_shard=2", "ep=2", "model.embeddings=untied"],
    [*EXPERTS, "tp=2", "recompute.mode=selective"],
    [*EXPERTS, "pp=2", "dp_shard=2", "ep=2"],
    [*EXPERTS, "dp_shard=4", "ep=2", "parallel.reduce_every_microbatch=false"],
    [*EXPERTS, "dp_shard=2", "ep=2", "lora.rank=4"],
    [*EXPERTS, "dp_shard=4", "ep=2", "training.compute_dtype=bfloat16"],
]


# Whose formula is not exact: how Muon divides its matrices, and the second group of a number
ROUGH = [["dp_shard=2", "optimizer.name=muon"], ["dp_shard=4", "parallel.reshard_after_forward=2"]]


def config_of(settings: list[str]) -> tuple[Config, LlamaConfig, dict[str, int]]:
    """The config of a small model; a setting without a section is a degree."""
    options = [f"--{s}" if "." in s else f"--parallel.{s}" for s in settings]
    config = load_config([*SMALL, "--parallel.dp_shard=1", *options])
    llama = resolve_flavor(config.model, 0)
    size = num_processes({axis: getattr(config.parallel, axis) for axis in AXES})
    return config, llama, check_layout(config, llama, size)


def count_really(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Numbers:
    """The numbers of a real rank; of a mixture if all experts are chosen equally often."""
    moe.choose = choose_in_turn
    mesh = Mesh("cpu", degrees, 60, config.parallel.ep)
    return count_step(config, llama, mesh, pretended=False)


def choose_in_turn(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first token chooses experts 0 to k - 1, the next one the k after these."""
    highest, _ = probabilities.sort(dim=-1, descending=True, stable=True)
    tokens, num = probabilities.shape
    weights = highest[:, :k]
    in_turn = torch.arange(tokens * k).view(tokens, k) % num
    return weights / weights.sum(dim=-1, keepdim=True), in_turn


@pytest.mark.parametrize(
    "settings",
    [*QUICK, *(pytest.param(settings, marks=pytest.mark.slow) for settings in SLOW)],
    ids=" ".join,
)
def test_a_pretended_step_is_counted_as_a_real_one(pool, settings):
    config, llama, degrees = config_of(settings)
    real = pool.run(num_processes(degrees), count_really, config, llama, degrees)
    per_stage = len(real) // degrees["pp"]
    for pp_rank in range(degrees["pp"]):
        (pretended,) = pool.run(
            1, trace_rank, config, llama, degrees, pp_rank, AS_IT_IS, joins=False
        )
        for numbers in real[pp_rank * per_stage : (pp_rank + 1) * per_stage]:
            compare(pretended, numbers)
        if settings not in ROUGH:
            assert collectives(pretended) == formula(config, llama, degrees, pp_rank)
        if llama.num_experts:
            assert products(pretended) == estimated_products(config, llama, degrees, pp_rank)


# What was held also depends on when gloo ends a communication and frees its tensors; the other
# numbers of bytes depend on how operators are divided
INEXACT = ("memory", "kept", "pointwise")


def collectives(numbers: Numbers) -> dict[tuple[object, ...], tuple[int, int]]:
    """(axis, kind, ranks) -> calls and bytes; groups of one rank left out."""
    return {
        key[1:]: (count, numbers[("bytes", *key[1:])])
        for key, count in numbers.items()
        if key[0] == "calls" and key[3] != 1
    }


def formula(
    config: Config, llama: LlamaConfig, degrees: dict[str, int], pp_rank: int
) -> dict[tuple[object, ...], tuple[int, int]]:
    """The same, estimated."""
    counts = estimate(config, llama, num_processes(degrees), "cpu")
    return {
        (call.axis, call.kind, call.size): (call.count, call.whole_bytes)
        for call in counts.ranks[pp_rank].collectives
    }


def products(numbers: Numbers) -> dict[tuple[object, ...], int]:
    """(rows, inner, columns, dtype) -> products."""
    return {key[1:]: count for key, count in numbers.items() if key[0] == "product"}


def estimated_products(
    config: Config, llama: LlamaConfig, degrees: dict[str, int], pp_rank: int
) -> dict[tuple[object, ...], int]:
    counts = estimate(config, llama, num_processes(degrees), "cpu")
    return {
        (one.rows, one.inner, one.columns, one.dtype): one.count
        for one in counts.ranks[pp_rank].products
    }


def compare(pretended: Numbers, real: Numbers) -> None:
    for key in pretended | real:
        if key[0] not in INEXACT:
            assert pretended[key] == real[key], key
    # When the last backward began
    for category in ("parameters", "gradients", "optimizer", "whole_gradients", "logits"):
        assert pretended["kept", category] == real["kept", category], category
    on_their_way = 0.0  # bytes of messages that gloo may not have freed yet
    # Bytes of messages to both neighbours: gloo has sent them, a pretended rank still holds them
    sent = 0.0
    for key, number in real.items():
        message = 0.0
        if key[0] == "calls" and number > 0:
            message = real[("bytes", *key[1:])] / number
        if key[1:3] == ("pp", "send"):
            on_their_way += 8 * message
            sent += 2 * message
        if key[1:3] == ("tp", "all_reduce"):  # the last sum of the loss, one number per token
            on_their_way += message
        # Rows of one exchange, sent and received; the messages of sizes make the average smaller
        if key[1:3] == ("ep", "all_to_all"):
            on_their_way += 3 * message
    activations = real["kept", "activations"]
    difference = activations - pretended["kept", "activations"]
    # Beside the message it holds some scalars
    assert -0.002 * activations - sent - 32 <= difference
    assert difference <= 0.002 * activations + on_their_way


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["dp_shard=2", "ep=2"]], ids=str)
def test_a_mixture_keeps_what_is_estimated(pool, layout):
    """Its rows, products and router, beside a feed-forward: the rest of a block is the same."""
    sizes = ["model.dim=128", "model.ffn_dim=256", "model.vocab_size=192", "training.seq_len=512"]
    experts = ["model.num_experts=16", "model.experts_per_token=4", "model.expert_ffn_dim=80"]
    dtype = "training.compute_dtype=bfloat16"
    kept = []
    for settings in ([*sizes, dtype, *layout[:1]], [*sizes, dtype, *experts, *layout]):
        config, llama, degrees = config_of(settings)
        (numbers,) = pool.run(1, trace_rank, config, llama, degrees, 0, AS_IT_IS, joins=False)
        kept.append(numbers["kept", "activations"])
    tokens = 2 * 512
    rows = 4 * tokens
    of_router = 16 * 16 * tokens
    of_rows = rows * (2 * 2 * 128 + 4 * 2 * 80 + 16 + 2 + (16 if layout else 0))
    dense = 4 * 2 * 256 * tokens  # w1, silu, w3 and their product; both keep the input
    assert kept[1] - kept[0] == pytest.approx(4 * (of_router + of_rows - dense), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_layers", "pp"),
    [
        (["dp_shard=2", "recompute.mode=selective"], 9, 1),
        (["tp=2", "recompute.mode=full", "recompute.every=2"], 9, 1),
        (["pp=6", "training.local_batch_size=8"], 13, 6),
    ],
    ids=str,
)
def test_short_models_stand_for_a_deep_one(pool, settings, num_layers, pp):
    """What `trace` continues from short models, and between ranks, is what the whole model has."""
    config, llama, degrees = config_of([*settings, f"model.num_layers={num_layers}"])
    counts = trace(config, llama, degrees)
    for pp_rank in range(pp):
        (whole,) = pool.run(1, trace_rank, config, llama, degrees, pp_rank, AS_IT_IS, joins=False)
        rank = counts.ranks[pp_rank]
        assert {
            (call.axis, call.kind, call.size): (call.count, call.whole_bytes)
            for call in rank.collectives
            if call.size != 1
        } == collectives(whole)
        assert rank.num_parameters == whole["parameters",]
        assert rank.attention_flops == whole["attention",]
        assert {(p.rows, p.inner, p.columns, p.dtype): p.count for p in rank.products} == {
            key[1:]: count for key, count in whole.items() if key[0] == "product"
        }
        fullest = max(
            sum(number for key, number in whole.items() if key[:2] == ("memory", part))
            for part in ("forward", "backward", "late backward", "update")
        )
        assert rank.memory.total == pytest.approx(fullest, rel=0.03)
