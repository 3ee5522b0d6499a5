"""What is measured in whole runs: its rows, its state, and that training is the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import refused
from runs import rows, train_run, train_until

from titanlite.config.schema import MetricsConfig
from titanlite.probes.noise_scale import NoiseScale
from titanlite.probes.probes import Probes
from titanlite.tools.formats.convert import load_full_state

MEASURED = [
    "--metrics.noise_scale_freq=2",
    "--metrics.layer_norms_freq=3",
    "--metrics.activations_freq=4",
]
MEASURED += ["--ema.decay=0.9"]


@pytest.mark.slow
def test_rows_of_a_run(pool, arguments, tmp_path):
    assert pool.run(2, train_run, [*arguments, *MEASURED]) == [0, 0]
    found = rows(tmp_path / "debug")
    names: dict[str, list[int]] = {}
    for row in found:
        for name in row:
            names.setdefault(
                name.partition("/")[0] if "validation" not in name else name, []
            ).append(row["step"])
    assert set(names["gradient_norm"]) == set(names["update_ratio"]) == {3, 6}
    assert set(names["activation_rms"]) == set(names["attention_logit"]) == {4}
    assert names["validation/numbers/ema_loss"] == names["validation/numbers/loss"] == [0, 3, 6]
    noise = {row["step"]: row["noise_scale"] for row in found if "noise_scale" in row}
    assert list(noise) == [1, 2, 3, 4, 5, 6]
    assert noise[1] is None
    assert noise[2] == noise[3]


@pytest.mark.slow
def test_a_resumed_run_continues_the_noise_scale(pool, options, tmp_path):
    whole, resumed = (
        [*options, *MEASURED, f"--run.folder={tmp_path / name}"] for name in ("whole", "resumed")
    )
    assert pool.run(1, train_run, whole) == [0]
    assert pool.run(1, train_until, 4, resumed) == [75]
    assert pool.run(1, train_run, resumed) == [0]
    runs = [
        {r["step"]: r for r in rows(tmp_path / name / "debug") if "loss" in r}
        for name in ("whole", "resumed")
    ]
    assert runs[0].keys() == runs[1].keys()
    for step, row in runs[0].items():
        assert runs[1][step]["noise_scale"] == row["noise_scale"]
    state = [load_full_state(tmp_path / name / "debug").others for name in ("whole", "resumed")]
    averages = [others["noise_scale.averages"].read().tolist() for others in state]
    assert averages[0] == averages[1]
    assert all(averages[0])


def refused_run(arguments: list[str]) -> None:
    with refused(
        "metrics.noise_scale_freq = 5", "training.global_batch_size = 8", error=AssertionError
    ):
        train_run(arguments)


def test_what_cannot_be_measured_is_refused(pool, arguments):
    wrong = [*arguments, "--metrics.noise_scale_freq=5", "--training.local_batch_size=4"]
    assert pool.run(2, refused_run, wrong) == [None, None]


def test_at_the_defaults_nothing_is_measured():
    model = SimpleNamespace(
        config=SimpleNamespace(num_layers=0, tied_embeddings=True), named_parameters=list
    )
    mesh = SimpleNamespace(device_type="cpu")
    stages: Any = SimpleNamespace(mesh=mesh, model_parts=[model], shared_params=[])
    metrics: Any = SimpleNamespace(device=torch.device("cpu"), progress=SimpleNamespace(step=0))
    config = MetricsConfig()
    noise_scale = NoiseScale(config, stages, SimpleNamespace(), metrics.progress)
    probes = Probes(config, stages, noise_scale, metrics)
    probes.before_step([])
    probes.after_backward(0, 2, torch.tensor(8))
    probes.before_update()
    probes.after_update()
    assert (noise_scale.state_dict(), noise_scale.columns()) == ({}, {})
    noise_scale.load_state_dict({})
