"""With `data.document_mask` a document is computed as if it were alone, in every layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from model_builder import EVEN, build_stages, small_model
from torch.nn.attention import flex_attention

from titanlite.config.schema import CompileConfig, DataConfig
from titanlite.data.rows import IGNORED, Batch
from titanlite.model import block_mask, llama
from titanlite.parallel.context_parallel import local_positions

DOCUMENTS = [[5, 7, 12], [10, 1, 13]]  # their lengths in two rows
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
TOKENS = torch.randint(104, POSITIONS.shape, generator=torch.Generator().manual_seed(1))
LABELS = torch.where(POSITIONS.roll(-1) > 0, TOKENS.roll(-1), IGNORED)
SEQ_LEN = POSITIONS.shape[1]
LLAMA = dataclasses.replace(EVEN, dim=64)  # heads of 16 numbers
COMPILED = CompileConfig(enabled="true", backend="aot_eager")


def logits(
    parallel: dict[str, Any], blocks: bool, *sections: Any
) -> tuple[list[int], torch.Tensor | None]:
    """This rank's part of the logits of a training step, if it has one, and where it is in the
    sequence.

    Those of an evaluation must be equal. `blocks`: with FlexAttention, as on CUDA.
    """
    if blocks:
        llama.document_mask = block_mask.block_mask
        block_mask.compiled_flex_attention = lambda: flex_attention.flex_attention
        # That there is no kernel for a backward on CPUs
        flex_attention._validate_device = lambda *tensors: None
    settings = (DataConfig(document_mask=True), *sections)
    stages = build_stages(parallel, 0, LLAMA, *settings, seq_len=SEQ_LEN, local_batch_size=2)
    outputs, loss = [], stages.runner.loss

    def keep(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs.append(output.detach())
        return loss(output, labels)

    stages.runner.loss = keep
    stages.forward_backward(Batch(TOKENS, LABELS, POSITIONS), torch.tensor(40))
    trained, outputs[:] = outputs.copy(), []
    stages.evaluate(Batch(TOKENS, LABELS, POSITIONS))
    torch.testing.assert_close(outputs, trained)
    here = torch.arange(SEQ_LEN)
    if parallel.get("cp"):
        here = local_positions(SEQ_LEN, stages.mesh["cp"], parallel.get("cp_method", "all_gather"))
    return here.tolist(), torch.cat(outputs) if outputs else None  # of all microbatches


def whole(
    parts: list[tuple[list[int], torch.Tensor | None]], parallel: dict[str, Any]
) -> torch.Tensor:
    """(2, S, V) from the parts of all ranks."""
    tensors = [part for _, part in parts if part is not None]
    if parallel.get("cp"):
        order = torch.tensor([position for here, _ in parts for position in here])
        return torch.cat(tensors, dim=1)[:, order.argsort()]
    return torch.cat(tensors, dim=2)  # tp: the vocabulary


def assert_documents_are_alone(found: torch.Tensor) -> None:
    model = small_model(SEQ_LEN, config=LLAMA)
    for row, tokens, lengths in zip(found, TOKENS, DOCUMENTS, strict=True):
        for packed, document in zip(row.split(lengths), tokens.split(lengths), strict=True):
            torch.testing.assert_close(packed, model(document[None])[0].detach(), rtol=0, atol=1e-5)


ULYSSES = {"cp": 2, "cp_method": "ulysses"}
LAYOUTS = [{}, {"tp": 2}, {"cp": 2}, ULYSSES, {"pp": 2}]


@pytest.mark.parametrize(
    ("parallel", "blocks", "compiled"),
    [
        *((parallel, False, False) for parallel in LAYOUTS[1:]),
        ({}, False, True),
        ({"cp": 2}, True, False),
        *(
            pytest.param(parallel, blocks, compiled, marks=pytest.mark.slow)
            for parallel in LAYOUTS
            for blocks in (False, True)
            for compiled in (False, True)
            if (blocks or compiled if parallel else blocks or not compiled)
            and (parallel, blocks, compiled) != ({"cp": 2}, True, False)
        ),
    ],
    ids=str,
)
def test_logits_of_a_packed_document_are_those_of_the_document_alone(
    pool, parallel, blocks, compiled
):
    sections = [COMPILED] if compiled else []
    degrees = {"dp_shard": 1, **parallel}
    parts = pool.run(2 if parallel else 1, logits, degrees, blocks, *sections, timeout=120)
    assert_documents_are_alone(whole(parts, parallel))


def test_another_mask_or_other_positions_are_seen():
    """What the test above relies on, with the model alone."""
    model, documents = small_model(SEQ_LEN, config=LLAMA), (POSITIONS == 0).cumsum(1)
    assert_documents_are_alone(model(TOKENS, positions=POSITIONS, documents=documents).detach())
    for wrong in (
        {"positions": POSITIONS, "documents": torch.zeros_like(documents)},
        {"positions": POSITIONS.clamp(max=11), "documents": documents},
        {"positions": POSITIONS, "documents": documents.clamp(max=2)},
    ):
        with pytest.raises(AssertionError, match="not close"):
            assert_documents_are_alone(model(TOKENS, **wrong).detach())
