"""Normalization form C: equal to that of the `tokenizers` package, for every character."""

from __future__ import annotations

import unicodedata

from foreign_tokenizers import random_unicode, tokenizers

from titanlite.tokenizer.nfc import nfc

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
