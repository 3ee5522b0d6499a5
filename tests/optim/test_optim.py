"""Loss, schedule, clipping and optimizer against their definitions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from allocations import Largest
from model_builder import small_model
from torch import nn

from titanlite.config.schema import OptimizerConfig, ScheduleConfig
from titanlite.optim import low_precision
from titanlite.optim import schedule as schedule_module
from titanlite.optim.clip import clip_grad_norm
from titanlite.optim.loss import chunked_cross_entropy_sum, cross_entropy_sum
from titanlite.optim.low_precision import LowPrecisionAdamW
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.schedule import lr_factor


def test_loss_is_a_sum_over_targets_in_fp32():
    logits = torch.randn(2, 5, 11)
    labels = torch.randint(11, (2, 5))
    labels[0, 3:] = -100
    expected = -sum(logits[b, s].log_softmax(-1)[labels[b, s]] for b in range(2) for s in range(5) if labels[b, s] >= 0)
    torch.testing.assert_close(cross_entropy_sum(logits, labels), expected)
    assert cross_entropy_sum(logits.bfloat16(), labels).dtype == torch.float32
    assert cross_entropy_sum(logits, torch.full((2, 5), -100)) == 0


def test_sum_over_global_count_weighs_tokens_alike():
    """Two microbatches of unequal target counts give the gradient of their joint mean."""
    model = small_model()
    tokens = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[0, 2:] = -100
    for i in range(2):
        (cross_entropy_sum(model(tokens[i : i + 1]), labels[i : i + 1]) / 11).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_chunks", [1, 3, 8, 1000])
def test_chunked_loss_equals_the_plain_one(num_chunks, dtype):
    """Loss and gradients; some labels are no targets, and the chunks are not all of one size."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 37, 16), (53, 16)))
    labels = torch.randint(53, (3, 37), generator=generator)
    labels[1, 5:] = -100

    def gradients(loss, *inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        value = loss(*leaves) / 70
        return [value.detach(), *torch.autograd.grad(value * 3, leaves)]

    def plain(x, w):
        return cross_entropy_sum(F.linear(x, w), labels)

    def by_chunks(x, w):
        return chunked_cross_entropy_sum(x, w, labels, num_chunks, cross_entropy_sum)

    exact = gradients(plain, hidden.to(dtype).double(), weight.to(dtype).double())
    wanted = gradients(plain, hidden.to(dtype), weight.to(dtype))
    found = gradients(by_chunks, hidden.to(dtype), weight.to(dtype))
    for a, b, true in zip(wanted, found, exact, strict=True):
        assert a.dtype == b.dtype
        if dtype == torch.float32:
            assert (a - b).norm() <= 1e-6 * a.norm()
        else:  # as near to the truth as the plain loss, but for one more rounding, where the factor comes in
            assert (b - true).norm() <= (a - true).norm() + 2**-9 * true.norm()
    with torch.no_grad():
        value = chunked_cross_entropy_sum(hidden.to(dtype), weight.to(dtype), labels, num_chunks, cross_entropy_sum)
    torch.testing.assert_close(value / 70, wanted[0])


def test_chunked_loss_takes_a_part_of_the_memory():
    """Logits, log-softmax and gradient are some 100 times what is projected here, and the weight's gradient."""
    labels = torch.randint(2048, (4, 256))
    used = {}
    for num_chunks in (1, 2, 4, 8, 16):
        hidden, weight = torch.randn(4, 256, 16, requires_grad=True), torch.randn(2048, 16, requires_grad=True)
        with Largest() as largest:
            if num_chunks == 1:
                cross_entropy_sum(F.linear(hidden, weight), labels).backward()
            else:
                chunked_cross_entropy_sum(hidden, weight, labels, num_chunks, cross_entropy_sum).backward()
        used[num_chunks] = largest.most
    assert used[1] >= 2 * 4 * 256 * 2048 * 4  # the measure sees the logits
    for num_chunks in (2, 4, 8, 16):
        assert used[num_chunks] <= 1.25 * used[1] / num_chunks + 6 * hidden.nbytes + 6 * weight.nbytes, used


def factors(total: int = 100, **section) -> list[float]:
    config = ScheduleConfig(**{"warmup_steps": 10, "min_ratio": 0.1, **section})
    return [lr_factor(config, step, total) for step in range(total + 50)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_every_schedule_warms_up_from_its_first_step_and_never_climbs_again(name):
    rates = factors(name=name)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[9:]))
    last = 1.0 if name == "constant" else 0.1
    assert rates[99:] == pytest.approx([last] * 51)


def test_shapes_of_the_decay():
    assert factors(name="linear")[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors(name="cosine")[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors(name="cosine")[31] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 22 / 90)))
    wsd = factors(name="wsd", decay_fraction=0.2)
    assert wsd[10:80] == [1.0] * 70
    assert wsd[89] == pytest.approx(0.1 + 0.9 * 0.5)


def test_extremes_of_the_schedule():
    assert factors(warmup_steps=0)[0] == pytest.approx(1.0, abs=1e-3)
    assert factors(total=5, warmup_steps=10)[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert factors(total=1, warmup_steps=0)[0] == pytest.approx(0.1)


def test_schedule_sets_the_rate_and_resumes():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=9.0)
    config = ScheduleConfig(warmup_steps=4, name="linear", min_ratio=0.0)
    schedule = schedule_module.Schedule(optimizer, config, 2.0, 10)
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert seen[:4] == [0.5, 1.0, 1.5, 2.0]
    other = schedule_module.Schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=9.0), config, 2.0, 10)
    other.load_state_dict(schedule.state_dict())
    assert other.lr == schedule.lr == other.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e9])
def test_clipping_equals_its_definition(max_norm):
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 5))
    model[1].bias.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    expected = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
    norm = clip_grad_norm([model], max_norm, torch.device("cpu"))
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(expected, rel=1e-7)
    scale = min(1.0, max_norm / expected) if max_norm else 1.0
    for before, parameter in zip(grads, (p for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(parameter.grad, before * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(5_000_000,), (4_882, 1_024), (128, 50_000), (50_001, 100), (0, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_of_many_numbers_is_exact(shape, dtype):
    """torch's own fp32 norm is off by 4e-4 here on CPU."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype)
    module = nn.Module()
    module.weight = parameter
    assert float(clip_grad_norm([module], 0.0, torch.device("cpu"))) == pytest.approx(
        float(parameter.grad.double().norm()), rel=1e-7
    )


def test_what_decays():
    model = small_model()
    everything = build_optimizer([model], OptimizerConfig())
    assert [len(group["params"]) for group in everything.param_groups] == [30]
    decayed, spared = build_optimizer([model], OptimizerConfig(decayed="linear")).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".")[-2] for p in spared["params"]} == {
        "tok_embeddings",
        "attention_norm",
        "ffn_norm",
        "norm",
    }
    assert "output.weight" in {names[id(p)] for p in decayed["params"]}


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "for-loop"])
def test_implementations_give_the_same_step(implementation):
    def stepped(name: str) -> list[torch.Tensor]:
        model = small_model()
        optimizer = build_optimizer([model], OptimizerConfig(lr=0.1, implementation=name))
        for parameter in model.parameters():
            parameter.grad = torch.sin(parameter.detach() * 100) + 0.1
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    for mine, other in zip(stepped(implementation), stepped("for-loop"), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_auto_is_fused():
    optimizer = build_optimizer([small_model()], OptimizerConfig())
    assert optimizer.param_groups[0]["fused"] is True


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> list[float]:
    """Losses of a small regression."""
    generator, losses = torch.Generator().manual_seed(5), []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(16, 8, generator=generator).to(dtype)
        loss = (model(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def regression(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)).to(dtype)


def test_adamw_in_low_precision_is_adamw_where_all_is_fp32(monkeypatch):
    """Cut into pieces too; weight decay and rate by group."""
    monkeypatch.setattr(low_precision, "CHUNK_NUMEL", 100)
    models = [regression(), regression()]
    groups = [[{"params": list(m[0].parameters()), "weight_decay": 0.3}, {"params": m[2].parameters()}] for m in models]
    common = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    theirs = torch.optim.AdamW(groups[0], weight_decay=0.0, **common)
    ours = LowPrecisionAdamW(groups[1], dtype=torch.float32, **common)
    assert train(theirs, models[0], 20) == pytest.approx(train(ours, models[1], 20), rel=1e-6)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(theirs.state[a][name], ours.state[b][name], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_learns_too(weights, moments):
    model = regression(weights)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.0, state_dtype=str(moments).removeprefix("torch."))
    optimizer = build_optimizer([model], config)
    assert isinstance(optimizer, LowPrecisionAdamW) == (torch.bfloat16 in (weights, moments))
    losses = train(optimizer, model, 200)
    assert losses[-1] < 0.1 * losses[0]
    for parameter in model.parameters():
        assert parameter.dtype == weights
        assert {optimizer.state[parameter][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {moments}
