"""Loss scaling: what it decides, that gradients do not depend on it, and runs with overflows in
several layouts.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from messages import refused
from model_builder import EVEN, build_stages, full
from runs import curve, rows, train_run, train_until
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.folders import list_steps
from titanlite.checkpoint.manager import Diverged
from titanlite.config.schema import LossConfig, OptimizerConfig, TrainingConfig
from titanlite.data.rows import Batch, count_targets
from titanlite.optim.clip import clip_gradients
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.optimizer import build_optimizer

CPU = torch.device("cpu")


def scaled(model: Any, **training: Any) -> tuple[LossScale, Any]:
    optimizer = build_optimizer([model], OptimizerConfig())
    config = TrainingConfig(compute_dtype="float16", **training)
    return LossScale(config, optimizer, CPU), optimizer


def clip(loss_scale: LossScale, parts: list[Any], max_norm: float, shared: Any = ()) -> Any:
    """Between backward and update, as train.py does it; returns the norm."""
    loss_scale.unscale()
    norm = clip_gradients(parts, max_norm, CPU, shared)
    loss_scale.judge(norm)
    return norm


def test_in_other_dtypes_it_is_one_and_has_no_state():
    model = torch.nn.Linear(3, 3, bias=False)
    optimizer = build_optimizer([model], OptimizerConfig())
    loss_scale = LossScale(TrainingConfig(compute_dtype="bfloat16"), optimizer, CPU)
    model.weight.grad = torch.full((3, 3), float("inf"))
    clip(loss_scale, [model], 1.0)
    assert float(loss_scale.scale) == 1
    assert not hasattr(optimizer, "found_inf")
    assert (loss_scale.state_dict(), loss_scale.columns()) == ({}, {})
    loss_scale.load_state_dict({})


def test_an_overflow_withholds_the_update_and_halves_the_scale():
    model = torch.nn.Linear(3, 3, bias=False)
    loss_scale, optimizer = scaled(model, loss_scale=8.0, loss_scale_growth=2)
    found = []
    for value in (1.0, float("inf"), 1.0, 1.0, float("nan"), 2.0, 2.0, 2.0):
        scale = float(loss_scale.scale)
        model.weight.grad = torch.full((3, 3), value) * scale
        before = [
            model.weight.clone(),
            *(tensor.clone() for tensor in optimizer.state[model.weight].values()),
        ]
        norm = clip(loss_scale, [model], 1.0)
        optimizer.step()
        after = [model.weight, *optimizer.state[model.weight].values()]
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=False)]
        if torch.tensor(value).isfinite():
            assert float(norm) == pytest.approx(3 * value)
            assert not any(same)
        else:
            assert all(same)
            assert loss_scale.tolerated
        found.append((scale, loss_scale.columns()["skipped_steps"]))
    assert found == [(8, 0), (8, 1), (4, 1), (4, 1), (8, 2), (4, 2), (4, 2), (8, 2)]
    assert float(optimizer.state[model.weight]["step"]) == 6


def test_an_optimizer_that_cannot_withhold_an_update_is_refused():
    with refused("training.compute_dtype = float16", "RAdam cannot withhold an update"):
        LossScale(
            TrainingConfig(compute_dtype="float16"),
            torch.optim.RAdam([torch.nn.Parameter(torch.ones(3))]),
            CPU,
        )


def test_an_overflow_at_the_lowest_scale_is_not_tolerated():
    model = torch.nn.Linear(3, 3, bias=False)
    loss_scale, _ = scaled(model, loss_scale=2.0)
    tolerated = []
    for _ in range(3):
        loss_scale.judge(torch.tensor(float("nan")))
        tolerated.append(bool(loss_scale.tolerated))
    assert tolerated == [True, False, False]
    assert loss_scale.columns()["loss_scale"] == 1
    loss_scale.reset()  # a rollback to a checkpoint in which there was none
    assert (loss_scale.columns()["loss_scale"], loss_scale.columns()["skipped_steps"]) == (2, 0)
    assert not loss_scale.tolerated  # nothing has overflowed since


def batch_of(step: int) -> Batch:
    tokens = torch.randint(20, (4, 17), generator=torch.Generator().manual_seed(step))
    return Batch(tokens[:, :-1], tokens[:, 1:])


# Targets of a large batch, of which 64 are computed: small gradients
MANY = torch.tensor(64 * 2**20)


def gradients_of(scale: float, chunks: int) -> dict[str, torch.Tensor]:
    """Unscaled, not clipped."""
    stages = build_stages({}, 0, EVEN, LossConfig(num_chunks=chunks), compute_dtype="float16")
    training = TrainingConfig(compute_dtype="float16", loss_scale=scale)
    optimizer = build_optimizer(stages.model_parts, OptimizerConfig())
    loss_scale = LossScale(training, optimizer, CPU)
    for rows_ in (slice(0, 2), slice(2, 4)):
        batch = batch_of(0).apply(lambda t, r=rows_: t[r])
        loss = stages.forward_backward(batch, MANY, loss_scale.scale)
    assert 1 < float(loss) * 2**20 < 4, "the loss itself is returned"
    clip(loss_scale, stages.model_parts, 0)
    return {name: p.grad for name, p in stages.model_parts[0].named_parameters()}


def compare_scales() -> None:
    exact = build_stages({}, 0, EVEN, compute_dtype="float32")
    exact.forward_backward(batch_of(0), MANY)
    for chunks in (1, 3):
        one, large = gradients_of(1.0, chunks), gradients_of(2.0**24, chunks)
        for name, parameter in exact.model_parts[0].named_parameters():
            wrong = [
                float((found[name] - parameter.grad).norm() / parameter.grad.norm())
                for found in (one, large)
            ]
            assert 1e-5 < wrong[1] < 4e-3, (name, wrong)
            assert wrong[0] > 0.1, "without scaling, small gradients are lost"
        assert all(gradient.dtype == torch.float32 for gradient in large.values())


def test_gradients_are_those_of_float32_to_float16s_rounding(pool):
    pool.run(1, compare_scales)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_small(parallel: dict[str, int]) -> list[tuple[float, float, float, int]]:
    """Loss, gradient norm, scale and skipped steps of each step.

    In steps 1 and 4 the last rank has an infinity.
    """
    data = parallel.get("dp_shard", 1)
    training = {"compute_dtype": "float16", "local_batch_size": 4 // data, "loss_scale": 2.0**12}
    stages = build_stages(parallel, 0, EVEN, **training, loss_scale_growth=2)
    config = TrainingConfig(**training, loss_scale_growth=2)
    optimizer = build_optimizer(stages.model_parts, OptimizerConfig(lr=1e-3, eps=1e-5))
    loss_scale = LossScale(config, optimizer, CPU)
    found = []
    for step in range(6):
        count = count_targets([batch_of(step)])
        part = slice(stages.mesh.data_rank * 4 // data, (stages.mesh.data_rank + 1) * 4 // data)
        batch = batch_of(step).apply(lambda t, p=part: t[p])
        loss = stages.forward_backward(batch, count, loss_scale.scale)
        if step in (1, 4) and dist.get_rank() == dist.get_world_size() - 1:
            local(
                dict(stages.model_parts[0].named_parameters())["layers.3.attention.wq.weight"].grad
            )[0, 0] = float("inf")
        before = [full(p).clone() for p in stages.model_parts[0].parameters()]
        norm = clip(loss_scale, stages.model_parts, 1.0, stages.shared_params)
        optimizer.step()
        optimizer.zero_grad()
        after = [full(p) for p in stages.model_parts[0].parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (
            not norm.isfinite()
        )
        columns = loss_scale.columns()
        found.append(
            (
                float(stages.mesh.sum_losses(loss)),
                float(norm),
                columns["loss_scale"],
                columns["skipped_steps"],
            )
        )
    return found


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({axis: 2}, marks=[pytest.mark.slow] * (axis != "tp"))
        for axis in ("dp_shard", "tp", "pp", "cp")
    ],
)
def test_layouts_skip_the_same_steps_as_one_process(pool, parallel):
    """Gradients are added in another order, so the norms of steps that are not skipped differ in
    float16's rounding.
    """
    (expected,) = pool.run(1, train_small, {})
    assert [step[2:] for step in expected] == [
        (2**12, 0),
        (2**11, 1),
        (2**11, 1),
        (2**12, 1),
        (2**11, 2),
        (2**11, 2),
    ]
    for found in pool.run(2, train_small, parallel):
        for right, step in zip(expected, found, strict=True):
            assert step[2:] == right[2:]
            assert step[0] == pytest.approx(right[0], rel=2e-3)
            assert step[1] == pytest.approx(right[1], rel=1e-2)


SHORT = [
    "--training.compute_dtype=float16",
    "--training.seq_len=16",
    "--training.global_batch_size=4",
]
SHORT += ["--validation.freq=0", "--model.num_layers=1", "--training.loss_scale_growth=2"]


@pytest.mark.slow
def test_resume_is_bit_exact_through_overflows(pool, arguments, tmp_path):
    run = [*arguments, *SHORT, "--training.loss_scale=16777216", "--training.steps=8"]
    assert pool.run(2, train_run, [*run, "--run.name=whole"]) == [0, 0]
    assert pool.run(2, train_until, 2, [*run, "--run.name=stopped"]) == [75, 75]
    assert list_steps(tmp_path / "stopped/checkpoints") == [2]
    assert pool.run(2, train_run, [*run, "--run.name=stopped"]) == [0, 0]
    whole, stopped = ([(row["loss_scale"], row["skipped_steps"]) for row in rows(tmp_path / n)]
                      for n in ("whole", "stopped"))  # fmt: skip
    assert whole == stopped
    assert whole[0] == (2**23, 1)
    assert rows(tmp_path / "whole")[0]["grad_norm"] is None
    assert whole[1][1] == 2, "the checkpoint is between two overflows"
    assert whole[-1][1] < 8
    assert curve(tmp_path / "stopped") == curve(tmp_path / "whole")
    # a checkpoint without a scale, and one whose scale is not used
    plain = [*run, "--run.name=whole", "--training.compute_dtype=float32", "--training.steps=9"]
    assert pool.run(1, train_run, plain) == [0]
    assert pool.run(1, train_run, [*run, "--run.name=whole", "--training.steps=10"]) == [0]
    last = rows(tmp_path / "whole")[-1]
    assert (last["loss_scale"], last["skipped_steps"]) == (2**23, 1), "begins anew, and overflows"


def diverge(arguments: list[str]) -> str:
    with mock.patch(
        "titanlite.parallel.step.clip_gradients", return_value=torch.tensor(float("nan"))
    ):
        try:
            train_run(arguments)
        except Diverged as error:
            return str(error)
    return ""


def test_a_gradient_that_no_scale_makes_finite_ends_the_run(pool, arguments):
    (message,) = pool.run(1, diverge, [*arguments, *SHORT, "--training.loss_scale=4"])
    assert message.startswith("step 3: "), "after those with scale 4 and 2"
    assert "the gradient norm is nan" in message


@pytest.mark.parametrize(
    ("keys", "step", "why"),
    [
        (["action=skip", "max_skips=2"], 4, "2 steps in a row were not finite"),
        (["threshold=9"], 3, "training has diverged"),
        (["action=rollback"], 3, "nothing to roll back to"),
    ],
)
def test_with_a_guard_its_action_decides(pool, arguments, keys, step, why):
    """Also at a step that is not logged."""
    run = [
        *arguments,
        *SHORT,
        "--training.loss_scale=4",
        "--checkpoint.freq=9",
        "--metrics.log_freq=50",
    ]
    (message,) = pool.run(1, diverge, [*run, *(f"--stability.{key}" for key in keys)])
    assert message.startswith(f"step {step} (samples "), message
    assert why in message
