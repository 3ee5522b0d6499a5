"""The optimizer's state in CPU memory: the same run, bit for bit, and the same checkpoints."""

from __future__ import annotations

import pytest
import torch
from runs import curve, train_run, train_until

from titanlite.checkpoint.manifest import read_manifest
from titanlite.config.schema import OptimizerConfig
from titanlite.optim import offload
from titanlite.optim.optimizer import build_optimizer

OFFLOAD = "--parallel.optimizer_offload"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (1, ["--optimizer.decayed=linear"]),
        (2, []),
        pytest.param(
            2, ["--parallel.tp=2", "--optimizer.state_dtype=bfloat16"], marks=pytest.mark.slow
        ),
        pytest.param(
            1,
            ["--training.compute_dtype=float16", "--training.loss_scale=16777216"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_run_is_the_same_bit_for_bit_also_when_resumed(
    pool, arguments, tmp_path, processes, more
):
    """And if it is stopped with offloading and resumed without."""
    run = [*arguments, *more, "--validation.freq=0"]
    assert pool.run(processes, train_run, [*run, "--run.name=plain"]) == [0] * processes
    assert (
        pool.run(processes, train_run, [*run, "--run.name=offloaded", OFFLOAD]) == [0] * processes
    )
    assert (
        pool.run(processes, train_until, 3, [*run, "--run.name=resumed", OFFLOAD])
        == [75] * processes
    )
    assert pool.run(processes, train_run, [*run, "--run.name=resumed"]) == [0] * processes
    manifests = [
        read_manifest(tmp_path / name / "checkpoints/step-6")
        for name in ("plain", "offloaded", "resumed")
    ]
    for name, manifest in zip(("offloaded", "resumed"), manifests[1:], strict=True):
        assert curve(tmp_path / name) == curve(tmp_path / "plain")
        assert manifest.tensors.keys() == manifests[0].tensors.keys()


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_pieces_hold_few_parameters_and_withhold_an_update_together(monkeypatch, state):
    monkeypatch.setattr(offload, "PIECE_NUMEL", 20)
    models = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
        )
        options = OptimizerConfig(decayed="linear", state_dtype=state)
        optimizer = build_optimizer([model], options, offloaded)
        if offloaded:
            pieces = offload.pieces(optimizer.param_groups)
            sizes = [sum(p.numel() for group in piece for p in group["params"]) for piece in pieces]
            assert sizes == [12, 24, 17], "a tensor is not divided"
        calls = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        for step in range(4):
            if state == "float32":
                optimizer.found_inf = torch.tensor(float(step == 2))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * (step + 1)
            optimizer.step()
        assert len(calls) == 4
        models.append(
            [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
        )
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
