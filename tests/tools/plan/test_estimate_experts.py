"""What a mixture of experts adds to a step, counted by its published sizes."""

from __future__ import annotations

import pytest

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.counts import RankCounts
from titanlite.tools.plan.estimate import estimate
from titanlite.tools.plan.machines import MACHINES
from titanlite.tools.plan.step_time import step_time


def model(*arguments: str) -> tuple[Config, LlamaConfig]:
    config = load_config(["llama3_8b", "--model.flavor=qwen3_30b_a3b", *arguments])
    return config, resolve_flavor(config.model, 0)


def mixture(world_size: int, *arguments: str) -> RankCounts:
    """Counts qwen3_30b_a3b: 48 blocks, D 2048, 128 experts of width 768, 8 of them for a token."""
    config, llama = model("--training.seq_len=4096", *arguments)
    return estimate(config, llama, world_size).ranks[0]


@pytest.mark.parametrize(("gpus", "ep"), [(8, 1), (8, 8), (64, 8), (64, 16)])
def test_each_parameter_of_a_mixture_is_held_once(gpus, ep):
    """The published number, whatever of it is divided over ep and whatever over FSDP's shards."""
    rank = mixture(gpus, f"--parallel.ep={ep}")
    assert gpus * rank.num_parameters == pytest.approx(30_532_122_624, rel=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
def test_products_of_a_mixture_are_those_of_its_active_parameters(tp):
    """3.35 billion, less the embedding, a lookup, and the norms, which are no products."""
    options = ("--training.global_batch_size=8", "--recompute.mode=none", f"--parallel.tp={tp}")
    rank = mixture(8, *options, "--parallel.ep=4")
    embedding = 151936 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    tokens = 8 * 4096
    flops = 6 * (3_353_032_704 - embedding - norms) * tokens
    assert 8 * sum(product.flops for product in rank.products) == flops


def test_ep_gathers_fewer_experts():
    """604 million numbers of a block's experts in bfloat16, of which ep 8 gathers an eighth."""
    options = ("--training.global_batch_size=64", "--recompute.mode=none")
    whole = mixture(64, *options).memory
    divided = mixture(64, *options, "--parallel.ep=8").memory
    experts = 3 * 128 * 768 * 2048
    assert whole.gathered - divided.gathered == 2 * experts * 7 // 8
    assert whole.parameters == pytest.approx(divided.parameters, rel=0.001)


def test_one_published_mixture():
    """prime-rl's FSDP2 on 8 H200, 16,384 tokens, full recomputation: 4,379 tokens/s (of which the
    plan predicts 1.5 times as many: docs/plan.md).
    """
    options = ("--training.local_batch_size=1", "--training.global_batch_size=8")
    options += ("--training.seq_len=16384", "--recompute.mode=full", "--loss.num_chunks=1")
    config, llama = model("--compile.loss=false", *options)
    counts = estimate(config, llama, 8)
    speed = step_time(counts, MACHINES["H200"], config, llama).tokens_per_second
    assert 0.9 < speed / 4378.8 < 1.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.flavor=qwen3_30b_a3b", "--parallel.ep=3"], r"parallel.ep = 3 does not divide"),
        (["--parallel.ep=2"], r"parallel.ep = 2: model.num_experts = 0, a dense model"),
    ],
)
def test_an_ep_that_does_not_divide_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        config = load_config(["llama3_8b", *arguments])
        estimate(config, resolve_flavor(config.model, 128256), 8)


def test_a_memory_budget_repeats_no_experts():
    """The compiler has attention only. A block keeps of each of 8 rows per token at least two of
    2048 numbers and four of 768, in bfloat16.
    """
    options = ("--training.global_batch_size=8", "--loss.num_chunks=8")
    budget = ("--recompute.mode=memory_budget", "--recompute.budget=0.0")
    kept = mixture(8, *options, *budget).memory.activations
    assert kept > 48 * 4096 * 8 * (2 * 2048 + 4 * 768) * 2
    assert kept < mixture(8, *options, "--recompute.mode=none").memory.activations
