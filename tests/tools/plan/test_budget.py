"""Budgets against published arithmetic, checkpoints against real states, and when to save."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from titanlite.checkpoint.state import ModelState, OptimizerState, state_of, switched_on
from titanlite.config.load import load_config
from titanlite.config.schema import Config, LoraConfig
from titanlite.model.flavors import FLAVORS, LlamaConfig, block_shapes
from titanlite.model.llama import Llama
from titanlite.optim.ema import WeightEMA
from titanlite.optim.optimizer import build_optimizer
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.amounts import amount
from titanlite.tools.plan.budget import (
    GPU_MTBF_HOURS,
    budget_lines,
    checkpoint_bytes,
    flops_lines,
    run_budget,
    run_flops,
    save_interval,
    save_lines,
    speed_from_mfu,
)

A100 = 312.0
H100 = 989.0
SIX_N = 6 * 7e9
PAGE = Path(__file__).parents[3] / "docs/plan.md"


def of_7b(gpus, mfu, peak, price=None):
    """7B parameters on 2T tokens, by 6 N D."""
    speed = speed_from_mfu(SIX_N, mfu, peak)
    tokens = amount("--tokens", "2T")
    return run_budget(SIX_N, gpus, speed, tokens=tokens, price=price, peak_tflops=peak)


def test_7b_on_2t_tokens():
    assert of_7b(1, 0.5, A100).flops == pytest.approx(8.40e22)
    assert of_7b(1, 0.5, A100).gpu_hours == pytest.approx(149_573, abs=0.5)
    assert of_7b(64, 0.5, A100).gpu_hours == pytest.approx(149_573, abs=0.5)


@pytest.mark.parametrize(
    ("mfu_of", "hours", "gpu_hours", "prices"),
    [
        (A100, 649.2, 166_192, {1.99: 330_722, 3.97: 659_782, 3.67: 609_924, 3.40: 565_052}),
        (H100, 204.8, 52_429, {8.0: 419_429, 7.0: 367_000, 6.0: 314_571, 3.29: 172_490}),
    ],
)
def test_256_gpus_at_45_percent(mfu_of, hours, gpu_hours, prices):
    for price, cost in prices.items():
        budget = of_7b(256, 0.45, mfu_of, price)
        assert budget.seconds / 3600 == pytest.approx(hours, abs=0.05)
        assert budget.gpu_hours == pytest.approx(gpu_hours, abs=0.5)
        assert budget.cost == pytest.approx(cost, abs=0.5)
        assert budget.mfu == pytest.approx(0.45)


def test_an_unknown_price_is_not_zero():
    unknown = of_7b(256, 0.45, A100)
    assert unknown.cost is None
    assert "n/a" in budget_lines(unknown)[-1]
    assert "$" not in "\n".join(budget_lines(unknown))
    assert of_7b(256, 0.45, A100, price=0.0).cost == 0  # one's own machine
    assert "$330,722 at $1.99" in budget_lines(of_7b(256, 0.45, A100, 1.99))[-1]


def test_the_page_shows_what_is_printed():
    shown = "\n".join(budget_lines(of_7b(256, 0.45, A100, 1.99)))
    assert f"```\n{shown}\n```" in PAGE.read_text()


def test_tokens_flops_and_time_lead_to_the_same_run():
    run = run_budget(SIX_N, 8, 3000.0, tokens=1e12)
    for length in ({"flops": run.flops}, {"seconds": run.seconds}):
        assert run_budget(SIX_N, 8, 3000.0, **length).tokens == pytest.approx(1e12)
    assert run.mfu is None
    assert "MFU n/a" in "\n".join(budget_lines(run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "found none; expected one of tokens, flops, seconds"),
        ({"tokens": 1e9, "seconds": 1.0}, "found tokens, seconds; expected one"),
        ({"tokens": -1.0}, r"tokens = -1\.0: expected a number above 0"),
        ({"tokens": 1e9, "price": math.nan}, "price = nan: expected dollars"),
        ({"tokens": 1e9, "gpus": 0}, "gpus = 0: expected a number above 0"),
    ],
)
def test_other_budgets_are_refused(change, message):
    arguments = {"flops_per_token": SIX_N, "gpus": 8, "tokens_per_second": 1000.0} | change
    with pytest.raises(ConfigError, match=message):
        run_budget(**arguments)


@pytest.mark.parametrize("mfu", [0.0, 45.0, math.nan])
def test_an_mfu_is_a_fraction(mfu):
    with pytest.raises(ConfigError, match=r"expected a fraction, as in 0\.45"):
        speed_from_mfu(SIX_N, mfu, A100)


@pytest.mark.parametrize(("seq_len", "percent"), [(2048, 8), (8192, 32)])
def test_attention_adds_to_6nd(seq_len, percent):
    """A 7B model; the causal mask is not discounted."""
    flops = run_flops(FLAVORS["llama2_7b"], seq_len, 2e12)
    assert round(100 * flops.attention_share) == percent
    lookup = 6 * 32000 * 4096 * 2e12
    assert flops.total == pytest.approx(flops.six_nd * (1 + flops.attention_share) - lookup)
    assert flops.per_token * 2e12 == flops.total
    assert all(len(line) <= 80 for line in flops_lines(flops, seq_len))


def test_the_parameters_of_gpt_3():
    """174.59B is 12 L D^2 + V D + S D, without norms and biases.

    Llama's block has three matrices of 4 D^2 together with attention's four; with F = 8 D / 3 they
    have GPT-3's 8 D^2. Its learned positions (S D) have no equal here.
    """
    model = LlamaConfig(12288, 96, 96, 96, 32768, vocab_size=50257, tied_embeddings=True)
    matrices = sum(math.prod(shape) for shape in block_shapes(model).values() if len(shape) == 2)
    assert matrices == 12 * 12288**2
    norms = (2 * 96 + 1) * 12288
    positions = 2048 * 12288
    assert model.num_parameters - norms + positions == 174_588_899_328


def small(*options):
    """The debug config with a model of 32 dimensions."""
    config = load_config(["debug", *options])
    model = dataclasses.replace(FLAVORS["debug"], dim=32, num_heads=2, num_kv_heads=1, ffn_dim=48)
    return dataclasses.replace(model, vocab_size=96), config


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--optimizer.state_dtype=bfloat16"],
        ["--optimizer.name=muon"],
        ["--ema.decay=0.99"],
        ["--training.frozen=tok_embeddings.*, layers.0.*", "--ema.decay=0.99"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("experts", [{}, {"num_experts": 4, "expert_ffn_dim": 16}], ids=len)
def test_the_tensors_of_a_checkpoint(options, experts):
    shape, config = small(*options)
    shape = dataclasses.replace(shape, **experts)
    model = Llama(shape, 16)
    for name, parameter in model.named_parameters():
        frozen = config.training.frozen and name.startswith(("tok_embeddings.", "layers.0."))
        parameter.requires_grad = not frozen
    optimizer = build_optimizer([model], config.optimizer)
    states = {
        "model": ModelState([model]),
        "optimizer": OptimizerState([model], optimizer),
        "ema": WeightEMA(config.ema, [model], optimizer),
    }
    stored = state_of(switched_on(states))
    stored.get("ema", {}).pop("steps", None)
    tensors = [tensor for part in stored.values() for tensor in part.values()]
    assert checkpoint_bytes(shape, config) == sum(tensor.nbytes for tensor in tensors)


def test_a_checkpoint_of_adapters_holds_these_alone():
    shape = FLAVORS["qwen2.5_0.5b"]
    lora = LoraConfig(rank=16, targets="wq wk wv wo")
    counts = 24 * 4 * 2 * 4
    # 2,162,688 parameters, with two moments
    assert checkpoint_bytes(shape, Config(lora=lora)) == 12 * 2_162_688 + counts


@pytest.mark.parametrize("ratio", [1e-5, 1e-3, 0.005, 0.02, 0.1, 0.5])
def test_the_interval_loses_least(ratio):
    """Daly's interval against the minimum of the exact expectation, found by trying."""
    found = save_interval(3600 * ratio, 1, 1.0)
    tried = found.interval_seconds * np.geomspace(0.5, 2, 20001)
    best = tried[np.argmin([found.lost(one) for one in tried])]
    assert found.interval_seconds == pytest.approx(best, rel=0.01)
    if ratio <= 0.005:  # to first order: saves, and half an interval for each failure
        assert found.lost(best) == pytest.approx(math.sqrt(2 * ratio), rel=0.1)


def test_the_interval_follows_the_number_of_gpus():
    few = save_interval(30.0, 8)
    many = save_interval(30.0, 16384)
    assert few.mtbf_seconds == pytest.approx(GPU_MTBF_HOURS * 3600 / 8)
    assert few.interval_seconds == pytest.approx(
        many.interval_seconds * math.sqrt(16384 / 8), rel=0.1
    )
    # 54 days with 419 failures: one in three hours
    assert many.mtbf_seconds / 3600 == pytest.approx(3.09, abs=0.01)
    assert save_interval(10 * 3600.0, 1, 1.0).interval_seconds == 3600


def test_the_example_of_the_page():
    """llama3_8b, and 256 GPUs with saves of 20 s."""
    size = checkpoint_bytes(FLAVORS["llama3_8b"], load_config(["llama3_8b"]))
    example = save_interval(20.0, 256)
    lost = 100 * example.lost(example.interval_seconds)
    page = PAGE.read_text()
    assert f"{size / 1e9:.1f} GB for `llama3_8b`" in page
    assert f"{example.interval_seconds / 60:.0f} minutes, with which {lost:.1f} %" in page
    assert f"{round(GPU_MTBF_HOURS, -2):,.0f}" in page


def test_lines_of_the_interval():
    lines = save_lines(save_interval(30.0, 256), 96_360_000_000, step_seconds=8.0)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "96.36 GB" in text
    assert " steps; " in text
    rough = save_lines(save_interval(600.0, 16384), 10**12)
    assert all(len(line) <= 80 for line in rough)
    assert "steps" not in "\n".join(rough)


def test_failures_may_come_faster_than_saves():
    """Saves of an hour on 8 GPUs that fail every 3 minutes each: e to the power of 161."""
    hopeless = save_interval(3600.0, 8, 0.05)
    assert hopeless.lost(hopeless.interval_seconds) > 1e50
    assert save_interval(3600.0, 64, 0.05).lost(3600.0) == math.inf
    lines = save_lines(hopeless, 10**12, step_seconds=1.0, run_seconds=10.0)
    assert all(len(line) <= 80 for line in lines)
    assert "failures come faster than saves" in lines[1]
    assert "of the time is lost" not in "\n".join(lines)


def test_a_short_run_is_saved_at_its_end():
    interval = save_interval(30.0, 8)
    run = interval.interval_seconds
    short = save_lines(interval, 10**9, step_seconds=1.0, run_seconds=0.9 * run)
    assert "longer than the run: save at its end" in short[1]
    assert all(len(line) <= 80 for line in short)
    long = save_lines(interval, 10**9, step_seconds=1.0, run_seconds=1.1 * run)
    assert long == save_lines(interval, 10**9, step_seconds=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 8), r"save_seconds = 0\.0"),
        ((30.0, 8, math.inf), "gpu_mtbf_hours = inf"),
    ],
)
def test_other_intervals_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        save_interval(*arguments)
