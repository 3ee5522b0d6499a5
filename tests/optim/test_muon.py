"""Muon against torch's, against the singular value decomposition, in layouts, and when an update is
skipped.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from model_builder import EVEN, SMALL, build_stages, full, small_model
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlite.config.schema import OptimizerConfig
from titanlite.optim import muon
from titanlite.optim.muon import Muon, orthogonalize
from titanlite.optim.optimizer import build_optimizer

CONFIG = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.3)


@pytest.mark.parametrize("scale", ["adamw", "original"])
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)], ids=str)
def test_steps_are_those_of_torch(shape, scale):
    """torch computes the products in bfloat16, whose rounding is the difference."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(w) for w in torch.randn(*shape).expand(2, *shape).clone())
    config = OptimizerConfig(name="muon", muon_scale=scale, weight_decay=0.3, muon_momentum=0.9)
    others = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    optimizer = Muon([{"params": [ours], "lr": 0.02, "weight_decay": 0.3}], others, config)
    kind = {"adamw": "match_rms_adamw"}.get(scale, scale)
    reference = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.3, momentum=0.9, adjust_lr_fn=kind
    )
    for _ in range(6):
        before = ours.detach().clone()
        theirs.data.copy_(ours.data)
        gradient = torch.randn(*shape)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
        assert (ours - theirs).norm() <= 0.02 * (theirs - before).norm()
        torch.testing.assert_close(
            optimizer.state[ours]["exp_avg"], reference.state[theirs]["momentum_buffer"]
        )


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)], ids=str)
def test_the_result_has_the_singular_vectors_of_the_matrix(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    for matrix, found in zip(matrices, orthogonalize(matrices), strict=True):
        u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = u.T @ found.double() @ v.T
        large = s > 1e-2 * s.norm()
        assert large.sum() >= 15
        assert 0.67 < values.diag()[large].min() <= values.diag().max() < 1.21
        assert (values - values.diag().diag()).abs().max() < 1e-4
        assert (found - u @ v).norm() < 0.33 * math.sqrt(min(shape))  # the polar factor
    assert not orthogonalize(torch.zeros(1, *shape)).any()


def gradient_of(name: str, parameter: torch.Tensor, step: int) -> torch.Tensor:
    """The whole gradient of a parameter: the same in every layout."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
    return torch.randn(parameter.shape, generator=generator)


def stepped(
    parallel: dict[str, Any], llama: Any, config: OptimizerConfig
) -> tuple[dict[str, torch.Tensor], int]:
    """Weights and moments after two steps and a skipped one, whole; and how many matrices this rank
    orthogonalised.
    """
    parts = build_stages(parallel, 0, llama).model_parts
    optimizer, number = build_optimizer(parts, config), 0

    def counted(matrices: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += len(matrices)
        return orthogonalize(matrices)

    muon.orthogonalize = counted
    named = [pair for part in parts for pair in part.named_parameters()]
    for step in range(3):
        if step == 2:
            optimizer.found_inf = torch.ones(())
        for name, p in named:
            whole = gradient_of(name, p, step) * (1 if step < 2 else float("nan"))
            sharded = isinstance(p, DTensor)
            p.grad = (
                distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                if sharded
                else whole
            )
        optimizer.step()
    found = {name: full(p).detach() for name, p in named}
    return found | {
        f"{name}.exp_avg": full(optimizer.state[p]["exp_avg"]) for name, p in named
    }, number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("llama", "parallel"),
    [
        (SMALL, {"dp_shard": 3}),  # 32 rows in parts of 11, 11 and 10
        (dataclasses.replace(SMALL, ffn_dim=5), {"dp_shard": 4}),  # parts of 2, 2, 1 and no rows
        (SMALL, {"dp_replicate": 2, "dp_shard": 2}),
        (EVEN, {"dp_shard": 2, "tp": 2}),
        (EVEN, {"pp": 2, "tp": 2}),
        pytest.param(EVEN, {"dp_shard": 3, "tp": 2}, marks=pytest.mark.slow),
        pytest.param(EVEN, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param(EVEN, {"dp_shard": 2, "cp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_each_layout_orthogonalises_each_whole_matrix_once(pool, llama, parallel):
    ((expected, _),) = pool.run(1, stepped, {}, llama, CONFIG)
    ranks = pool.run(math.prod(parallel.values()), stepped, parallel, llama, CONFIG)
    matrices = 3 * 7 * llama.num_layers
    assert sum(number for _, number in ranks) == matrices
    if "pp" not in parallel:
        assert max(number for _, number in ranks) <= 3 * 7 * -(-llama.num_layers // len(ranks))
    names: set[str] = set()
    for found, _ in ranks:
        names |= found.keys()
        for name, value in found.items():
            assert (value - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
    assert names == expected.keys()


def test_embeddings_norms_and_output_are_adamws():
    model = small_model()
    optimizer = build_optimizer([model], CONFIG)
    assert isinstance(optimizer, Muon)
    mine = {id(p) for group in optimizer.matrices for p in group["params"]}
    by_muon = {name for name, p in model.named_parameters() if id(p) in mine}
    assert len(by_muon) == 7 * SMALL.num_layers
    assert {name.split(".")[2] for name in by_muon} == {"attention", "feed_forward"}
    adamw = build_optimizer([other := small_model()], OptimizerConfig(lr=0.02, weight_decay=0.3))
    for parameters, chosen in ((model, optimizer), (other, adamw)):
        for name, p in parameters.named_parameters():
            p.grad = gradient_of(name, p, 0)
        chosen.step()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs) == (name not in by_muon), name
        size = (mine - theirs).square().mean().sqrt()
        assert size < 0.03, "the size of an update is like AdamW's"


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_step_that_is_skipped_changes_no_bit(state_dtype):
    model = small_model()
    optimizer = build_optimizer([model], OptimizerConfig(name="muon", state_dtype=state_dtype))

    def everything() -> list[torch.Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]

    def step(value: float, found_inf: float | None) -> list[torch.Tensor]:
        for name, p in model.named_parameters():
            p.grad = gradient_of(name, p, 0) * value
        if found_inf is None:
            del optimizer.found_inf
        else:
            optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
        return everything()

    first = step(1.0, 0.0)
    if state_dtype == "float32":  # the AdamW of the others is torch's
        skipped = step(float("nan"), 1.0)
        assert all(torch.equal(a, b) for a, b in zip(first, skipped, strict=True))
    again = step(1.0, None)
    assert all(
        bool(b.isfinite().all()) and not torch.equal(a, b)
        for a, b in zip(first, again, strict=True)
    )


def test_a_skipped_step_of_matrices_in_low_precision_changes_no_bit():
    model = small_model().bfloat16()
    optimizer = build_optimizer([model], OptimizerConfig(name="muon", state_dtype="bfloat16"))
    optimizer.others.step = lambda: None
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    optimizer.found_inf = torch.tensor(1.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, float("inf"))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(
        torch.equal(a, state["exp_avg"])
        for a, state in zip(moments, optimizer.state.values(), strict=True)
    )
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
