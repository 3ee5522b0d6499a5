"""Windows of a text: which labels are targets, and the positions of tokens in their documents."""

from __future__ import annotations

import itertools

from messages import refused
from text_in_memory import Documents

from titanlite.data.rows import IGNORED, Windows, read_batch


def test_too_little_text_is_named():
    with refused("training text of web", "10 tokens", "up to 9"):
        Windows(Documents([10]), 10, "training text of web")
    with refused("validation text", "10 tokens", "up to 9", "validation.freq = 0"):
        Windows(Documents([10]), 10, "validation text")


def test_positions_restart_at_documents_and_rows_and_no_target_is_of_another_document():
    rows = Windows(Documents([7] * 15), 10, "training text")
    batch = read_batch([(rows, 0), (rows, 1), (rows, 6), None], 10, document_mask=True)
    begins = [{0, 7}, {0, 4}, {0, 3}, {0}]  # of the rows, which are at 0, 10 and 60 of the text
    ignored = [{6}, {3}, {2, 9}, set(range(10))]
    for labels, positions, begin, no_target in zip(
        batch.labels, batch.positions, begins, ignored, strict=True
    ):
        assert {i for i, position in enumerate(positions.tolist()) if position == 0} == begin
        assert all(b in (0, a + 1) for a, b in itertools.pairwise(positions.tolist()))
        assert {i for i, label in enumerate(labels.tolist()) if label == IGNORED} == no_target


def test_a_token_that_may_not_be_a_target_is_no_label():
    rows = Windows(Documents([50], masked=[0, 3, 20, 21]), 10, "training text")
    labels = read_batch([(rows, 0), (rows, 1), (rows, 2)], 10, document_mask=False).labels
    assert [(row == IGNORED).nonzero().flatten().tolist() for row in labels] == [[2], [9], [0]]
