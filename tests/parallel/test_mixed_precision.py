"""Casts on one rank: what FSDP computes there, with parameters and gradients in fp32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from model_builder import SMALL, build_stages, small_model

from titanlite.config.schema import CompileConfig, LossConfig, RecomputeConfig
from titanlite.data.rows import Batch
from titanlite.optim.loss import cross_entropy_sum

UNTIED = dataclasses.replace(SMALL, tied_embeddings=False)
TIED = dataclasses.replace(SMALL, tied_embeddings=True)
EMBEDDING = "tok_embeddings.weight"
Gradients = dict[str, torch.Tensor]


def gradients_of(
    parallel: dict[str, Any], llama: Any, sections: list[Any], compute: str
) -> Gradients:
    """Gradients after two local batches in which tokens occur more than once."""
    torch._dynamo.reset()
    stages = build_stages(parallel, 0, llama, *sections, compute_dtype=compute)
    (model,) = stages.model_parts
    tokens = torch.randint(20, (4, 17), generator=torch.Generator().manual_seed(0))
    for i, rows in enumerate(tokens.split(2)):
        stages.forward_backward(Batch(rows[:, :-1], rows[:, 1:]), torch.tensor(64), last=i == 1)
    assert (
        {p.dtype for p in model.parameters()}
        == {p.grad.dtype for p in model.parameters()}
        == {torch.float32}
    )
    assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == {
        name: tuple(p.shape) for name, p in small_model(config=llama).state_dict().items()
    }
    return {
        name: getattr(p.grad, "to_local", lambda p=p: p.grad)()
        for name, p in model.named_parameters()
    }


def exact(llama: Any) -> Gradients:
    """The gradients of the same weights and tokens in fp64."""
    model = small_model(config=llama).double()
    tokens = torch.randint(20, (4, 17), generator=torch.Generator().manual_seed(0))
    (cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / 64).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compare(llama: Any, sections: list[Any]) -> None:
    cast = gradients_of({}, llama, sections, "bfloat16")
    sharded = gradients_of({"reshard_after_forward": "always"}, llama, sections, "bfloat16")
    right = exact(llama)
    assert cast.keys() == sharded.keys() == right.keys()
    for name, gradient in cast.items():
        wrong = [
            (found - right[name]).norm() / right[name].norm() for found in (gradient, sharded[name])
        ]
        assert 1e-4 < wrong[0] < 3e-2, "in bfloat16"
        # Here the rows of a token, and the two uses if tied, are added in fp32
        if name == EMBEDDING:
            assert wrong[0] <= wrong[1]
        else:
            assert torch.equal(gradient, sharded[name]), name


@pytest.mark.parametrize(
    ("llama", "sections"),
    [
        (UNTIED, []),
        (TIED, []),
        (UNTIED, [LossConfig(num_chunks=3)]),
        (TIED, [LossConfig(num_chunks=3)]),
        (TIED, [RecomputeConfig(mode="full")]),
        pytest.param(
            UNTIED,
            [CompileConfig(enabled="true", backend="aot_eager")],
            marks=pytest.mark.slow,  # test_compile: gradients of compiled blocks
        ),
    ],
    ids=["untied", "tied", "chunks", "tied, chunks", "recomputed", "compiled"],
)
def test_gradients_are_those_of_fsdp_on_one_rank(pool, llama, sections):
    pool.run(1, compare, llama, sections)


def compiled_graphs() -> int:
    gradients_of({}, SMALL, [CompileConfig(enabled="true", backend="aot_eager")], "bfloat16")
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_all_blocks_share_one_compiled_graph(pool):
    assert pool.run(1, compiled_graphs) == [1]


def kinds(compute: str) -> list[bool]:
    (model,) = build_stages({}, compute_dtype=compute).model_parts
    return [
        type(module).__module__.endswith("mixed_precision")
        for module in model.modules()
        if hasattr(module, "weight")
    ]


def test_nothing_is_cast_without_need(pool):
    assert not any(pool.run(1, kinds, "float32")[0])
    assert all(pool.run(1, kinds, "bfloat16")[0])
