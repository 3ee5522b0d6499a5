"""Rows of a text, and batches of them.

What it is: the tokens of a source are cut into rows of S + 1 tokens: windows one after the other
(`Windows`), or whole documents packed together (`packing.py`). A row has S inputs and S labels, so
neighbouring windows overlap by one token. `read_batch` reads rows of any sources into a batch. The
positions that a row does not fill are padding, which no count of tokens includes.
What it costs: a copy of the tokens from the memory map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from titanlite.data.packing import PackedRows
from titanlite.data.shards import Array, Tokens
from titanlite.runtime.errors import ConfigError

# The label of a position without a target: the default ignore_index of torch's cross entropy. In
# the ids of a row: a place without a token
IGNORED = -100


class Batch(NamedTuple):
    """Rows of tokens and labels; labels[b, s] is the token after tokens[b, s], or IGNORED.

    tokens and labels (B, S), int64.
    positions (B, S), int64, only with `data.document_mask`: the position of each token in its
    document, or in the part of it that the row has. It is 0 where a document or the row starts.
    dropout_keys (B, S), int64, only for training with `lora.dropout`: a hash of seed, sample and
    place in the row, on which the token's masks depend.
    padding (B, S), bool, only if there is some: True where `tokens` has 0 in place of a token.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    dropout_keys: Tensor | None = None
    padding: Tensor | None = None

    def apply(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Returns the batch with the function applied to each tensor."""
        return Batch._make(None if tensor is None else function(tensor) for tensor in self)


def count_tokens(batches: list[Batch]) -> Tensor:
    """Counts the positions that are not padding in all these batches: a scalar, int64."""
    count = batches[0].tokens.new_zeros(())
    for batch in batches:
        count += batch.tokens.numel()
        if batch.padding is not None:
            count -= batch.padding.sum()
    return count


def count_targets(batches: list[Batch]) -> Tensor:
    """Counts the labels that are not IGNORED in all these batches: a scalar, int64."""
    counts = [(batch.labels != IGNORED).sum() for batch in batches]
    return torch.stack(counts).sum()


class Rows(Protocol):
    """The rows of one source."""

    @property
    def count(self) -> int:
        """The number of rows; an epoch reads each of them once."""

    def fill(self, index: int, ids: Array, ignored: Array, document_mask: bool) -> Array | None:
        """Writes row `index` to ids (S + 1,), and to ignored (S,) which labels are not targets.

        `ignored` is all False at the call. Ids that are not written are padding. Returns the
        indices at which documents start: their first tokens are not targets. It may return None
        without `document_mask`, if a document is predicted from the one before it.
        """


class Windows:
    """Windows of S + 1 tokens, cut from documents that follow one another.

    Neighbouring windows overlap by one token: the last label of one is the first input of the next.
    """

    def __init__(self, tokens: Tokens, seq_len: int, description: str) -> None:
        """`description` names the text in messages, as in "training text of books".

        Raises ConfigError if the text is shorter than one window.
        """
        self.tokens = tokens
        self.seq_len = seq_len
        self.count = (len(tokens) - 1) // seq_len
        if self.count < 1:
            raise ConfigError(_too_short(len(tokens), seq_len, description))
        self.masked = tokens.targets(0, 1) is not None  # the same for all windows

    def fill(self, index: int, ids: Array, ignored: Array, document_mask: bool) -> Array | None:
        """Writes window `index`: see `Rows.fill`."""
        start = index * self.seq_len
        ids[:] = self.tokens.read(start, self.seq_len + 1)
        if self.masked:
            targets = self.tokens.targets(start + 1, self.seq_len)
            assert targets is not None
            np.logical_not(targets, out=ignored)
        if not document_mask:
            return None
        return self.tokens.document_starts(start + 1, start + self.seq_len + 1) - start


def _too_short(num_tokens: int, seq_len: int, description: str) -> str:
    """Writes the message about a text with too few tokens for one window."""
    remedies = ["more text in data.path"]
    if num_tokens > 2:
        remedies.insert(0, f"up to {num_tokens - 1}")
    if description.startswith("validation"):
        remedies.append("validation.freq = 0")
    return (
        f"training.seq_len = {seq_len}: the {description} has only {num_tokens} tokens; "
        f"allowed: {', or '.join(remedies)}"
    )


def document_positions(starts: Array, seq_len: int) -> Array:
    """Computes the position of each token in its document, (S,), from sorted `starts` of documents.

    The first token has position 0 too; starts from S on are ignored.
    """
    origins = np.zeros(seq_len, np.int64)
    inside = starts[starts < seq_len]
    origins[inside] = inside
    origins = np.maximum.accumulate(origins)  # the start of each token's document
    return np.arange(seq_len) - origins


def read_batch(
    picks: Sequence[tuple[Rows, int] | None], seq_len: int, document_mask: bool
) -> Batch:
    """Reads these rows; None gives a row of padding, so that every process gets a batch."""
    size = len(picks)  # B
    ids = np.full((size, seq_len + 1), IGNORED, dtype=np.int64)
    ignored = np.zeros((size, seq_len), dtype=bool)
    positions = np.tile(np.arange(seq_len), (size, 1))
    for b, pick in enumerate(picks):
        if pick is None:
            continue
        rows, index = pick
        starts = rows.fill(index, ids[b], ignored[b], document_mask)
        if starts is None:
            continue
        later = starts[(starts > 0) & (starts <= seq_len)]
        ignored[b, later - 1] = True  # the label would be the first token of another document
        if document_mask:
            positions[b] = document_positions(starts, seq_len)
    labels = ids[:, 1:].copy()  # (B, S)
    np.putmask(labels, ignored, IGNORED)
    tokens = ids[:, :-1].copy()  # (B, S)
    padding = tokens == IGNORED
    tokens[padding] = 0
    batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
    if document_mask:
        batch = batch._replace(positions=torch.from_numpy(positions))
    if padding.any():
        batch = batch._replace(padding=torch.from_numpy(padding))
    return batch


def validation_rows(tokens: Tokens, seq_len: int, description: str) -> Windows | PackedRows:
    """Cuts a validation text into windows; a text shorter than a window gives one padded row.

    Raises ConfigError if the text has less than two tokens.
    """
    if 2 <= len(tokens) <= seq_len:
        return PackedRows(tokens, seq_len, description)
    return Windows(tokens, seq_len, description)
