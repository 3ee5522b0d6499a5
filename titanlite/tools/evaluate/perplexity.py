"""Computes the loss of a model on prepared text.

What it is: the text is cut into the rows of validation, in the same order, and the loss is
summed over all targets, so each token counts once in any division into batches. The result equals
that of validation during training, up to the dtype of the computation
([test](../../tests/tools/evaluate/test_perplexity.py)). Several processes that share the model's
weights divide the batches among them.
What it costs: a forward over the text. Logits take 12 bytes per token of a batch and entry of the
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from titanlite.data.order import permute
from titanlite.data.prepared import PreparedData
from titanlite.data.rows import IGNORED, Rows, Windows, read_batch, validation_rows
from titanlite.data.shards import Array, Tokens
from titanlite.distributed.agreement import gather
from titanlite.optim.loss import cross_entropy_sum
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.shared_model import SharedModel, num_ranks, this_rank


@dataclass(frozen=True)
class Reading:
    """How text is read: the length of the windows, how many (0: all), and how many at a time."""

    seq_len: int
    samples: int
    batch_size: int
    document_mask: bool = False  # attention within documents, as in the run's training
    rest: bool = False  # whether the tokens after the last whole window are read, too


class WindowsAndRest:
    """Windows as those of validation, and a last row with the rest of the text and padding."""

    def __init__(self, tokens: Tokens, seq_len: int, description: str) -> None:
        """`description` names the text in messages. The text is longer than a window."""
        self.windows = Windows(tokens, seq_len, description)
        self.count = math.ceil((len(tokens) - 1) / seq_len)

    def fill(self, index: int, ids: Array, ignored: Array, document_mask: bool) -> Array | None:
        """Writes row `index`: see `Rows.fill`."""
        if index < self.windows.count:
            return self.windows.fill(index, ids, ignored, document_mask)
        tokens = self.windows.tokens
        start = index * self.windows.seq_len
        length = len(tokens) - start
        ids[:length] = tokens.read(start, length)
        targets = tokens.targets(start + 1, length - 1)
        if targets is not None:
            ignored[: length - 1] = ~targets
        if not document_mask:
            return None
        return tokens.document_starts(start + 1, len(tokens)) - start


@torch.no_grad()
def perplexity(
    shared: SharedModel, data: PreparedData, split: str, reading: Reading
) -> dict[str, float]:
    """Evaluates a split, `train` or `validation`: loss (nats per token), bits_per_byte, perplexity
    and tokens. All processes call it together and get the same.

    Raises ConfigError if the split has no targets.
    """
    tokens = data.tokens(split)
    seq_len = max(1, min(reading.seq_len, len(tokens)))  # no more padding than is needed
    description = f"{split} text of {data.name}"
    windows: Rows = validation_rows(tokens, seq_len, description)
    if reading.rest and len(tokens) > seq_len:
        windows = WindowsAndRest(tokens, seq_len, description)
    token_bytes = torch.tensor(data.tokenizer.token_bytes)
    count = min(reading.samples or windows.count, windows.count)
    device = shared.model.rope.device
    own_loss = 0.0
    own_targets = 0
    own_bytes = 0
    for start in range(0, count, reading.batch_size)[this_rank() :: num_ranks()]:
        numbers = range(start, min(start + reading.batch_size, count))
        picks = [(windows, permute(number, windows.count, 0)) for number in numbers]
        batch = read_batch(picks, seq_len, reading.document_mask)
        targets = batch.labels[batch.labels != IGNORED]
        own_targets += len(targets)
        own_bytes += int(token_bytes[targets].sum())
        batch = batch.apply(lambda tensor: tensor.to(device))
        positions = batch.positions
        documents = None if positions is None else (positions == 0).cumsum(dim=1)
        logits = shared.model(batch.tokens, positions=positions, documents=documents)
        own_loss += float(cross_entropy_sum(logits, batch.labels))
    shared.follow()
    parts = gather((own_loss, own_targets, own_bytes))
    total = sum(part[0] for part in parts)
    num_targets = sum(part[1] for part in parts)
    num_bytes = sum(part[2] for part in parts)
    if not num_targets:
        raise ConfigError(
            f"the {split} text of {data.name} has no targets in {count} sequences; "
            "expected more of them"
        )
    loss = total / num_targets
    shown = math.exp(loss) if loss < 700 else math.inf
    results = {"loss": loss}
    if num_bytes > 0:  # 0: all targets are tokens without text
        results["bits_per_byte"] = total / math.log(2) / num_bytes
    return {**results, "perplexity": shown, "tokens": num_targets}
