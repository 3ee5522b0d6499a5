"""The gradient noise scale: against a known covariance, in every layout, and where it cannot be
measured.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_builder import EVEN, build_stages
from torch import Tensor, nn

from titanlite.config.schema import MetricsConfig
from titanlite.data.rows import IGNORED, Batch, count_targets
from titanlite.optim.clip import clip_gradients
from titanlite.probes.noise_scale import NoiseScale


class Quadratic:
    """Stages whose loss is the sum over rows of |w - x|^2 / 2, a row counting as one target."""

    mesh = SimpleNamespace(device_type="cpu", sum_counts=lambda count: count)
    shared_params = ()

    def __init__(self, width: int) -> None:
        self.model = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.model_parts = [self.model]

    count_targets = staticmethod(count_targets)

    def sum_shared(self) -> None: ...

    def evaluate(self, batch: Batch) -> None: ...

    def forward_backward(self, batch: Batch, num_targets: Tensor, scale: float = 1.0) -> Tensor:
        used = batch.tokens[batch.labels[:, 0] != IGNORED]
        loss = (self.model.weight - used).square().sum() / 2 / num_targets * scale
        loss.backward()
        return loss.detach() / scale


ONE: Any = SimpleNamespace(scale=torch.ones(()))  # without a loss scale


def every_second(stages: Any, progress: Any, scaler: Any = ONE) -> NoiseScale:
    return NoiseScale(MetricsConfig(noise_scale_freq=2), stages, scaler, progress)


def run_step(noise: NoiseScale, stages: Any, batches: list[Batch], num_targets: Tensor) -> None:
    """Forward and backward of a step, as train.py does it."""
    noise.before_step(batches)
    for i, batch in enumerate(batches):
        scale = float(noise.scaler.scale)
        stages.forward_backward(batch, num_targets, scale)
        noise.after_backward(i, len(batches), num_targets)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_of_a_quadratic_with_known_covariance(seed):
    """x is drawn from N(mean, covariance), so the gradient of a row at w = 0 has these too, up to
    the sign.
    """
    width, generator = 40, torch.Generator().manual_seed(seed)
    mean = torch.randn(width, generator=generator) / 2
    deviation = torch.linspace(0.2, 3, width)
    expected = float(deviation.square().sum() / mean.square().sum())
    assert 5 < expected < 100
    stages, progress = Quadratic(width), SimpleNamespace(step=0)
    noise = every_second(stages, progress)
    assert noise.columns() == {"noise_scale": None}
    for step in range(1, 161):
        progress.step = step
        rows = mean + deviation * torch.randn(128, width, generator=generator)
        # Uneven numbers of targets
        labels = torch.where(torch.rand(128, 1, generator=generator) < 0.3, IGNORED, 0)
        labels[0] = 0  # without any, a measurement is left out
        batches = [Batch(*pair) for pair in zip(rows.split(8), labels.split(8), strict=True)]
        before = noise.averages
        run_step(noise, stages, batches, (labels != IGNORED).sum())
        assert torch.equal(noise.averages, before) == (step % 2 == 1)
        stages.model.zero_grad()
    assert noise.columns()["noise_scale"] == pytest.approx(expected, rel=0.2)


def noise_in_a_layout(
    parallel: dict, local_batch_size: int, tied: bool
) -> tuple[float, list[float], float]:
    """Noise scale, its averages, and the norm of the last gradient, after two steps of two local
    batches.
    """
    training = {"local_batch_size": local_batch_size, "global_batch_size": 8}
    stages = build_stages(parallel, 0, replace(EVEN, tied_embeddings=tied), **training)
    progress = SimpleNamespace(step=0)
    optimizer = torch.optim.SGD(
        [p for part in stages.model_parts for p in part.parameters()], lr=0.1
    )
    noise = NoiseScale(MetricsConfig(noise_scale_freq=1), stages, ONE, progress)
    mesh, norm = stages.mesh, torch.zeros(())
    for step in range(2):
        progress.step += 1
        tokens = torch.randint(104, (8, 17), generator=torch.Generator().manual_seed(step))
        labels = tokens[:, 1:].clone()
        labels[:3, :7] = IGNORED
        pairs = zip(
            tokens[:, :-1].split(local_batch_size), labels.split(local_batch_size), strict=True
        )
        batches = [Batch(*pair) for pair in pairs][mesh.data_rank :: mesh.data_size]
        num_targets = (labels != IGNORED).sum()
        noise.before_step(batches)
        for i, batch in enumerate(batches):
            stages.forward_backward(batch, num_targets, last=i == len(batches) - 1)
            noise.after_backward(i, len(batches), num_targets)
        norm = clip_gradients(stages.model_parts, 0.0, torch.device("cpu"), stages.shared_params)
        optimizer.step()
        optimizer.zero_grad()
    return noise.columns()["noise_scale"], noise.averages.tolist(), float(norm)


@pytest.fixture(scope="module")
def alone(pool) -> Any:
    return {
        tied: pool.run(1, noise_in_a_layout, {"dp_shard": 1}, 4, tied)[0] for tied in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "local_batch_size", "tied"),
    [
        ({"dp_shard": 2}, 2, True),
        ({"tp": 2}, 4, False),
        ({"cp": 2}, 4, False),
        ({"pp": 2}, 4, True),  # both stages hold the embedding
        pytest.param({"pp": 2, "pp_schedule": "ZBVZeroBubble"}, 4, True, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "tp": 2}, 2, False, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "dp_shard": 1}, 2, True, marks=pytest.mark.slow),
    ],
)
def test_is_the_same_in_every_layout(pool, alone, parallel, local_batch_size, tied):
    """Where the first local batches of all ranks have the same sequences.

    Gradients are as if not measured.
    """
    expected, averages, gradient = alone[tied]
    world_size = 4 if len(parallel) == 2 and "tp" in parallel else 2
    for noise, found, norm in pool.run(
        world_size, noise_in_a_layout, parallel, local_batch_size, tied
    ):
        assert found == pytest.approx(averages, rel=1e-5)
        assert noise == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(gradient, rel=1e-5)


def test_the_averages_are_saved_and_bad_measurements_are_left_out():
    stages, progress = Quadratic(3), SimpleNamespace(step=2)
    noise = every_second(stages, progress)
    rows = torch.randn(8, 3)

    def step(first: Tensor) -> None:
        labels = torch.zeros(4, 1, dtype=torch.int64)
        batches = [Batch(first, labels), Batch(rows[4:], labels)]
        run_step(noise, stages, batches, torch.tensor(8))

    step(rows[:4])
    before = noise.averages
    assert before.abs().min() > 0
    step(rows[:4] * float("nan"))
    assert torch.equal(noise.averages, before)
    other = every_second(stages, progress)
    other.load_state_dict(noise.state_dict())
    assert other.columns() == noise.columns()


def test_in_float16_the_average_does_not_depend_on_the_scale():
    """Gradients are multiplied by a scale that changes between measurements."""
    generator, found = torch.Generator().manual_seed(0), []
    rows, labels = (
        torch.randn(2, 2, 4, 3, generator=generator),
        torch.zeros(4, 1, dtype=torch.int64),
    )
    for scales in ((1.0, 1.0), (2.0**24, 2.0**3)):
        stages = Quadratic(3)
        scaler = SimpleNamespace(scale=torch.ones(()))
        noise = every_second(stages, SimpleNamespace(step=2), scaler)
        for scale, (first, second) in zip(scales, rows, strict=True):
            scaler.scale = torch.tensor(scale)
            batches = [Batch(first, labels), Batch(second, labels)]
            run_step(noise, stages, batches, torch.tensor(8))
            stages.model.zero_grad()
        found.append(noise.averages)
    assert torch.equal(found[0], found[1]), "scales are powers of two"
    assert found[0].abs().min() > 0
