"""Best-fit packing: every token but the first of a document is a target once, and documents that
fit are whole.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

import numpy as np
import pytest
from messages import refused
from text_in_memory import Documents

from titanlite.data.packing import PackedRows, best_fit
from titanlite.data.rows import IGNORED, count_tokens, read_batch


def one_by_one(lengths: np.ndarray, capacity: int) -> list[int]:
    """Room that is left in each row, sorted: best-fit decreasing, as it is defined."""
    room: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [i for i, left in enumerate(room) if left >= length]
        if not fitting:
            room.append(capacity)
            fitting = [len(room) - 1]
        room[min(fitting, key=lambda i: room[i])] -= length
    return sorted(room)


@pytest.mark.parametrize("seed", range(10))
def test_placing_equal_lengths_together_is_best_fit_decreasing(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, random.integers(2, 65), 400)
    rows = best_fit(lengths, 64)
    used = np.bincount(rows, weights=lengths).astype(int)
    assert sorted((64 - used).tolist()) == one_by_one(lengths, 64)
    assert np.array_equal(rows, best_fit(lengths, 64))


def test_a_million_documents_take_a_second():
    lengths = np.random.default_rng(0).lognormal(6, 1, 1_000_000).astype(np.int64) % 2048 + 1
    started = time.process_time()
    rows = best_fit(lengths, 2049)
    assert time.process_time() - started < 3  # 0.15 s on a quiet machine
    assert lengths.sum() / ((rows.max() + 1) * 2049) > 0.999


LENGTHS = [2, 3, 9, 10, 11, 12, 20, 21, 22, 31, 35, 1, 4, 5, 2, 7]


def test_every_target_once_and_documents_whole():
    text = Documents(LENGTHS)
    rows = PackedRows(text, 10, "training text")
    batch = read_batch([(rows, i) for i in range(rows.count)], 10, document_mask=True)
    firsts = set(text.starts[:-1].tolist())
    has_target = batch.labels != IGNORED
    assert (batch.labels - batch.tokens)[has_target].eq(1).all()
    assert sorted(batch.labels[has_target].tolist()) == [
        i for i in range(len(text)) if i not in firsts
    ]
    row_of = Counter()
    for start, length in zip(text.starts.tolist(), LENGTHS, strict=False):
        targets = set(range(start + 1, start + length))
        row_of[length] = sum(bool(targets & set(row.tolist())) for row in batch.labels)
        assert row_of[length] <= 1 or length > 11
    for tokens, labels, positions in zip(*batch[:3], strict=True):
        parts = np.split(np.arange(10), np.flatnonzero(positions == 0)[1:])
        for part in parts:
            assert positions[part].tolist() == list(range(len(part)))
            held = tokens[part][labels[part] != IGNORED]
            assert (
                len({int(np.searchsorted(text.starts, token, "right")) for token in held.tolist()})
                <= 1
            )


def test_shares_of_padding_and_of_cut_documents(caplog):
    with caplog.at_level(logging.INFO, "titanlite"):
        rows = PackedRows(Documents([11, 6, 5, 12, 3]), 10, "training text")
    # rows: 11 | 6 + 5 | a window of the document of 12 | its last 2 tokens + 3
    assert rows.count == 4
    assert rows.cut == 0.2
    assert rows.padding == 1 - (10 + 10 + 10 + 5) / 40
    assert "training text: 5 documents" in caplog.text
    assert "12.50% of the positions are padding" in caplog.text
    assert "1 documents (20.00%) are longer than a row and cut" in caplog.text
    full = read_batch([(rows, 0), (rows, 1), (rows, 2)], 10, document_mask=False)
    assert full.padding is None
    batch = read_batch([(rows, 3), None, (rows, 0)], 10, document_mask=False)
    assert batch.padding.tolist() == [[False] * 5 + [True] * 5, [True] * 10, [False] * 10]
    assert batch.tokens[batch.padding].unique().tolist() == [0]
    assert int(count_tokens([batch, full])) == 5 + 10 + 3 * 10


def test_tokens_that_may_not_be_targets():
    rows = PackedRows(Documents([5, 4, 30], masked=[2, 6, 15]), 10, "training text")
    labels = read_batch([(rows, i) for i in range(rows.count)], 10, document_mask=False).labels
    assert sorted(labels[labels != IGNORED].tolist()) == sorted(
        set(range(39)) - {0, 5, 9} - {2, 6, 15}
    )


@pytest.mark.parametrize("lengths", [[], [1, 1, 1]])
def test_a_text_without_targets_is_refused(lengths):
    with refused("data.packing = best_fit", "training text of web", "two tokens"):
        PackedRows(Documents(lengths), 10, "training text of web")
