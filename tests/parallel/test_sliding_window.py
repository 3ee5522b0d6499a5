"""A sliding window is the same in every layout; `tests/model/test_llama.py` compares one process
with float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from model_builder import EVEN, build_stages, small_model
from torch.nn.attention import flex_attention

from titanlite.config.schema import CompileConfig, DataConfig
from titanlite.data.rows import IGNORED, Batch
from titanlite.model import block_mask
from titanlite.model import llama as llama_module
from titanlite.model.flavors import LlamaConfig
from titanlite.parallel.context_parallel import local_positions

SEQ_LEN = 24
TOKENS = torch.randint(104, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(SEQ_LEN) < SEQ_LEN - 1, TOKENS.roll(-1, 1), IGNORED)
DOCUMENTS = [[5, 7, 12], [10, 1, 13]]  # their lengths in two rows
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
LLAMA = dataclasses.replace(EVEN, dim=64, sliding_window=4)  # heads of 16 numbers
SOME = dataclasses.replace(LLAMA, window_layers="0, 3")
COMPILED = CompileConfig(enabled="true", backend="aot_eager")


def logits(
    parallel: dict[str, Any], llama: LlamaConfig, documents: bool, blocks: bool, *sections: Any
) -> tuple[list[int], torch.Tensor | None]:
    """This rank's part of the logits of a training step, if it has one, and where it is in the
    sequence.

    `blocks`: with FlexAttention, as on CUDA.
    """
    if blocks:
        llama_module.document_mask = block_mask.block_mask
        block_mask.compiled_flex_attention = lambda: flex_attention.flex_attention
        # That there is no kernel for a backward on CPUs
        flex_attention._validate_device = lambda *tensors: None
    settings = (DataConfig(document_mask=documents), *sections)
    stages = build_stages(parallel, 0, llama, *settings, seq_len=SEQ_LEN, local_batch_size=2)
    outputs = []
    loss = stages.runner.loss

    def keep(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs.append(output.detach())
        return loss(output, labels)

    stages.runner.loss = keep
    batch = Batch(TOKENS, LABELS, POSITIONS if documents else None)
    stages.forward_backward(batch, torch.tensor(40))
    trained = outputs.copy()
    outputs.clear()
    stages.evaluate(batch)
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


def expected(llama: LlamaConfig, documents: bool) -> torch.Tensor:
    """By the model alone; each document by itself."""
    model = small_model(SEQ_LEN, config=llama)
    if not documents:
        return model(TOKENS).detach()
    rows = []
    for tokens, lengths in zip(TOKENS, DOCUMENTS, strict=True):
        rows.append(
            torch.cat([model(document[None])[0].detach() for document in tokens.split(lengths)])
        )
    return torch.stack(rows)


ULYSSES = {"cp": 2, "cp_method": "ulysses"}
LAYOUTS = [{}, {"tp": 2}, {"cp": 2}, ULYSSES, {"pp": 2}]
FAST = [
    ({}, LLAMA, False, True, True),
    ({"cp": 2}, SOME, True, False, False),
    ({"pp": 2}, SOME, False, False, False),
    ({"tp": 2}, LLAMA, False, False, False),
]
SLOW = [
    case
    for parallel in LAYOUTS
    for llama in (LLAMA, SOME)
    for documents in (False, True)
    for blocks in (False, True)
    for case in [(parallel, llama, documents, blocks, blocks)]
    if case not in FAST
]
SLOW.append(({"pp": 2}, SOME, False, False, True))
SLOW.append(({"cp": 2}, SOME, False, True, False))


@pytest.mark.parametrize(
    ("parallel", "llama", "documents", "blocks", "compiled"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda value: value.window_layers if isinstance(value, LlamaConfig) else str(value),
)
def test_logits_are_those_of_one_process(pool, parallel, llama, documents, blocks, compiled):
    sections = [COMPILED] if compiled else []
    degrees = {"dp_shard": 1, **parallel}
    parts = pool.run(
        2 if parallel else 1, logits, degrees, llama, documents, blocks, *sections, timeout=120
    )
    right = expected(llama, documents)
    torch.testing.assert_close(whole(parts, parallel), right, rtol=0, atol=1e-5)
    other = expected(dataclasses.replace(llama, sliding_window=5), documents)
    assert (other - right).abs().max() > 1e-3, "one position more is seen"


def per_token(window: int) -> list[str]:
    """What blocks are given besides tokens."""
    llama = dataclasses.replace(EVEN, sliding_window=window)
    stages = build_stages({"dp_shard": 1}, 0, llama, seq_len=SEQ_LEN)
    with stages.inputs(Batch(TOKENS, LABELS)) as inputs:
        return list(inputs.per_token)


@pytest.mark.parametrize(("window", "given"), [(23, ["documents"]), (24, []), (30, []), (0, [])])
def test_a_window_that_holds_the_sequence_has_no_masks(pool, window, given):
    """So the same kernels run as without one."""
    assert pool.run(1, per_token, window) == [given]
