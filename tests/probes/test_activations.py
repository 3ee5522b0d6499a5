"""Activation statistics: against the activations themselves, in every layout, with compiled blocks
too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_builder import EVEN, build_stages, small_model
from torch.nn.attention.bias import causal_lower_right

from titanlite.config.schema import CompileConfig, DataConfig
from titanlite.data.rows import Batch
from titanlite.model.attention import document_mask
from titanlite.model.llama import apply_rope
from titanlite.probes import activations
from titanlite.probes.activations import FIGURES, Activations, largest_logit
from titanlite.tools.torch_private import num_compiled_graphs

TOKENS = torch.randint(104, (4, 16), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.tensor([*range(5), *range(11)]).expand(4, -1)  # two documents


def scaled(model: Any) -> Any:
    """Weights with activations and logits that differ between blocks and documents."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention.w" in name or "feed_forward" in name:
                parameter.mul_(3 + int(name.split(".")[1]))
    return model


def row_in_a_layout(
    parallel: dict, documents: bool = False, compiled: bool = False, logits: bool = True
) -> list[Any]:
    """The row, whether the batch is unchanged, and how many graphs were compiled for it and after
    it.
    """
    compile = CompileConfig(enabled="true" if compiled else "false", backend="aot_eager")
    sections, local = (
        (compile, DataConfig(document_mask=documents)),
        4 // parallel.get("dp_shard", 1),
    )
    stages = build_stages(parallel, 0, EVEN, *sections, local_batch_size=local)
    for part in stages.model_parts:
        scaled(part)
    rows: list[dict[str, Any]] = []
    metrics: Any = SimpleNamespace(
        progress=SimpleNamespace(step=7), device=torch.device("cpu"), write=rows.append
    )
    own = slice(stages.mesh.data_rank, None, stages.mesh.data_size)
    batch = Batch(TOKENS[own], TOKENS[own].roll(-1, 1), POSITIONS[own] if documents else None)
    measured = Activations(1, stages, metrics)
    measured.has_logits = lambda batch: logits
    graphs = []
    for _ in range(2):
        stages.forward_backward(batch, torch.tensor(64))
        graphs.append(num_compiled_graphs())
        measured.measure(batch)
    stages.forward_backward(batch, torch.tensor(64))
    assert rows[0] == rows[1]
    assert num_compiled_graphs() == graphs[1]  # the second row compiles nothing
    return [
        rows[0],
        torch.equal(batch.tokens, TOKENS[own]),
        num_compiled_graphs() - graphs[0],
        graphs[0],
    ]


@torch.no_grad()
def expected_row(documents: bool) -> dict[str, float]:
    """Computed block by block, with all logits at once."""
    model = scaled(small_model(config=EVEN))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    numbers = (POSITIONS == 0).cumsum(1)
    if documents:
        mask = mask & (numbers[0, :, None] == numbers[0])
    rope = model.rope[POSITIONS] if documents else model.rope
    x, row = model.tok_embeddings(TOKENS), {}
    for i, block in enumerate(model.layers.values()):
        attention = block.attention
        q, k = (
            w(block.attention_norm(x)).unflatten(-1, (-1, 8)) for w in (attention.wq, attention.wk)
        )
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) / 8**0.5
        x = block(x, rope, document_mask(numbers) if documents else None)
        values = x.mean(), x.square().mean().sqrt(), x.abs().max(), logits[..., mask].max()
        row |= {
            f"{name}/layers.{i}": float(value) for name, value in zip(FIGURES, values, strict=True)
        }
    return row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "parallel", "documents"),
    [
        (1, {"dp_shard": 1}, False),
        (2, {"dp_shard": 2}, False),
        (2, {"tp": 2}, False),
        (2, {"cp": 2}, True),
        (2, {"cp": 2}, False),
        (2, {"pp": 2}, True),
        pytest.param(1, {"dp_shard": 1}, True, marks=pytest.mark.slow),
        pytest.param(2, {"cp": 2, "cp_method": "ulysses"}, False, marks=pytest.mark.slow),
        pytest.param(2, {"tp": 2}, True, marks=pytest.mark.slow),
        pytest.param(4, {"cp": 2, "tp": 2}, False, marks=pytest.mark.slow),
        pytest.param(4, {"pp": 2, "dp_shard": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_equal_their_definition_in_every_layout(pool, world_size, parallel, documents):
    expected = expected_row(documents)
    for row, unchanged, _, _ in pool.run(world_size, row_in_a_layout, parallel, documents):
        assert row.pop("step") == 7
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert unchanged


def test_compiled_blocks_run_eagerly_and_stay_compiled(pool):
    expected = expected_row(False)
    ((row, _, more, before),) = pool.run(1, row_in_a_layout, {"dp_shard": 1}, False, True)
    assert row.pop("step") == 7
    assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert before > 0
    assert more == 0


@pytest.mark.slow
def test_compiled_blocks_run_compiled_without_the_logits(pool):
    """Their outputs are seen by hooks outside of the compiled graphs, one of which is that of a
    forward alone.
    """
    expected = expected_row(False)
    ((row, _, more, _),) = pool.run(1, row_in_a_layout, {"dp_shard": 1}, False, True, False)
    assert row.pop("step") == 7
    kept = {
        name: value for name, value in expected.items() if not name.startswith("attention_logit")
    }
    assert row == pytest.approx(kept, rel=1e-4, abs=1e-6)
    assert more > 0


@pytest.mark.parametrize(
    ("device", "windowed", "documents", "expected"),
    [
        ("cuda", False, False, True),
        ("cuda", True, False, False),
        ("cuda", False, True, False),
        ("cpu", True, True, True),
    ],
)
def test_flex_attention_has_no_logits(device, windowed, documents, expected):
    """It serves documents and windows on CUDA."""
    stages: Any = SimpleNamespace(
        mesh={"cp": SimpleNamespace(size=lambda: 1)},
        windowed=windowed,
        model_parts=[SimpleNamespace(config=EVEN)],
    )
    metrics: Any = SimpleNamespace(device=torch.device("cpu"))
    measured = Activations(1, stages, metrics)
    metrics.device = torch.device(device)
    batch = Batch(TOKENS, TOKENS, POSITIONS if documents else None)
    assert measured.has_logits(batch) == expected


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
def test_the_largest_logit_is_that_of_pairs_that_attend(monkeypatch, chunk):
    monkeypatch.setattr(activations, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(2, 4, 6, 8, generator=generator),
        torch.randn(2, 2, 10, 8, generator=generator),
    )
    logits = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / 8**0.5  # (2, 4, 6, 10)
    late = torch.ones(6, 10, dtype=torch.bool).tril(4)
    some = torch.rand(2, 1, 6, 10, generator=generator) < 0.2
    masked = logits.masked_fill(~some, -1e9).max()
    assert float(largest_logit(q, k, None, False)) == pytest.approx(float(logits.max()))
    assert float(largest_logit(q, k, causal_lower_right(6, 10), False)) == pytest.approx(
        float(logits[..., late].max())
    )
    assert float(largest_logit(q, k, some, False)) == pytest.approx(float(masked))
    square = logits[..., :6][..., torch.ones(6, 6, dtype=torch.bool).tril()].max()
    assert float(largest_logit(q, k[:, :, :6], None, True)) == pytest.approx(float(square))
