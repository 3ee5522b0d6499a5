"""Removal of duplicates: what is found, what stays, and that memory and parts do not matter."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from messages import refused

from benchmarks.planted_duplicates import KINDS, LANGUAGES, SCATTERED, japanese, korean, planted
from titanlite.tools.prepare import duplicates as module
from titanlite.tools.prepare.duplicates import (
    MIN_SHINGLES,
    DuplicateConfig,
    find_duplicates,
)
from titanlite.tools.prepare.signatures import NUM_HASHES, RECORD, signature

NEAR, EXACT = DuplicateConfig("near"), DuplicateConfig("exact")
SHORT = [
    "네.",
    "はい。",
    "Yes.",
    "Yes!",
    "서울은 대한민국의 수도이다.",
    "東京は日本の首都である。",
    "x = 1",
    "x = 2",
]
SHORT += [
    "The capital of France is Paris.",
    "The capital of Spain is Madrid.",
    "aaaaaaaaaa",
    "aaaaaaaaaaaa",
    "",
    "a",
]


def write(folder: Path, texts: list[str], parts: int = 1) -> list[Path]:
    """The signatures of texts, in order, in several files."""
    files = []
    for i, part in enumerate(np.array_split(np.arange(len(texts)), parts)):
        files.append(folder / f"{i}.signatures")
        files[-1].write_bytes(b"".join(signature(texts[index]) for index in part))
    return files


def first(
    folder: Path, texts: list[str], config: DuplicateConfig = NEAR, parts: int = 1
) -> list[int]:
    return find_duplicates(write(folder, texts, parts), config).first.tolist()


def long_text(seed: int, changed: float = 0.0) -> str:
    """300 words; a share of them is replaced."""
    rng, change = random.Random(seed), random.Random(seed + 1)
    words = ["".join(rng.choices("abcdefgh가나다라", k=6)) for _ in range(300)]
    return " ".join(f"w{change.random()}" if change.random() < changed else word for word in words)


def test_the_first_of_exact_duplicates_stays(tmp_path):
    texts = ["b", "a", "b", "c", "a ", "b\r\n", "d"]
    for config in (NEAR, EXACT):
        assert first(tmp_path, texts, config) == [0, 1, 0, 3, 1, 0, 6]
    found = find_duplicates(write(tmp_path, texts), NEAR)
    assert (found.exact, found.near) == (3, 0)


def test_near_duplicates_only_if_asked_for(tmp_path):
    texts = [long_text(0), long_text(1), long_text(0, 0.05), long_text(0)]
    assert first(tmp_path, texts, EXACT) == [0, 1, 2, 0]
    assert first(tmp_path, texts) == [0, 1, 0, 0]
    found = find_duplicates(write(tmp_path, texts), NEAR)
    assert (found.exact, found.near) == (1, 1)


def test_distinct_short_documents_all_stay(tmp_path):
    assert first(tmp_path, SHORT) == list(range(len(SHORT)))
    assert first(tmp_path, [*SHORT, *SHORT]) == [*range(len(SHORT))] * 2


def test_a_document_below_the_least_number_of_shingles_is_compared_for_equality_only(tmp_path):
    text = "".join(chr(0x61 + i * i * 7 % 23) + str(i) for i in range(200))
    enough = text[: MIN_SHINGLES + 7]
    assert first(tmp_path, [enough, enough + "!"]) == [0, 0]
    assert first(tmp_path, [enough[1:], enough]) == [0, 1]


def test_a_document_is_dropped_only_if_a_similar_one_stays(tmp_path):
    """The middle is similar to both ends of a chain, which are not similar to each other."""
    middle = long_text(0)
    words = middle.split()
    left, right = " ".join([*words[:210], "left"]), " ".join([*words[90:], "right"])
    assert first(tmp_path, [left, right]) == [0, 1]
    assert first(tmp_path, [left, right, middle]) == [0, 1, 0]
    assert first(tmp_path, [left, middle, right]) == [0, 0, 2]
    assert first(tmp_path, [middle, left, right, middle]) == [0, 0, 0, 0]


def test_preferred_documents_stay(tmp_path):
    middle = long_text(0)
    words = middle.split()
    left, right = " ".join([*words[:210], "left"]), " ".join([*words[90:], "right"])
    files = write(tmp_path, [left, middle, right, middle, left])
    preferred = np.array([False, False, False, True, False])
    assert find_duplicates(files, NEAR, preferred).first.tolist() == [3, 3, 3, 3, 3]
    assert find_duplicates(files, EXACT, preferred).first.tolist() == [0, 3, 2, 3, 0]
    preferred = np.array([False, False, True, False, True])
    found = find_duplicates(files, NEAR, preferred)
    assert found.first.tolist() == [4, 2, 2, 2, 4]
    assert found.stays.tolist() == preferred.tolist()
    assert (found.exact, found.near) == (2, 1)


def template(seed: int, walk: int) -> str:
    """A page of a family whose pages change more and more: neighbours are similar, distant pages
    are not.
    """
    rng = random.Random(seed)
    words = [f"{seed}{''.join(rng.choices('abcdefgh', k=6))}" for _ in range(300)]
    for step in range(walk):
        words[step * 7 % 300] = f"changed{seed}{step * 7 % 300}{rng.random()}"
    return " ".join(words)


def test_chains_of_similar_documents_in_any_parts(tmp_path):
    texts = [template(seed, 8 * walk) for seed in range(4) for walk in range(40)]
    random.Random(0).shuffle(texts)
    preferred = np.arange(len(texts)) % 9 == 4
    found = find_duplicates(write(tmp_path, texts), NEAR, preferred)
    for parts in (3, 50):
        assert (
            find_duplicates(write(tmp_path, texts, parts), NEAR, preferred).first.tolist()
            == found.first.tolist()
        )
    numbers = np.stack([np.frombuffer(signature(text), RECORD)["minhash"][0] for text in texts])
    similar = (numbers[:, None] == numbers).mean(axis=2) >= NEAR.threshold
    dropped = np.flatnonzero(~found.stays)
    assert 60 < len(dropped) < 150
    assert found.stays[found.first].all()
    assert similar[dropped, found.first[dropped]].all()
    assert not (preferred[dropped] & ~preferred[found.first[dropped]]).any()
    # Nearly all of those that stay are different; a pair at the threshold is a candidate in four of
    # five cases
    left = similar[np.ix_(found.stays, found.stays)].sum() - found.stays.sum()
    assert left <= 0.1 * found.stays.sum()


@pytest.mark.slow
def test_the_number_of_files_and_blocks_does_not_matter(tmp_path, monkeypatch):
    texts = [document.text for document in planted(korean(150), 20, seed=3)]
    expected = first(tmp_path, texts)
    assert len(set(expected)) < 200
    for name, value in (("BANDS_AT_A_TIME", 3), ("READ", 7), ("COMPARE", 5)):
        monkeypatch.setattr(module, name, value)
    for parts in (1, 4, 300):  # more parts than documents: empty files
        assert first(tmp_path, texts, parts=parts) == expected


def test_nothing_and_nothing_to_compare(tmp_path):
    assert find_duplicates([], NEAR).first.tolist() == []
    assert first(tmp_path, []) == []
    assert first(tmp_path, ["one"]) == [0]


def test_many_documents_with_a_band_in_common(tmp_path):
    """A thousand documents that share one band and little else are not each compared with each."""
    rng = np.random.default_rng(0)
    records = np.zeros(1000, RECORD)
    records["exact"] = rng.integers(0, 1 << 62, (1000, 2))
    records["shingles"] = 1000
    records["minhash"] = rng.integers(0, 1 << 16, (1000, NUM_HASHES))
    records["minhash"][:, :5] = 7
    records["minhash"][999] = records["minhash"][0]
    (path := tmp_path / "signatures").write_bytes(records.tobytes())
    left, right = module.candidates(np.zeros(1000, np.uint64))
    assert len(left) == len(right) == 999 + 998
    assert find_duplicates([path], NEAR).first.tolist() == [*range(999), 0]


def test_the_number_of_rounds_is_limited(tmp_path, monkeypatch, caplog):
    """In each band a decoy comes first, so each round compares a page of the family with the
    previous one only.
    """
    rng = np.random.default_rng(0)
    count, decoys = 1000, module.BANDS
    records = np.zeros(decoys + count, RECORD)
    records["exact"] = rng.integers(0, 1 << 62, (len(records), 2))
    records["shingles"] = 1000
    records["minhash"] = rng.integers(0, 1 << 16, (len(records), NUM_HASHES))
    template_numbers = rng.integers(0, 1 << 16, NUM_HASHES)
    unchanged = rng.random((count, NUM_HASHES)) < 0.62  # similar to the template, not to each other
    pages = records["minhash"][decoys:]
    records["minhash"][decoys:] = np.where(unchanged, template_numbers, pages)
    records["minhash"][decoys] = template_numbers
    for band in range(module.BANDS):
        numbers = slice(band * module.ROWS, (band + 1) * module.ROWS)
        records["minhash"][band, numbers] = template_numbers[numbers]
    path = tmp_path / "signatures"
    path.write_bytes(records.tobytes())
    rounds = []
    search = module.similar_pairs
    monkeypatch.setattr(module, "similar_pairs", lambda *args: rounds.append(1) or search(*args))
    found = find_duplicates([path], NEAR)
    assert "ended after 20 rounds" in caplog.messages[-1]
    assert len(rounds) == 20
    dropped = np.flatnonzero(~found.stays)
    assert len(dropped) > 0
    assert found.stays[found.first].all()


@pytest.mark.parametrize("equal", [87, 88, 89])
def test_the_threshold_is_the_least_similarity(tmp_path, equal):
    """88 of 160 numbers are 0.55: enough at a threshold of 0.55."""
    records = np.zeros(2, RECORD)
    records["exact"], records["shingles"] = [[1, 1], [2, 2]], 1000
    records["minhash"][0, :equal] = records["minhash"][1, :equal] = 1
    records["minhash"][0, equal:] = 2
    (path := tmp_path / "signatures").write_bytes(records.tobytes())
    assert find_duplicates([path], NEAR).first.tolist() == [0, 0 if equal >= 88 else 1]


def test_an_incomplete_file_is_refused(tmp_path):
    (path,) = write(tmp_path, ["one", "two"])
    path.write_bytes(path.read_bytes()[:-1])
    with refused(str(path), "679 bytes", "340"):
        find_duplicates([path], NEAR)


def recall_and_precision(
    folder: Path, texts: list[str], per_kind: int
) -> tuple[dict[str, float], float]:
    """The share of copies of each kind that meet their original; the share of dropped documents
    that are planted.
    """
    documents = planted(texts, per_kind, seed=0)
    found = first(folder, [document.text for document in documents], parts=3)
    originals = {document.origin: i for i, document in enumerate(documents) if not document.kind}
    recall = {}
    for kind in KINDS:
        copies = [i for i, document in enumerate(documents) if document.kind == kind]
        recall[kind] = float(
            np.mean([found[i] == found[originals[documents[i].origin]] for i in copies])
        )
    dropped = [i for i in range(len(documents)) if found[i] != i]
    precision = float(np.mean([documents[i].origin == documents[found[i]].origin for i in dropped]))
    return recall, precision


@pytest.mark.parametrize("make", [korean, japanese])
def test_planted_duplicates(tmp_path, make):
    recall, precision = recall_and_precision(tmp_path, make(150), 25)
    assert min(recall.values()) >= 0.95, recall
    assert precision >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_many_planted_duplicates(tmp_path, language):
    """The English has near duplicates that were not planted, and that count against its precision
    here.
    """
    texts = LANGUAGES[language]()
    recall, precision = recall_and_precision(tmp_path, texts, min(300, len(texts) // 6))
    if language in ("code", "English"):
        del recall[SCATTERED]
    assert min(recall.values()) >= 0.95, recall
    assert precision >= (0.9 if language == "English" else 0.95)
