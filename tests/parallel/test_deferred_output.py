"""Memory of output and loss by chunks, in each layout that changes where they are computed."""

from __future__ import annotations

import pytest
import torch
from allocations import Largest
from model_builder import build_stages

from titanlite.config.schema import LossConfig
from titanlite.data.rows import Batch
from titanlite.model.flavors import LlamaConfig
from titanlite.optim import chunked_loss

WIDE = LlamaConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=16, vocab_size=8192)
SHAPE = (4, 512)  # sequences and their length: 64 MiB of logits
BLOCK_NUMEL = 16 * WIDE.vocab_size  # small beside a chunk, as it is in a run
# How many parts a process computes the logits in, without chunks: shards, or microbatches of a
# pipeline.
PARTS = {"dp_shard": 1, "tp": 2, "cp": 2, "pp": 4}


def most_bytes(parallel: dict[str, int], num_chunks: int) -> int:
    """Peak of forward and backward in this process; 0 if it has no output."""
    stages = build_stages(
        parallel, 0, WIDE, LossConfig(num_chunks), seq_len=SHAPE[1], local_batch_size=SHAPE[0]
    )
    tokens = torch.randint(WIDE.vocab_size, SHAPE)
    with Largest() as largest, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "CPU_BLOCK_NUMEL", BLOCK_NUMEL)
        stages.forward_backward(Batch(tokens, tokens), torch.tensor(tokens.numel()))
    return (
        largest.most
        if hasattr(stages.model_parts[-1].output, "projection" if num_chunks > 1 else "weight")
        else 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis", [*(pytest.param(a, marks=pytest.mark.slow) for a in ("dp_shard", "cp")), "tp", "pp"]
)
def test_the_loss_takes_a_part_of_the_memory(pool, axis):
    whole, chunked = (max(pool.run(2, most_bytes, {axis: 2}, n)) for n in (1, 8))
    at_once = 4 * SHAPE[0] * SHAPE[1] * WIDE.vocab_size // PARTS[axis]
    assert whole >= 2 * at_once  # the measure sees them and their gradient
    # 5.8 to 7.5 when this was written: the embedding's gradient is not cut
    assert chunked <= whole / 5
