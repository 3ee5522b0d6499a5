"""Pairs of answers to the same prompt, one of which is preferred: the data of DPO.

What it is: `titanlite prepare --chat --pairs` writes two documents for each pair, the chosen
conversation and the rejected one, each with its prompt. Pairs are placed whole into rows
(`PairRows`), so both answers are in one row of a batch. The documents of a row are numbered from 0
on: 2i is the chosen answer of pair i, 2i + 1 the rejected one.
What it costs: the prompt of a pair is stored and computed twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanlite.data.stream import IGNORED, Batch

ANSWER = 32  # the first bit of the number of the answer, in the labels of `number_answers`


def pairs_of_rows(seq_len: int) -> int:
    """More than a row of so many tokens can have."""
    return seq_len // 2 + 1


def number_answers(batch: Batch) -> Batch:
    """The batch with labels that also have the number of their answer, from bit ANSWER on.

    The number is that of the document in its row plus the row's number times 2 P, where P is
    `pairs_of_rows`: so it stays valid in parts of the batch. IGNORED stays as it is.
    """
    assert batch.positions is not None  # with data.document_mask, which DPO needs
    rows, seq_len = batch.labels.shape
    documents = (batch.positions == 0).cumsum(dim=1) - 1  # (B, S)
    first = 2 * pairs_of_rows(seq_len) * torch.arange(rows, device=documents.device)
    numbers = first[:, None] + documents
    numbered = batch.labels + (numbers << ANSWER)
    return batch._replace(labels=torch.where(batch.labels == IGNORED, IGNORED, numbered))


def split_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of `number_answers` -> the token, or IGNORED, and the number of the answer, or 0."""
    is_target = labels != IGNORED
    tokens = torch.where(is_target, labels & ((1 << ANSWER) - 1), IGNORED)
    return tokens, torch.where(is_target, labels >> ANSWER, 0)


def are_complete(batch: Batch) -> Tensor:
    """Which of the pairs of a batch of whole sequences with numbered answers exist: bool (B P,).

    A pair exists if both of its answers have a target.
    """
    rows, seq_len = batch.labels.shape
    _, numbers = split_labels(batch.labels)
    is_target = (batch.labels != IGNORED).long()
    targets = is_target.new_zeros(rows * pairs_of_rows(seq_len) * 2)  # of each answer
    targets.index_add_(0, numbers.flatten(), is_target.flatten())
    return (targets > 0).unflatten(0, (-1, 2)).all(dim=1)


def count_pairs(batches: list[Batch]) -> Tensor:
    """The number of pairs in all these batches: a scalar, int64."""
    counts = [are_complete(number_answers(batch)).sum() for batch in batches]
    return torch.stack(counts).sum()
