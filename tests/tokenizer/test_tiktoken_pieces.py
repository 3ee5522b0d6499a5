"""Where a text is cut for tiktoken: where the ids stay the same, if there is such a place."""

from __future__ import annotations

import time

import pytest
from foreign_tokenizers import PATTERNS, mixed_text, trained

from titanlite.tokenizer import tiktoken_pieces as module
from titanlite.tokenizer.tiktoken_pieces import MAX_PIECE, MAX_RUN, pieces
from titanlite.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "",
    "a",
    "ab " * 300_000,
    "a" * 60_000,
    " " * 60_000 + "x",
    "\n" * 30_000,
    "x" * MAX_RUN + " y",
    "é " * 5 + " " * 25_001,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:5]))
def test_pieces_are_the_text(text):
    found = list(pieces(text))
    assert "".join(found) == text
    assert all(len(piece) <= MAX_PIECE for piece in found)
    for piece in found:
        assert max(map(len, piece.split()), default=0) <= MAX_RUN
        assert " " * (MAX_RUN + 1) not in piece


def test_shorter_runs_are_not_cut():
    text = ("x" * MAX_RUN + " " * MAX_RUN) * 8
    assert list(pieces(text)) == [text]


@pytest.mark.slow
@pytest.mark.parametrize("style", PATTERNS)
def test_cutting_changes_no_id(style, monkeypatch):
    tokenizer, text = Tokenizer("x", trained(style).encode()), mixed_text(100_000, seed=5)
    whole = tokenizer.encode(text)
    monkeypatch.setattr(module, "MAX_PIECE", 6000)
    assert len(list(pieces(text))) > 16
    assert tokenizer.encode(text) == whole


def test_looking_for_long_runs_is_fast():
    """Source code is a fifth white space."""
    text = "def f(x):\n        return x\n" * 400_000
    started = time.process_time()
    assert sum(map(len, pieces(text))) == len(text)
    assert time.process_time() - started < 1
