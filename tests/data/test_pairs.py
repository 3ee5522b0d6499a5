"""Pairs of answers: whole in a row, and numbered in the labels."""

from __future__ import annotations

import logging

import torch
from messages import refused
from text_in_memory import Documents

from titanlite.data.packing import PairRows
from titanlite.data.pairs import are_complete, count_pairs, number_answers, split_labels
from titanlite.data.stream import IGNORED, Batch, read_batch


def batch_of(rows: PairRows) -> Batch:
    return read_batch([(rows, i) for i in range(rows.count)], rows.seq_len, document_mask=True)


def test_pairs_are_whole_and_others_left_out(caplog):
    lengths = [3, 4, 2, 2, 6, 6, 5, 3]  # pairs of 7, 4, 12 and 8 tokens
    with caplog.at_level(logging.INFO, "titanlite"):
        rows = PairRows(Documents(lengths), 10, "pairs of web")
    assert "4 pairs in 2 rows of 10 tokens" in caplog.text
    assert "1 pairs are longer than a row and left out" in caplog.text
    batch = batch_of(rows)
    found = [tokens[labels != IGNORED].tolist() for tokens, labels in zip(*batch[:2], strict=True)]
    # Best fit: 8 first, then 7, and 4 beside it. The last token of an answer has no label
    assert sorted(found) == [[0, 1, 3, 4, 5, 7, 9], [23, 24, 25, 26, 28, 29]]
    number = dict.fromkeys([0, 1], 0) | dict.fromkeys([3, 4, 5], 1) | {7: 2, 9: 3}
    numbered = number_answers(batch)
    for tokens, labels in zip(numbered.tokens, numbered.labels, strict=True):
        label, answer = split_labels(labels)
        is_target = labels != IGNORED
        assert torch.equal(label[is_target], tokens[is_target] + 1)
        first = 12 if torch.equal(tokens, numbered.tokens[1]) else 0
        if tokens[0] == 0:
            expected = [first + number[token] for token in tokens[is_target].tolist()]
            assert answer[is_target].tolist() == expected
    assert int(are_complete(numbered).sum()) == 3
    assert int(count_pairs([batch, batch])) == 6


def test_an_answer_without_a_target_makes_no_pair():
    labels = torch.tensor([[5, IGNORED, 6, IGNORED, 7, 8], [IGNORED] * 6])
    positions = torch.tensor([[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]])
    batch = Batch(labels.clamp(min=0), labels, positions)
    # The third document of the first row has no partner
    assert are_complete(number_answers(batch)).tolist() == [True] + [False] * 7
    assert int(count_pairs([batch])) == 1


def test_labels_keep_the_largest_ids():
    labels = torch.tensor([[2**31 - 1, IGNORED, 0, IGNORED]])
    numbered = number_answers(Batch(labels.clamp(min=0), labels, torch.tensor([[0, 1, 0, 1]])))
    tokens, numbers = split_labels(numbered.labels)
    assert torch.equal(tokens, labels)
    assert numbers.tolist() == [[0, 0, 1, 0]]


def test_a_text_without_a_fitting_pair_is_refused():
    with refused("training.seq_len = 10", "pairs of web", "12 tokens"):
        PairRows(Documents([6, 6]), 10, "pairs of web")
    with refused("the pairs of web has no pairs"):
        PairRows(Documents([]), 10, "pairs of web")
