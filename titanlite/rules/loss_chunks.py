"""Decides in how many chunks of tokens the loss is computed if `loss.num_chunks` is 0, and how
large the blocks of a chunk are.

What it is: 1, doubled until the logits of a chunk take at most 1 GB in fp32, in which the loss
computes. So smaller logits are computed at once. Imports no torch.
Why it is here: the model, the loss, the pipeline and `titanlite plan` need the same number.
"""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.config.schema import Config

MOST_BYTES = 10**9  # of a chunk's logits
# Logits of a chunk of which fp32 copy, log-softmax and gradient exist at a time (chunked_loss.py)
BLOCK_NUMEL = 1 << 24
# On a CPU the loss of 128,256 words took 0.73 of the time that it takes with blocks of 2^24
CPU_BLOCK_NUMEL = 1 << 20


def loss_chunks(config: Config, vocab_size: int, degrees: Mapping[str, int]) -> int:
    """Returns `loss.num_chunks`, or the number that its 0 stands for.

    `degrees`: axis -> size. A rank's logits are those of one forward: of a local batch or a
    microbatch, of its part of the sequences and of the vocabulary.
    """
    if config.loss.num_chunks > 0:
        return config.loss.num_chunks
    sequences = config.training.local_batch_size
    if degrees["pp"] > 1:
        sequences = config.parallel.pp_microbatch_size
    tokens = sequences * config.training.seq_len // degrees["cp"]
    logits_bytes = 4 * tokens * vocab_size // degrees["tp"]
    chunks = 1
    while logits_bytes > chunks * MOST_BYTES:
        chunks *= 2
    return chunks
