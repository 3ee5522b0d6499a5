"""What tiktoken is given: text in normalization form C, cut where the ids stay the same."""

from __future__ import annotations

import time
import unicodedata

import pytest
from foreign_tokenizers import PATTERNS, mixed_text, random_unicode, tokenizers, trained

from titanlite.tokenizer import tiktoken_pieces as module
from titanlite.tokenizer.nfc import nfc
from titanlite.tokenizer.tiktoken_pieces import MAX_PIECE, MAX_RUN, pieces
from titanlite.tokenizer.tokenizer import Tokenizer

theirs = tokenizers.normalizers.NFC()
CHARACTERS = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]


def assert_same(texts: list[str]) -> None:
    found, expected = (
        normalise("\n".join(texts)).split("\n") for normalise in (nfc, theirs.normalize_str)
    )
    assert [
        hex(ord(max(text))) for text, a, b in zip(texts, found, expected, strict=True) if a != b
    ] == []


def test_every_character_between_a_letter_and_marks():
    """The marks are of two classes, and compose with the letter unless the character blocks it."""
    # None of those above composes or combines
    characters = [c for c in CHARACTERS[:0x20000] if c != "\n"]
    assert_same([f"a{c}\u0323\u0301" for c in characters])
    assert_same([f"a\u0301{c}" for c in characters if unicodedata.category(c).startswith("M")])


def test_compositions():
    assert_same(
        [unicodedata.normalize("NFD", c) for c in CHARACTERS if unicodedata.decomposition(c)]
    )


def test_random_text():
    text = random_unicode(100_000, seed=0)
    assert nfc(text) == theirs.normalize_str(text) != text
    assert nfc("e\u0301 \u1100\u1161") == "\u00e9 \uac00"


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
