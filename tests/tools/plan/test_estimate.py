"""Counts of a step by arithmetic, against the guides' numbers, measured memory and known traffic."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.flops import flops_per_token
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.counts import Collective, RankCounts
from titanlite.tools.plan.estimate import estimate, layout_of
from titanlite.tools.plan.estimate_memory import (
    logits_bytes,
    receive_buffers,
    reserved_bytes,
    sharded_gradients,
    states,
)
from titanlite.tools.plan.machines import MACHINES
from titanlite.tools.plan.step_time import step_time

ROOT = Path(__file__).parents[3]
GIB = 2**30


def model(*arguments: str) -> tuple[Config, LlamaConfig]:
    config = load_config(list(arguments))
    return config, resolve_flavor(config.model, 32000)


def rank_of(world_size: int, *arguments: str) -> RankCounts:
    return estimate(*model(*arguments), world_size).ranks[0]


def traffic(world_size: int, *arguments: str) -> dict[tuple[str, str], Collective]:
    found = rank_of(world_size, "debug", "--model.vocab_size=128256", *arguments).collectives
    return {(collective.axis, collective.kind): collective for collective in found}


@pytest.mark.parametrize(
    ("flavor", "gib"), [("llama3_8b", 119.7), ("llama3_70b", 1051), ("llama3_405b", 6048)]
)
def test_states_of_the_flavors(flavor, gib):
    """16 N bytes: the guides' numbers; divided over ranks they are the same."""
    for world_size in (1, 64):
        batch = ("--training.local_batch_size=1", f"--training.global_batch_size={world_size}")
        config, llama = model(flavor, *batch, "--parallel.tp=1", "--parallel.pp=1")
        layout = layout_of(config, llama, world_size)
        held = states(layout, layout.stages_of(0))
        total = held.parameters + held.gradients + held.optimizer
        assert world_size * total / GIB == pytest.approx(gib, rel=5e-4)


def test_7b_by_the_guides():
    """bf16 parameters and gradients with fp32 moments: 14, 14 and 56 GB; 112 GB in fp32."""
    for dtype, expected in (("bfloat16", (14, 14, 56)), ("float32", (28, 28, 56))):
        arguments = ("--model.flavor=llama2_7b", f"--training.param_dtype={dtype}")
        config, llama = model("llama3_8b", *arguments)
        layout = layout_of(config, llama, 1)
        held = states(layout, layout.stages_of(0))
        billions = 7e9 / llama.num_parameters
        found = (held.parameters, held.gradients, held.optimizer)
        assert [n * billions / 1e9 for n in found] == pytest.approx(expected, rel=1e-6)
    assert sum(expected) == 112


def test_activations_and_logits_by_the_guides():
    """34 s b h bytes per layer is a GPT block, 34 D per token. Ours, with two more matrices' width
    and without dropout, kept in eager mode: 37.5 D; the logits in fp32 are 1.65 GB, three times.
    """
    arguments = ["--model.flavor=llama2_7b", "--model.vocab_size=50257", "--training.seq_len=2048"]
    arguments += ["--training.local_batch_size=4", "--recompute.mode=none", "--loss.num_chunks=1"]
    config, llama = model("llama3_8b", *arguments, "--compile.enabled=false")
    kept = estimate(config, llama, 1).ranks[0].memory.activations
    of_gpt = 34 * 4 * 2048 * 4096 * 32
    assert of_gpt / 1e9 == pytest.approx(36.5, rel=1e-3)
    assert kept / of_gpt == pytest.approx(37.6 / 34, rel=0.01)
    assert logits_bytes(layout_of(config, llama, 1)) / 3e9 == pytest.approx(1.65, rel=2e-3)
    config, llama = model("llama3_8b", *arguments, "--recompute.mode=full")
    in_blocks = 2 * 4 * 2048 * 4096 * 32
    assert in_blocks / 1e9 == pytest.approx(2.15, rel=2e-3)
    layout = layout_of(config, llama, 1)
    from_blocks = layout.tokens * layout.compute_bytes * llama.dim * llama.num_layers
    assert from_blocks == in_blocks


def test_zero_2_at_8b_on_4_gpus_and_ours():
    """ZeRO-2 keeps bf16 weights whole and divides 14 bytes: 44 GB with P = 16 GB. `never` divides
    16 bytes and keeps bf16 weights gathered: 48.
    """
    weights = 16e9
    assert weights + 7 * weights / 4 == 44e9
    config, llama = model(
        "llama3_8b", "--training.global_batch_size=4", "--parallel.reshard_after_forward=never"
    )
    held = estimate(config, llama, 4).ranks[0].memory
    layout = layout_of(config, llama, 4)
    state = states(layout, layout.stages_of(0))
    total = state.parameters + state.gradients + state.optimizer + held.gathered
    assert total / 1e9 == pytest.approx(48 * llama.num_parameters / 8e9, rel=1e-3)


def measured_memory() -> list[tuple[str, str, float]]:
    """Case, options and allocated GiB of benchmarks/results/2026-11-28-pretended_memory.md."""
    text = (ROOT / "benchmarks/results/2026-11-28-pretended_memory.md").read_text()
    rows = re.findall(r"^\| (\d.*?) \| [\d,]+ \| ([\d.]+) \|", text, re.M)
    options = dict(re.findall(r"^- (\d.*?): `(.*?)`$", text, re.M))
    return [(case, options[case], float(gib)) for case, gib in rows]


@pytest.mark.parametrize(("case", "options", "gib"), measured_memory())
def test_memory_against_the_allocator(case, options, gib):
    found = rank_of(1, *options.split(), "--compile.loss=false").memory.total / GIB
    if "budget" in case:  # the compiler may keep less than its budget
        assert 0.988 * gib <= found < 1.06 * gib
    else:
        assert found == pytest.approx(gib, rel=0.012)


def test_traffic_of_sharded_weights():
    """As counted in torch on two ranks; local_batches of 4 sequences, twice a step."""
    found = traffic(2, "--parallel.dp_shard=2")
    assert found["dp_shard", "all_gather"].count == 2 * 8
    assert found["dp_shard", "all_gather"].whole_bytes == 2 * 35417856
    assert found["dp_shard", "reduce_scatter"].count == 2 * 5
    assert found["dp_shard", "reduce_scatter"].whole_bytes == 2 * 68620800
    always = traffic(2, "--parallel.dp_shard=2", "--parallel.reshard_after_forward=always")
    assert always["dp_shard", "all_gather"].count == 2 * 10
    never = ("--parallel.dp_shard=2", "--parallel.reshard_after_forward=never")
    assert traffic(2, *never)["dp_shard", "all_gather"].whole_bytes == 34310400  # once a step
    once = traffic(2, *never, "--parallel.reduce_every_microbatch=false")
    assert once["dp_shard", "reduce_scatter"].count == 5
    assert once["dp_shard", "all_gather"].count == 5


def test_traffic_of_replicas():
    found = traffic(4, "--parallel.dp_shard=2", "--parallel.dp_replicate=2")
    assert found["dp_replicate", "all_reduce"].count == 5 + 1  # the numbers of tokens and targets
    assert found["dp_replicate", "all_reduce"].whole_bytes == 34310400 + 16


def test_traffic_of_an_untied_model_over_cp():
    found = traffic(4, "--parallel.dp_shard=2", "--parallel.cp=2", "--model.embeddings=untied")
    assert found["dp_shard_cp", "all_gather"].count == 2 * 11
    assert found["dp_shard_cp", "all_gather"].whole_bytes == 2 * 101454080
    assert found["cp", "all_gather"].count == 2 * 4
    assert found["cp", "all_gather"].whole_bytes == 2 * 2 * 131072  # 131072: of each part
    assert found["cp", "reduce_scatter"].whole_bytes == 2 * 262144


@pytest.mark.parametrize(
    ("mode", "gathers", "reductions"), [("none", 4, 4), ("selective", 6, 4), ("full", 6, 5)]
)
def test_traffic_of_tensor_parallel(mode, gathers, reductions):
    """As docs/parallelism.md says; the ends add two of each, norms and loss 12 all-reduces."""
    found = traffic(4, "--parallel.dp_shard=2", "--parallel.tp=2", f"--recompute.mode={mode}")
    tokens = 256
    one = 2 * tokens * 128  # bf16
    layers = 4
    for kind, times in (("all_gather", gathers), ("reduce_scatter", reductions)):
        calls = 2 * (times * layers + 2)
        assert found["tp", kind].count == calls
        assert found["tp", kind].whole_bytes == calls * one
    assert found["tp", "all_reduce"].count == 2 * 12
    assert found["tp", "all_reduce"].whole_bytes == 2 * (9 * 128 * 2 + 3 * 4 * tokens)


def test_traffic_of_a_chunked_loss():
    found = traffic(4, "--parallel.dp_shard=2", "--parallel.tp=2", "--loss.num_chunks=4")
    assert found["tp", "all_reduce"].count == 2 * 21
    assert found["tp", "all_gather"].count == 2 * 18


def test_traffic_of_adapters_under_tensor_parallel():
    """The frozen embedding and the first block's input have no gradients: one less of each."""
    found = traffic(2, "--parallel.tp=2", "--lora.rank=8")
    assert found["tp", "all_gather"].count == 4 * (4 * 4 + 2 - 1)
    assert found["tp", "reduce_scatter"].count == 4 * (4 * 4 + 2 - 1)


def test_attention_over_cp_computes_what_its_chunks_have():
    one = rank_of(4, "debug").attention_flops
    gathered = rank_of(4, "debug", "--parallel.cp=2").attention_flops
    exchanged = rank_of(4, "debug", "--parallel.cp=2", "--parallel.cp_method=ulysses")
    assert gathered == exchanged.attention_flops * 5 / 8
    assert exchanged.attention_flops == one


def test_messages_of_a_pipeline():
    found = traffic(2, "--parallel.pp=2", "--model.embeddings=untied")
    microbatches = 8
    assert found["pp", "send"].count == microbatches
    assert found["pp", "send"].whole_bytes == microbatches * 128 * 128 * 2
    assert found["pp", "recv"].count == microbatches


def test_products_are_those_of_the_mfu():
    """Without recomputation: 6 FLOPs per parameter and token, and attention's."""
    config, llama = model("llama3_8b", "--recompute.mode=none", "--parallel.tp=4")
    counts = estimate(config, llama, 4)
    rank = counts.ranks[0]
    total = 4 * (sum(product.flops for product in rank.products) + rank.attention_flops)
    norms = 6 * (2 * llama.num_layers + 1) * llama.dim
    per_token = flops_per_token(llama, config.training.seq_len) - norms
    assert total == counts.tokens * per_token


@pytest.mark.parametrize("frozen", ["tok_embeddings.*, layers.0.*, layers.1.*", "*.wo.*, output.*"])
def test_frozen_products_are_those_of_the_mfu(frozen):
    """Layers below all that is trained have a forward only."""
    options = ("--recompute.mode=none", f"--training.frozen={frozen}")
    config, llama = model("llama3_8b", *options)
    counts = estimate(config, llama, 1)
    rank = counts.ranks[0]
    total = sum(product.flops for product in rank.products) + rank.attention_flops
    patterns = config.training.frozen_patterns
    per_token = flops_per_token(llama, config.training.seq_len, frozen=patterns)
    assert total == pytest.approx(counts.tokens * per_token, rel=1e-4)  # which counts norms


def test_blocks_below_all_that_is_trained_keep_nothing():
    """The first 24 of 32 blocks are frozen."""
    options = ("--training.local_batch_size=4", "--loss.num_chunks=1")
    whole = rank_of(1, "llama3_8b", "--recompute.mode=none", *options).memory.activations
    patterns = ", ".join(["tok_embeddings.*", *(f"layers.{number}.*" for number in range(24))])
    frozen = f"--training.frozen={patterns}"
    found = rank_of(1, "llama3_8b", "--recompute.mode=none", frozen, *options)
    assert found.memory.activations == pytest.approx(whole / 4, rel=0.05)
    assert found.num_trained < 0.32 * found.num_parameters


def test_a_frozen_first_block_says_nothing_about_the_others():
    """What the others keep does not depend on which block is frozen."""
    options = ("--recompute.mode=none", "--training.local_batch_size=4", "--loss.num_chunks=8")
    first, last = (
        rank_of(1, "llama3_8b", f"--training.frozen=layers.{number}.*", *options).memory.activations
        for number in (0, 31)
    )
    assert first == last


@pytest.mark.parametrize(("mode", "more"), [("full", 6 / 7), ("selective", 3 / 7)])
def test_recomputation_repeats_products(mode, more):
    none = rank_of(1, "debug", "--recompute.mode=none").products
    again = rank_of(1, "debug", f"--recompute.mode={mode}").products
    forward = 4 * 7 * 4  # layers, products, local batches
    extra = sum(p.count for p in again) - sum(p.count for p in none)
    assert extra == round(forward * more)


def test_without_fsdp_gradients_accumulate_whatever_is_reduced_when():
    """On one process nothing is reduced, so the key changes nothing."""
    often = rank_of(1, "debug", "--training.local_batch_size=2")
    once = rank_of(
        1, "debug", "--training.local_batch_size=2", "--parallel.reduce_every_microbatch=false"
    )
    assert once.memory == often.memory
    assert once.memory.gradients > 0


def test_stages_of_a_pipeline_hold_less_activations_towards_its_end():
    config, llama = model(
        "llama3_70b", "--parallel.pp=8", "--training.local_batch_size=16", "--recompute.mode=full"
    )
    layout = layout_of(config, llama, 64)
    assert [layout.in_flight(rank) for rank in (0, 3, 7)] == [[8], [5], [1]]
    schedules = {
        "GPipe": [16],
        "Interleaved1F1B": [15, 8],
        "LoopedBFS": [16, 16],
        "ZBVZeroBubble": [15, 1],
    }
    for schedule, expected in schedules.items():
        config = load_config(
            [
                "llama3_70b",
                "--parallel.pp=8",
                "--training.local_batch_size=16",
                f"--parallel.pp_schedule={schedule}",
                "--compile.enabled=false",
            ]
        )
        assert layout_of(config, llama, 64).in_flight(0) == expected
    counts = estimate(config, llama, 64)
    whole = sum(rank.num_parameters for rank in counts.ranks) * 8
    assert whole == pytest.approx(llama.num_parameters, rel=1e-3)


OPTIONS = ("none", "selective", "full")


@pytest.mark.parametrize(("flavor", "world_size"), [("llama3_1b", 8), ("llama3_8b", 16)])
def test_each_measure_against_memory_saves_some(flavor, world_size):
    batch = ("--training.local_batch_size=4", "--training.global_batch_size=64")
    by_mode = [
        rank_of(world_size, flavor, *batch, f"--recompute.mode={mode}").memory.total
        for mode in OPTIONS
    ]
    assert by_mode == sorted(by_mode, reverse=True)
    plain = rank_of(world_size, flavor, *batch, "--recompute.mode=none", "--loss.num_chunks=1")
    for measure in (
        "--parallel.tp=4",
        "--parallel.cp=4",
        "--loss.num_chunks=8",
        "--parallel.cpu_offload=true",
        "--parallel.optimizer_offload=true",
        "--optimizer.state_dtype=bfloat16",
        "--optimizer.name=muon",
        "--lora.rank=8",
        "--training.local_batch_size=2",
        "--recompute.mode=memory_budget",
    ):
        arguments = [*batch, "--recompute.mode=none", "--loss.num_chunks=1", measure]
        assert rank_of(world_size, flavor, *arguments).memory.total < plain.memory.total, measure
    more = rank_of(
        world_size,
        flavor,
        *batch,
        "--recompute.mode=none",
        "--loss.num_chunks=1",
        "--parallel.reshard_after_forward=never",
    )
    assert more.memory.gathered > plain.memory.gathered


@pytest.mark.parametrize(("gpus", "measured"), [(8, 77.0), (128, 62.0)])
def test_the_range_has_a_pair_of_published_measurements(gpus, measured):
    """torchtitan's 8B rows (benchmarks/llama3_h100_202412_torchtitan.md) on 8 and on 128 GPUs."""
    options = ("--training.local_batch_size=2", "--recompute.mode=selective")
    options += (f"--training.global_batch_size={2 * gpus}", "--compile.loss=false")
    rank = rank_of(gpus, "llama3_8b", *options, "--loss.num_chunks=1")
    degrees = {"dp_shard": gpus, "cp": 1}
    low, high = reserved_bytes(rank.memory, sharded_gradients(rank, degrees))
    assert low / GIB < measured < high / GIB
    assert high < 1.15 * low


def test_gradients_that_come_later_count_at_the_upper_end():
    options = ("--training.local_batch_size=2", "--training.global_batch_size=16")
    rank = rank_of(8, "llama3_8b", *options, "--loss.num_chunks=1")
    gradients = sharded_gradients(rank, {"dp_shard": 8, "cp": 1})
    assert gradients == pytest.approx(4 * 8030261248 / 8, rel=1e-3)
    low, high = reserved_bytes(rank.memory, gradients)
    without_low, without_high = reserved_bytes(rank.memory, 0)
    later = gradients - rank.memory.gradients
    assert later > 0
    assert high - without_high == pytest.approx(later)
    assert low - without_low == pytest.approx(later / 2)
    assert sharded_gradients(rank, {"dp_shard": 1, "cp": 1}) == 0  # whole tensors


def test_a_stage_holds_two_gradients_beside_the_inputs_in_flight():
    """405B on 512 GPUs with 1F1B, 384 microbatches: 8 KiB per token of a microbatch / tp."""
    options = ("--parallel.pp=16", "--parallel.tp=8", "--parallel.pp_microbatch_size=1")
    options += ("--training.global_batch_size=1536", "--training.local_batch_size=384")
    config, llama = model("llama3_405b", *options)
    layout = layout_of(config, llama, 512)
    one = 8192 * 16384 * 2 / 8
    assert receive_buffers(layout, layout.stages_of(1), 1) == 2 * one
    assert receive_buffers(layout, layout.stages_of(15), 15) == one  # of an input


def test_a_pipeline_gathers_all_weights_however_they_are_freed():
    """A backward frees none, so `always` differs only in the forward."""
    options = ("--parallel.pp=2", "--parallel.dp_shard=4", "--training.local_batch_size=8")
    kept, freed = (
        rank_of(
            8,
            "llama3_8b",
            *options,
            "--recompute.mode=full",
            f"--parallel.reshard_after_forward={mode}",
        ).memory.gathered
        for mode in ("default", "always")
    )
    assert kept == freed > 0


def test_parts_of_a_layout_add_up():
    """Over the ranks of pp and tp each parameter is held as often as the layout says."""
    for pp, tp in itertools.product((1, 2), (1, 2)):
        world_size = pp * tp * 2
        counts = estimate(
            *model(
                "llama3_8b",
                f"--parallel.pp={pp}",
                f"--parallel.tp={tp}",
                "--training.local_batch_size=2",
                "--training.global_batch_size=8",
            ),
            world_size,
        )
        norms = (tp - 1) * 65 * 4096
        total = sum(rank.num_parameters for rank in counts.ranks) * 2 * tp
        assert total == 8030261248 + norms


@pytest.mark.parametrize(("split", "without"), [("layers.0", 0), ("norm", 1)])
def test_a_stage_may_have_no_block(split, without):
    ranks = estimate(*model("debug", "--parallel.pp=2", f"--parallel.pp_split={split}"), 4).ranks
    assert min(rank.memory.total for rank in ranks) > 0
    numbers = [sum(product.count for product in rank.products) for rank in ranks]
    assert numbers[without] < numbers[1 - without]


def test_a_layout_that_is_not_allowed_is_refused():
    with pytest.raises(ConfigError, match=r"parallel.tp = 3 does not divide"):
        rank_of(3, "debug", "--parallel.tp=3")


def test_it_loads_no_torch():
    command = "import sys, titanlite.tools.plan.estimate; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "False"


def mixture_model(*arguments: str) -> tuple[Config, LlamaConfig]:
    config = load_config(["llama3_8b", "--model.flavor=qwen3_30b_a3b", *arguments])
    return config, resolve_flavor(config.model, 0)


def mixture(world_size: int, *arguments: str) -> RankCounts:
    """Counts qwen3_30b_a3b: 48 blocks, D 2048, 128 experts of width 768, 8 of them for a token."""
    config, llama = mixture_model("--training.seq_len=4096", *arguments)
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
    config, llama = mixture_model("--compile.loss=false", *options)
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


def test_a_memory_budget_repeats_no_experts_of_other_ranks():
    """With ep the compiler has attention only. A block keeps of each of 8 rows per token at least
    two of 2048 numbers and four of 768, in bfloat16.
    """
    options = ("--parallel.ep=2", "--training.global_batch_size=8", "--loss.num_chunks=8")
    budget = ("--recompute.mode=memory_budget", "--recompute.budget=0.0")
    kept = mixture(8, *options, *budget).memory.activations
    of_experts = 48 * 4096 * 8 * (2 * 2048 + 4 * 768) * 2
    assert kept > of_experts
    assert kept < mixture(8, *options, "--recompute.mode=none").memory.activations
    assert mixture(8, *options, *budget, "--parallel.ep=1").memory.activations < of_experts
