"""Which documents of a corpus are duplicates of an earlier one: exact, or near by MinHash LSH.

What it is: documents with the same hash of their text are exact duplicates. For near duplicates the
160 numbers of each signature are cut into 32 bands of 5; documents with an equal band are
candidates (locality-sensitive hashing, Broder 1997; Leskovec et al., Mining of Massive Datasets,
chapter 3), and they are duplicates if their estimated Jaccard similarity reaches the threshold.
Documents are decided one after the other: one that is similar to a document that stays is dropped.
So each dropped document has one that stays and is similar to it, and first of all a document from a
separate validation source stays.
Why not connected components, as datatrove and NeMo Curator: a chain of similar pairs leads to
documents that have little in common. Of 4,000 manual pages they drop 62 %, and 87 % of these have
nothing similar among those that stay; this way it is 49 %, and each has (`benchmarks/duplicates.py
--pages`).
What it finds: a pair is a candidate with probability 1 - (1 - J^5)^32: 0.81 at J = 0.55, 0.92 at
0.6, 0.997 at 0.7. Documents with fewer than 160 distinct shingles (about 170 bytes of text) are
compared for equality only: in one short sentence a different word is a different statement.
What it costs: the signatures stay in files. Memory grows with the number of documents and of
similar pairs; 4 bands are read at a time and sorted. A document is compared with the first and the
previous document that have the same band, not with all, so the work of a round is proportional to
the number of documents even where thousands have a band in common. As these two may be dropped
themselves, the search is repeated among the documents that stay, until it finds no more, but at
most 20 times: a corpus can be made so that each round finds one document. Then a warning says that
similar documents may be left. Those that were dropped have one that stays and is similar, whatever
the number of rounds.
Why not a library: datasketch and rensa keep the bands of all documents in memory, 11 or 3 kB per
document.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.shingles import mix_hashes
from titanlite.tools.prepare.signatures import NUM_HASHES, RECORD

logger = logging.getLogger("titanlite")

ROWS = 5  # numbers of a band
BANDS = NUM_HASHES // ROWS
THRESHOLD = 0.55
MIN_SHINGLES = NUM_HASHES  # documents with fewer are compared for equality only
BANDS_AT_A_TIME = 4
MAX_ROUNDS = 20  # searches among the documents that stay; each reads all signatures
READ = 32_768  # records that are read at a time
COMPARE = 16_384  # pairs of records that are compared at a time

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class DuplicateConfig:
    """Which duplicates are removed: "none", "exact", or "near" (and exact)."""

    remove: str = "none"
    threshold: float = THRESHOLD  # estimated Jaccard similarity of near duplicates


@dataclass(frozen=True)
class Duplicates:
    """What was found."""

    # (documents,): the index of the document that stays in place of this one; its own if it stays
    first: Indices
    exact: int
    near: int

    @property
    def stays(self) -> NDArray[np.bool_]:
        """Whether each document stays."""
        stays: NDArray[np.bool_] = self.first == np.arange(len(self.first))
        return stays


def find_duplicates(
    files: Sequence[Path], config: DuplicateConfig, preferred: NDArray[np.bool_] | None = None
) -> Duplicates:
    """The duplicates among the documents whose signatures are the records of these files.

    The index of a document is its place in all files. It decides which of two documents stays, but
    a `preferred` one stays before any other.
    Raises ConfigError for a file that is not a whole number of records.
    """
    starts = np.cumsum([0, *(_num_records(path) for path in files)])
    count = int(starts[-1])
    if preferred is None:
        preferred = np.zeros(count, bool)
    itself = np.arange(count)  # the index of each document
    first = _preferred_of_equal(_first_of_equal(files, starts), preferred)
    exact = int(np.count_nonzero(first != itself))
    if config.remove != "near":
        return Duplicates(first, exact, 0)
    compared = first == itself
    for start, records in _records(files):
        compared[start : start + len(records)] &= records["shingles"] >= MIN_SHINGLES
    rank = np.empty(count, np.int64)  # the order in which documents are decided
    rank[np.argsort(~preferred, kind="stable")] = itself
    pairs = np.empty(0, np.uint64)
    near = itself
    for _ in range(MAX_ROUNDS):
        num_known = len(pairs)
        pairs = similar_pairs(files, starts, compared & (near == itself), config.threshold, pairs)
        if len(pairs) == num_known:
            break
        near = _decide(pairs, rank)
    else:
        logger.warning(
            "the search for near duplicates ended after %d rounds; "
            "some similar documents may be left",
            MAX_ROUNDS,
        )
    return Duplicates(near[first], exact, int(np.count_nonzero(near != itself)))


def _preferred_of_equal(first: Indices, preferred: NDArray[np.bool_]) -> Indices:
    """For each document the first preferred one that equals it, or the first if there is none."""
    chosen = np.full(len(first), len(first))  # of each set, at the index of its first document
    np.minimum.at(chosen, first[preferred], np.flatnonzero(preferred))
    chosen = np.where(chosen < len(first), chosen, np.arange(len(first)))
    return chosen[first]


def similar_pairs(
    files: Sequence[Path],
    starts: Indices,
    selected: NDArray[np.bool_],
    threshold: float,
    known: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """The known similar pairs and those among the selected documents, in order.

    A pair of documents i < j is the number i * documents + j.
    """
    documents = np.flatnonzero(selected).astype(np.uint64)  # the rows of the bands
    count = np.uint64(len(selected))
    for band in range(0, BANDS, BANDS_AT_A_TIME):
        for keys in _band_keys(files, selected, range(band, min(band + BANDS_AT_A_TIME, BANDS))):
            left, right = candidates(keys)
            pairs = documents[left] * count + documents[right]
            unknown = ~_contains(known, pairs)
            left = documents[left[unknown]].astype(np.int64)
            right = documents[right[unknown]].astype(np.int64)
            similar = _similarity(files, starts, left, right) >= threshold
            new = pairs[unknown][similar]
            # A stable sort is fast where most are in order
            known = np.sort(np.concatenate([known, new]), kind="stable")
    return known


def _contains(ordered: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each of the values is among the ordered ones."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    contained: NDArray[np.bool_] = ordered[places] == values
    return contained


def _decide(pairs: NDArray[np.uint64], rank: Indices) -> Indices:
    """For each document the first one that stays and is similar to it; itself if it stays.

    Documents are decided in order of rank.
    """
    left, right = np.divmod(pairs, np.uint64(max(1, len(rank))))
    left = left.astype(np.int64)
    right = right.astype(np.int64)
    swapped = rank[left] > rank[right]
    earlier = np.where(swapped, right, left)
    later = np.where(swapped, left, right)
    order = np.lexsort((rank[earlier], rank[later]))
    first = list(range(len(rank)))
    for start in range(0, len(order), READ):  # lists of all pairs would take much memory
        block = order[start : start + READ]
        for document, candidate in zip(later[block].tolist(), earlier[block].tolist(), strict=True):
            if first[document] == document and first[candidate] == candidate:
                first[document] = candidate
    return np.array(first, np.int64)


def _num_records(path: Path) -> int:
    size = path.stat().st_size
    if size % RECORD.itemsize:
        raise ConfigError(
            f"{path}: {size} bytes, expected a multiple of {RECORD.itemsize}; "
            "the file is incomplete"
        )
    return size // RECORD.itemsize


def _records(files: Sequence[Path]) -> Iterator[tuple[int, NDArray[np.void]]]:
    """(index of the first, records) of all files, a block at a time."""
    start = 0
    for path in files:
        with path.open("rb") as file:
            while len(records := np.fromfile(file, RECORD, READ)):
                yield start, records
                start += len(records)


def _first_of_equal(files: Sequence[Path], starts: Indices) -> Indices:
    """For each document the first one with the same text."""
    hashes = np.empty((2, starts[-1]), np.uint64)
    for start, records in _records(files):
        hashes[:, start : start + len(records)] = records["exact"].T
    order = np.lexsort(hashes)  # stable: among equal ones the earliest is first
    new = np.ones(len(order), bool)
    new[1:] = (hashes[:, order[1:]] != hashes[:, order[:-1]]).any(axis=0)
    first = np.empty(len(order), np.int64)
    first[order] = order[_run_starts(new)]
    return first


def _run_starts(new: NDArray[np.bool_]) -> Indices:
    """For each place the place where its run starts, given where runs start."""
    return np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))


def _band_keys(
    files: Sequence[Path], selected: NDArray[np.bool_], bands: range
) -> NDArray[np.uint64]:
    """(bands, selected documents): a hash of the numbers of each band."""
    keys = np.empty((len(bands), np.count_nonzero(selected)), np.uint64)
    row = 0
    for start, records in _records(files):
        of_block = selected[start : start + len(records)]
        numbers = records["minhash"][of_block].astype(np.uint64)  # (documents, 160)
        for key, band in zip(keys, bands, strict=True):
            combined = np.zeros(len(numbers), np.uint64)
            for number in numbers[:, band * ROWS : (band + 1) * ROWS].T:
                combined = mix_hashes(combined * np.uint64(3) + number)
            key[row : row + len(numbers)] = combined
        row += len(numbers)
    return keys


def candidates(keys: NDArray[np.uint64]) -> tuple[Indices, Indices]:
    """Pairs of rows with equal keys: each row with the first and the previous one of its key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    new = np.ones(len(order), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    places = np.flatnonzero(~new)
    firsts = _run_starts(new)[places]
    # The second row of a key has its first as its previous one: one pair, not two
    later = places[firsts != places - 1]
    left = np.concatenate([firsts, later - 1])
    right = np.concatenate([places, later])
    return order[left], order[right]


def _similarity(
    files: Sequence[Path], starts: Indices, left: Indices, right: Indices
) -> NDArray[np.float64]:
    """The estimated Jaccard similarity of each pair of documents.

    It is the share of the 160 numbers that are equal.
    """
    num_equal = np.empty(len(left))
    for begin in range(0, len(left), COMPARE):
        pairs = slice(begin, begin + COMPARE)
        left_numbers = _minhashes(files, starts, left[pairs])  # (pairs, 160)
        right_numbers = _minhashes(files, starts, right[pairs])
        num_equal[pairs] = (left_numbers == right_numbers).sum(axis=1)
    return num_equal / NUM_HASHES


def _minhashes(files: Sequence[Path], starts: Indices, documents: Indices) -> NDArray[np.uint16]:
    """(documents, 160).

    The files are mapped for this call only, so that their pages do not add up in memory.
    """
    numbers = np.empty((len(documents), NUM_HASHES), np.uint16)
    file_of = np.searchsorted(starts, documents, side="right") - 1  # the index of each one's file
    for index in np.unique(file_of):
        in_file = file_of == index
        records = np.memmap(files[index], RECORD, "r")
        numbers[in_file] = records["minhash"][documents[in_file] - starts[index]]
    return numbers
