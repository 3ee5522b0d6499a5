"""Norms of layers: against their definition, and the same in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_builder import EVEN, build_stages, small_model

from titanlite.config.schema import OptimizerConfig
from titanlite.data.rows import Batch
from titanlite.optim.clip import clip_gradients
from titanlite.optim.loss import cross_entropy_sum
from titanlite.optim.optimizer import build_optimizer
from titanlite.probes.layer_norms import FIGURES, LayerNorms

TOKENS = torch.randint(104, (4, 17), generator=torch.Generator().manual_seed(3))
TIED = replace(EVEN, tied_embeddings=True)
OPTIMIZER = OptimizerConfig(lr=0.01, eps=1e-5)


def rows_of_a_run(parallel: dict, tied: bool) -> list[dict[str, Any]]:
    """The rows of three steps, of which the second is measured."""
    local = 4 // (parallel.get("dp_shard", 1) * parallel.get("dp_replicate", 1))
    stages = build_stages(parallel, 0, TIED if tied else EVEN, local_batch_size=local)
    optimizer = build_optimizer(stages.model_parts, OPTIMIZER)
    rows: list[dict[str, Any]] = []
    device = torch.device("cpu")
    metrics: Any = SimpleNamespace(
        progress=SimpleNamespace(step=0), device=device, write=rows.append
    )
    norms = LayerNorms(2, stages, metrics)
    own = slice(stages.mesh.data_rank, None, stages.mesh.data_size)
    for step in (1, 2, 3):
        metrics.progress.step = step
        stages.forward_backward(Batch(TOKENS[own, :-1], TOKENS[own, 1:]), torch.tensor(64))
        clip_gradients(stages.model_parts, 0.5, device, stages.shared_params)
        norms.before_update()
        optimizer.step()
        norms.after_update()
        optimizer.zero_grad()
    return rows


def expected_row(tied: bool) -> dict[str, float]:
    """From the whole model, with torch's own optimizer and norms in float64."""
    model = small_model(config=TIED if tied else EVEN)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        OPTIMIZER.lr,
        OPTIMIZER.betas,
        OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    row: dict[str, float] = {}
    for _ in range(2):
        (cross_entropy_sum(model(TOKENS[:, :-1]), TOKENS[:, 1:]) / 64).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients = [p.grad.clone() for p in model.parameters()]
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        groups: dict[str, list[tuple]] = {}
        for (name, p), gradient, old in zip(
            model.named_parameters(), gradients, before, strict=True
        ):
            layer = (
                name.removesuffix(".weight") if "layers" not in name else name[: len("layers.0")]
            )
            groups.setdefault(layer, []).append((gradient, old, p.detach() - old))
        for layer, tensors in groups.items():
            norms = [
                torch.cat([t.flatten().double() for t in column]).norm()
                for column in zip(*tensors, strict=True)
            ]
            values = float(norms[0]), float(norms[1]), float(norms[2] / norms[1])
            row |= {f"{name}/{layer}": value for name, value in zip(FIGURES, values, strict=True)}
    return row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "parallel", "tied"),
    [
        (1, {"dp_shard": 1}, True),
        (2, {"dp_shard": 2}, False),
        (2, {"tp": 2}, True),
        (2, {"cp": 2}, False),
        (2, {"pp": 2}, True),  # both stages hold the embedding
        pytest.param(4, {"dp_shard": 2, "tp": 2}, False, marks=pytest.mark.slow),
        pytest.param(2, {"dp_replicate": 2, "dp_shard": 1}, True, marks=pytest.mark.slow),
    ],
)
def test_equal_their_definition_in_every_layout(pool, world_size, parallel, tied):
    expected = expected_row(tied)
    assert len(expected) == 3 * (EVEN.num_layers + (2 if tied else 3))
    for (row,) in pool.run(world_size, rows_of_a_run, parallel, tied):
        assert row.pop("step") == 2
        assert row == pytest.approx(expected, rel=1e-4)
        gradients = [value for name, value in row.items() if name.startswith("gradient_norm")]
        # They were clipped
        assert sum(value**2 for value in gradients) == pytest.approx(0.25, rel=1e-4)


def test_a_row_is_json_also_where_a_norm_is_not_finite():
    stages = SimpleNamespace(model_parts=[small_model(config=TIED)], shared_params=[])
    optimizer = torch.optim.SGD(stages.model_parts[0].parameters(), lr=0.1)
    written: list[dict[str, Any]] = []
    metrics: Any = SimpleNamespace(
        progress=SimpleNamespace(step=4), device=torch.device("cpu"), write=written.append
    )
    norms = LayerNorms(4, stages, metrics)
    for name, parameter in stages.model_parts[0].named_parameters():
        parameter.grad = torch.full_like(
            parameter, float("inf") if name.startswith("norm") else 0.0
        )
    norms.before_update()
    optimizer.step()
    norms.after_update()
    (row,) = written
    json.dumps(row, allow_nan=False)
    assert row["gradient_norm/norm"] is None
    assert row["update_ratio/layers.0"] == 0
