"""MinHash signatures: accurate, blind to what does not matter, and a function of the text alone."""

import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from titanlite.tools.prepare import shingles
from titanlite.tools.prepare.shingles import window_hashes
from titanlite.tools.prepare.signatures import NUM_HASHES, RECORD, WINDOW, signature

ROOT = Path(__file__).parents[3]


def record(text: str, near: bool = True) -> np.ndarray:
    return np.frombuffer(signature(text, near), RECORD)[0]


def words(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghij가나다라마바사", k=6)) for _ in range(count)]


def jaccard(one: str, other: str) -> float:
    """The exact similarity."""
    a, b = (
        set(np.concatenate(list(window_hashes(text, WINDOW))).tolist()) for text in (one, other)
    )
    return len(a & b) / len(a | b)


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, 100, 1000])
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_equal_numbers_estimate_the_jaccard_similarity(count, shared):
    """Also of documents that have hardly more shingles than there are bins, where bins are empty."""
    errors = []
    for seed in range(30):
        cut = int(count * shared)
        common = words(seed, cut)
        pair = [" ".join(common + words(seed + other, count - cut)) for other in (1000, 2000)]
        one, two = map(record, pair)
        errors.append((one["minhash"] == two["minhash"]).mean() - jaccard(*pair))
    assert abs(np.mean(errors)) < 0.025
    # 0.04 is the error of independent hashes at J = 0.5
    assert np.std(errors) < 1.6 * 0.5 / NUM_HASHES**0.5


def test_equal_documents_have_equal_hashes():
    text = "def f(x):\n    return 'Électricité 각'\n"
    same = [text, unicodedata.normalize("NFD", text), text.replace("\n", "\r\n"), f"\n {text}\n"]
    assert len({tuple(record(one)["exact"]) for one in same}) == 1
    other = [text.upper(), text.replace("    ", "  "), text.replace("각", "간"), text[1:], ""]
    assert len({tuple(record(one)["exact"]) for one in [*other, text]}) == 6


def test_only_exact():
    both, exact = (
        record("a sentence of some length", True),
        record("a sentence of some length", False),
    )
    assert (both["exact"] == exact["exact"]).all()
    assert (both["shingles"], exact["shingles"]) == (18, 0)


@pytest.mark.parametrize("text", ["", "a", "\ud800", "가", "x" * 10_000])
def test_few_shingles_are_counted_as_few(text):
    assert record(text)["shingles"] <= 1


def test_a_long_text_gives_the_numbers_of_its_blocks_together(monkeypatch):
    text = " ".join(words(0, 3000))
    whole = record(text)
    monkeypatch.setattr(shingles, "BLOCK", 5000)
    blocks = record(text)
    # Only windows across two blocks are missing
    assert (whole["minhash"] == blocks["minhash"]).mean() > 0.95
    assert (whole["exact"] == blocks["exact"]).all()


def test_another_process_computes_the_same_bytes():
    text = " ".join(words(7, 300))
    code = (
        "import sys; from titanlite.tools.prepare.signatures import signature as s; "
        "print(s(sys.argv[1]).hex())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "123", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code, text], env=environment, capture_output=True, text=True
    )
    assert result.stdout.strip() == signature(text).hex(), result.stderr


def test_the_numbers_are_the_smallest_hashes_of_160_ranges():
    """The same numbers from integers of Python, one shingle after the other."""
    text = " ".join(words(1, 1000))
    smallest: dict[int, int] = {}
    for hashes in window_hashes(text, WINDOW):
        for value in hashes.tolist():
            place = value * NUM_HASHES >> 64
            smallest[place] = min(value, smallest.get(place, value))
    assert record(text)["minhash"].tolist() == [
        smallest[place] % 65_536 for place in range(NUM_HASHES)
    ]


def test_the_format_is_as_it_was():
    """Parts may have been read by another version of Python, numpy and this program: these numbers
    are fixed.
    """
    found = record(
        "Each part of a corpus is read on a machine of its own. " * 2
        + "각 부분은 다른 기계에서 읽는다."
    )
    assert RECORD.itemsize == 340
    assert found["exact"].tolist() == [5925935129615455625, 17716524104289272058]
    assert (int(found["shingles"]), found["minhash"][:4].tolist()) == (
        99,
        [19805, 25005, 15963, 25005],
    )
