"""The average of the weights: its definition, its place in checkpoints, and computing with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from messages import refused
from model_builder import EVEN, build_stages, full
from runs import rows, train_run, train_until
from torch import nn

from titanlite.checkpoint.folders import list_steps
from titanlite.config.schema import EmaConfig, OptimizerConfig
from titanlite.data.rows import Batch
from titanlite.optim.ema import WeightEMA
from titanlite.optim.optimizer import build_optimizer
from titanlite.tools.formats.convert import Options, convert, load_full_state

TOKENS = torch.randint(104, (2, 17), generator=torch.Generator().manual_seed(3))
BATCH = Batch(TOKENS[:, :-1], TOKENS[:, 1:])


def step_on_random_gradients(
    layer: nn.Module, optimizer: torch.optim.Optimizer, ema: WeightEMA
) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    ema.update()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_the_average_equals_its_definition(dtype, decay):
    layer = nn.Linear(7, 5).to(dtype)
    optimizer = build_optimizer([layer], OptimizerConfig(lr=0.1))
    ema = WeightEMA(EmaConfig(decay=decay), [layer], optimizer)
    expected = layer.weight.detach().double()
    ema.start()
    for step in range(1, 8):
        step_on_random_gradients(layer, optimizer, ema)
        d = min(decay, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * layer.weight.detach().double()
    assert ema.averages[0].dtype == torch.float32
    torch.testing.assert_close(ema.averages[0].double(), expected, rtol=1e-5, atol=1e-6)
    assert ema.steps == 7
    assert (ema.averages[0] - layer.weight).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_withheld_update_leaves_the_average(dtype):
    """Weights, which the optimizer leaves too, would otherwise pull the average towards them."""
    layer = nn.Linear(7, 5).to(dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    ema = WeightEMA(EmaConfig(decay=0.9), [layer], optimizer)
    ema.start()
    optimizer.found_inf = torch.tensor(0.0)
    step_on_random_gradients(layer, optimizer, ema)
    before, weights = [a.clone() for a in ema.averages], layer.weight.detach().clone()
    optimizer.found_inf = torch.tensor(1.0)
    step_on_random_gradients(layer, optimizer, ema)
    assert torch.equal(layer.weight, weights)
    assert all(torch.equal(a, b) for a, b in zip(ema.averages, before, strict=True))
    optimizer.found_inf = torch.tensor(0.0)
    step_on_random_gradients(layer, optimizer, ema)
    assert not torch.equal(ema.averages[0], before[0])


def test_it_begins_with_the_weights_unless_a_checkpoint_had_an_average():
    layer = nn.Linear(3, 2)
    optimizer = build_optimizer([layer], OptimizerConfig())
    ema = WeightEMA(EmaConfig(decay=0.9), [layer], optimizer)
    ema.start()
    assert torch.equal(ema.averages[0], layer.weight)
    step_on_random_gradients(layer, optimizer, ema)
    resumed = WeightEMA(EmaConfig(decay=0.9), [layer], optimizer)
    resumed.load_state_dict(ema.state_dict())
    resumed.start()
    assert torch.equal(resumed.averages[0], ema.averages[0])
    assert resumed.steps == 1


def test_without_a_decay_there_is_none():
    layer = nn.Linear(3, 2)
    optimizer = build_optimizer([layer], OptimizerConfig())
    ema = WeightEMA(EmaConfig(), [layer], optimizer)
    ema.start()
    step_on_random_gradients(layer, optimizer, ema)
    assert ema.state_dict() == {}
    ema.load_state_dict({})
    assert not ema.validates


def losses_of_weights_and_average(parallel: dict, param_dtype: str) -> tuple[float, float, float]:
    """The loss of the average: computed in place of the weights, and by a model that has it as its
    weights.

    And of the weights, which must be bit-equal afterwards, as must the average.
    """
    stages = build_stages(parallel, 0, EVEN, param_dtype=param_dtype)
    optimizer = build_optimizer(stages.model_parts, OptimizerConfig(lr=0.1))
    ema = WeightEMA(EmaConfig(decay=0.9), stages.model_parts, optimizer)
    ema.start()
    for _ in range(3):
        stages.forward_backward(BATCH, torch.tensor(32))
        optimizer.step()
        ema.update()
        optimizer.zero_grad()
    weights, averages = (
        [full(t).detach().clone() for t in group] for group in (ema.parameters, ema.averages)
    )
    own = float(stages.mesh.sum_losses(stages.evaluate(BATCH)))  # leaves some weights gathered
    with ema.in_place_of_weights():
        found = float(stages.mesh.sum_losses(stages.evaluate(BATCH)))
    assert float(stages.mesh.sum_losses(stages.evaluate(BATCH))) == own
    stages.forward_backward(BATCH, torch.tensor(32))
    for group, before in ((ema.parameters, weights), (ema.averages, averages)):
        assert all(torch.equal(full(t), old) for t, old in zip(group, before, strict=True))
    with torch.no_grad():
        for parameter, average in zip(ema.parameters, ema.averages, strict=True):
            parameter.copy_(average)
    other = build_stages(parallel, 1, EVEN, param_dtype=param_dtype)
    with torch.no_grad():
        for part, source in zip(other.model_parts, stages.model_parts, strict=True):
            for parameter, value in zip(part.parameters(), source.parameters(), strict=True):
                parameter.copy_(value)
    return own, found, float(other.mesh.sum_losses(other.evaluate(BATCH)))


@pytest.mark.parametrize(
    ("world_size", "parallel", "param_dtype"),
    [
        (1, {"dp_shard": 1}, "float32"),
        (1, {"dp_shard": 1}, "bfloat16"),
        (2, {"dp_shard": 2, "reshard_after_forward": "never"}, "float32"),
        (2, {"pp": 2}, "float32"),
        (2, {"dp_shard": 2, "cpu_offload": True}, "bfloat16"),
    ],
)
def test_computing_with_the_average_leaves_the_weights(pool, world_size, parallel, param_dtype):
    for own, found, expected in pool.run(
        world_size, losses_of_weights_and_average, parallel, param_dtype
    ):
        assert found == expected
        assert abs(found - own) > 1e-2


@pytest.fixture
def constant(options) -> list[str]:
    """A rate that does not depend on how many steps follow."""
    return [*options, "--schedule.name=constant", "--ema.decay=0.9"]


def saved(run: Path) -> dict[str, torch.Tensor]:
    others = load_full_state(run).others
    return {name: tensor.read() for name, tensor in others.items() if name.startswith("ema.")}


@pytest.mark.slow
def test_a_resumed_run_continues_the_average(pool, constant, tmp_path):
    """Bit by bit in the same layout, and to rounding in another one; its loss is validated."""
    whole, resumed = (
        [*constant, f"--run.folder={tmp_path / name}"] for name in ("whole", "resumed")
    )
    assert pool.run(2, train_run, [*whole, "--parallel.dp_shard=2"]) == [0, 0]
    assert pool.run(2, train_until, 4, [*resumed, "--parallel.dp_shard=2"]) == [75, 75]
    shutil.copytree(tmp_path / "resumed", tmp_path / "copied")
    assert pool.run(2, train_run, [*resumed, "--parallel.dp_shard=2"]) == [0, 0]
    expected, found = saved(tmp_path / "whole/debug"), saved(tmp_path / "resumed/debug")
    assert int(expected["ema.steps"]) == 6
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert pool.run(1, train_run, [*constant, f"--run.folder={tmp_path / 'copied'}"]) == [0]
    other = saved(tmp_path / "copied/debug")
    for name in expected:
        torch.testing.assert_close(other[name], expected[name], rtol=1e-4, atol=1e-5)
    key = "validation/numbers/ema_loss"
    curves = [
        {r["step"]: r[key] for r in rows(tmp_path / name / "debug") if key in r}
        for name in ("whole", "copied")
    ]
    assert list(curves[0]) == [0, 3, 6]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_an_average_can_begin_later_and_be_exported(pool, options, tmp_path):
    arguments = [*options, "--schedule.name=constant", f"--run.folder={tmp_path}"]
    assert pool.run(1, train_run, [*arguments, "--training.steps=3"]) == [0]
    with refused("--weights ema", "has no averaged weights", "ema.decay"):
        convert(tmp_path / "debug", tmp_path / "x", Options("titanlite", weights="ema"))
    assert pool.run(
        1, train_run, [*arguments, "--training.steps=4", "--ema.decay=0.9", "--ema.validate=false"]
    ) == [0]
    assert list_steps(tmp_path / "debug/checkpoints") == [3, 4]
    before, after = (load_full_state(tmp_path / "debug", step) for step in (3, 4))
    exported = convert(
        tmp_path / "debug", tmp_path / "averaged", Options("titanlite", weights="ema")
    )
    assert exported.keys() == after.keys()
    for name in after:
        average = exported[name]
        torch.testing.assert_close(
            average, 2 / 11 * before[name] + 9 / 11 * after[name], rtol=1e-5, atol=1e-7
        )
        assert torch.equal(average, after.others[f"ema.{name}"].read())
    assert not any("ema_loss" in key for row in rows(tmp_path / "debug") for key in row)
    for arguments, words in (
        (("averaged", {"weights": "ema"}), ("has no averaged weights",)),
        (("debug", {"weights": "ema", "full": True}), ("--full", "average")),
        (("debug", {"weights": "emma"}), ("did you mean ema?", "allowed: model, ema")),
    ):
        with refused(*words):
            convert(tmp_path / arguments[0], tmp_path / "y", Options("titanlite", **arguments[1]))
