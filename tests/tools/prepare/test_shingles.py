"""Hashes of windows: what they ignore, and that they are the same everywhere."""

import unicodedata

import numpy as np
import pytest

from titanlite.tools.prepare import shingles
from titanlite.tools.prepare.shingles import simplify, window_hashes


def hashes_of(text: str, size: int) -> list[int]:
    return [int(value) for block in window_hashes(text, size) for value in block]


@pytest.mark.parametrize("size", [8, 16, 32])
def test_one_hash_for_each_window_of_bytes(size):
    text = "0123456789" * 10 + "가나다"
    found = hashes_of(text, size)
    data = text.encode()
    assert len(found) == len(data) - size + 1
    windows = [data[i : i + size] for i in range(len(found))]
    assert len(set(found)) == len(set(windows)) < len(found)
    # Equal windows have equal hashes
    assert len(set(zip(found, windows, strict=True))) == len(set(found))


@pytest.mark.parametrize("text", ["", " \n", "short", "1234567", "가나"])
def test_text_shorter_than_a_window_has_none(text):
    assert hashes_of(text, 8) == []


def test_case_white_space_and_the_spelling_of_characters_do_not_count():
    text = "Straße  각각\n\tÉcole が"
    assert hashes_of(text, 8) == hashes_of("STRASSE 각각 école  が ", 8)
    assert simplify(unicodedata.normalize("NFD", text)) == simplify(text)


def test_the_hash_is_splitmix64_on_every_machine():
    """Signatures of parts are compared that several machines computed."""
    constant = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    # splitmix64's first, seed 0
    assert shingles.mix_hashes(constant).tolist() == [0xE220A8397B1DCDAF]
    windows = np.array(
        [int.from_bytes(data, "little") for data in (b"a consta", b" constan", b"constant")],
        np.uint64,
    )
    assert hashes_of("a constant", 8) == shingles.mix_hashes(windows).tolist()
    assert len(hashes_of("\ud800 is a lone surrogate", 8)) == 16


def test_a_long_text_is_read_in_blocks(monkeypatch):
    text = "".join(chr(0x4E00 + i * i % 5000) for i in range(1000))
    whole = hashes_of(text, 16)
    monkeypatch.setattr(shingles, "BLOCK", 100)
    assert [len(block) for block in window_hashes(text, 16)] == [285] * 10
    assert set(hashes_of(text, 16)) < set(whole)


def test_mix_is_a_bijection_of_what_it_gets():
    values = np.arange(100_000, dtype=np.uint64)
    mixed = shingles.mix_hashes(values)
    assert len(set(mixed.tolist())) == 100_000
    assert values[5] == 5  # the input is left as it is
    assert abs(float((mixed >> np.uint64(63)).mean()) - 0.5) < 0.01
