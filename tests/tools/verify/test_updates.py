"""The updates of the reference against torch, and layouts whose updates are wrong on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_builder import small_model

from titanlite.config.schema import GroupConfig, OptimizerConfig
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.optim import agc, z_loss
from titanlite.tools.faults.catalogue import find_fault
from titanlite.tools.faults.fault import replaced
from titanlite.tools.verify.campaign import FIGURES, judge
from titanlite.tools.verify.compare import measure, reference
from titanlite.tools.verify.ladder import Case, make_case
from titanlite.tools.verify.updates import Updates, clip, newton_schulz

SMALL = ["debug", "--model.dim=32", "--model.ffn_dim=64", "--training.seq_len=32"]
ALL = "optimizer.name=muon,optimizer.decayed=linear,optimizer.clip=agc,loss.z_loss=1e-2"


@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8)], ids=str)
def test_newton_schulz_is_near_the_polar_factor(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert (newton_schulz(matrix) - u @ v).norm() < 0.33 * min(shape) ** 0.5
    assert not newton_schulz(torch.zeros(shape)).any(), "of an expert that no token has chosen"


@pytest.mark.parametrize("decayed", ["all", "linear"])
def test_updates_of_groups_are_those_of_torch(decayed):
    models = small_model(), small_model()
    groups = (GroupConfig("norm.*", 0.3, 0.2), GroupConfig("*.wq.weight", weight_decay=0.0))
    updates = Updates(models[0], OptimizerConfig(lr=0.01, decayed=decayed, groups=groups))
    kinds: dict[tuple[float, float], list] = {}
    for name, p in models[1].named_parameters():
        none = "wq" in name or (
            decayed == "linear" and ("norm" in name or "tok_embeddings" in name)
        )
        kind = (0.3, 0.2) if name == "norm.weight" else (0.01, 0.0 if none else 0.1)
        kinds.setdefault(kind, []).append(p)
    groups_of_torch = [
        {"params": p, "lr": lr, "weight_decay": decay} for (lr, decay), p in kinds.items()
    ]
    theirs = torch.optim.AdamW(groups_of_torch, betas=(0.9, 0.95))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        a.grad = b.grad = torch.randn_like(a)
    updates.step()
    theirs.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_many_units_are_clipped_by_default():
    """So layouts that clip wrongly differ."""
    model = small_model()
    tokens = torch.randint(101, (2, 13))
    torch.nn.functional.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    ).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    clip(model, OptimizerConfig(clip="agc"), 1.0, 9.0)
    changed = [
        name for name, p in model.named_parameters() if not torch.equal(p.grad, before[name])
    ]
    assert {
        "tok_embeddings.weight",
        "layers.0.attention.wo.weight",
        "layers.2.feed_forward.w2.weight",
    } <= set(changed)
    assert "output.weight" not in changed


def case(layout: str) -> tuple[Case, LlamaConfig]:
    made = make_case(SMALL, f"{layout},{ALL}", "cpu")
    return made, resolve_flavor(made.config.model, 4112)


@pytest.fixture(scope="module")
def right(pool, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "right.pt"
    made, llama = case("dp_shard=1")
    pool.run(1, reference, made.config, llama, path)
    return path


# Faults that are not in the catalogue of `titanlite break`: clipping by units and z-loss are options
# that no other trainer has cut over ranks
OWN = {
    "parts_of_units": lambda: replaced(agc, "_axes_within_units", lambda *arguments: []),
    "own_vocabulary": lambda: replaced(
        z_loss, "log_partition", lambda logits, mesh: torch.logsumexp(logits, -1)
    ),
}
RIGHT = "right"  # no fault


def measure_with(fault: str, *arguments: Any) -> dict[str, float]:
    """In a worker: the comparison, with a fault of this file or of the catalogue."""
    if fault == RIGHT:
        return measure(*arguments)
    plant = OWN[fault] if fault in OWN else find_fault(fault).plant
    with plant():
        return measure(*arguments)


@pytest.mark.parametrize(
    ("fault", "layout", "figure"),
    [
        pytest.param(RIGHT, "dp_shard=2,tp=2", "", marks=pytest.mark.slow),
        pytest.param(RIGHT, "cp=2", "", marks=pytest.mark.slow),
        ("muon-of-shards", "dp_shard=2", "parameters"),
        pytest.param("parts_of_units", "tp=2", "parameters", marks=pytest.mark.slow),
        pytest.param("own_vocabulary", "tp=2", "loss", marks=pytest.mark.slow),
    ],
)
def test_wrong_updates_fail(pool, right, fault, layout, figure):
    made, llama = case(layout)
    ranks = pool.run(made.processes, measure_with, fault, made.config, llama, right)
    row = judge(made, {name: max(rank[name] for rank in ranks) for name in FIGURES}, 0.0)
    assert row["passed"] == (fault == RIGHT), row
    assert not figure or row[figure] > 1e-4, row
