"""Which documents of a corpus are duplicates of an earlier one: exact ones, and near ones by MinHash LSH.

What it is: documents with the same hash of their text are exact duplicates. For near duplicates the 160 numbers of each
signature are cut into 32 bands of 5; documents with an equal band are candidates (locality-sensitive hashing,
Broder 1997; Leskovec et al., Mining of Massive Datasets, chapter 3), and they are duplicates if their estimated
Jaccard similarity reaches the threshold. Of each set of documents that pairs connect, the first stays, or the first
from a separate validation source.
What it finds: a pair is a candidate with probability 1 - (1 - J^5)^32: 0.81 at J = 0.55, 0.92 at 0.6, 0.997 at 0.7.
Documents with fewer than 160 distinct shingles (about 170 bytes of text) are compared for equality only: in one short
sentence a different word is a different statement.
What it costs: the signatures stay in files. Memory is about 150 bytes per document: 4 bands are read at a time and
sorted. A document is compared with the first and the previous document that have the same band, not with all, so the
work is proportional to the number of documents even where thousands have a band in common.
Why not a library: datasketch and rensa keep the bands of all documents in memory, 11 or 3 kB per document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titanlite.config.schema import ConfigError
from titanlite.prepare.shingles import mix_hashes
from titanlite.prepare.signatures import NUM_HASHES, RECORD

ROWS = 5  # numbers of a band
BANDS = NUM_HASHES // ROWS
THRESHOLD = 0.55
MIN_SHINGLES = NUM_HASHES  # documents with fewer are compared for equality only
BANDS_AT_A_TIME = 4
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

    first: Indices  # (documents,): the index of the document that stays in place of this one; its own if it stays
    exact: int
    near: int


def find_duplicates(files: Sequence[Path], config: DuplicateConfig) -> Duplicates:
    """The duplicates among the documents whose signatures are in these files, one record after the other.

    The index of a document is its place in all files, and decides which document is the first.
    Raises ConfigError for a file that is not a whole number of records.
    """
    starts = np.cumsum([0, *(_num_records(path) for path in files)])
    first = _first_of_equal(files, starts)
    kept = first == np.arange(len(first))
    exact = int(np.count_nonzero(~kept))
    if config.remove != "near":
        return Duplicates(first, exact, 0)
    for start, records in _records(files):
        kept[start : start + len(records)] &= records["shingles"] >= MIN_SHINGLES
    documents = np.flatnonzero(kept)  # the rows of the bands
    for band in range(0, BANDS, BANDS_AT_A_TIME):
        for keys in _band_keys(files, kept, range(band, min(band + BANDS_AT_A_TIME, BANDS))):
            left, right = (documents[rows] for rows in _candidates(keys))
            unknown = first[left] != first[right]
            left, right = left[unknown], right[unknown]
            similar = _similarity(files, starts, left, right) >= config.threshold
            _connect(first, left[similar], right[similar])
    near = int(np.count_nonzero(first != np.arange(len(first)))) - exact
    return Duplicates(first, exact, near)


def staying(first: Indices, preferred: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each document stays: the first preferred one of its set, or the first if there is none."""
    chosen = np.full(len(first), len(first))  # of each set, at the index of its first document
    np.minimum.at(chosen, first[preferred], np.flatnonzero(preferred))
    chosen = np.where(chosen < len(first), chosen, np.arange(len(first)))
    kept: NDArray[np.bool_] = chosen[first] == np.arange(len(first))
    return kept


def _num_records(path: Path) -> int:
    size = path.stat().st_size
    if size % RECORD.itemsize:
        raise ConfigError(f"{path}: {size} bytes, expected a multiple of {RECORD.itemsize}; the file is incomplete")
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


def _band_keys(files: Sequence[Path], selected: NDArray[np.bool_], bands: range) -> NDArray[np.uint64]:
    """(bands, selected documents): a hash of the numbers of each band."""
    keys = np.empty((len(bands), np.count_nonzero(selected)), np.uint64)
    row = 0
    for start, records in _records(files):
        numbers = records["minhash"][selected[start : start + len(records)]].astype(np.uint64)  # (documents, 160)
        for key, band in zip(keys, bands, strict=True):
            combined = np.zeros(len(numbers), np.uint64)
            for number in numbers[:, band * ROWS : (band + 1) * ROWS].T:
                combined = mix_hashes(combined * np.uint64(3) + number)
            key[row : row + len(numbers)] = combined
        row += len(numbers)
    return keys


def _candidates(keys: NDArray[np.uint64]) -> tuple[Indices, Indices]:
    """Pairs of rows with equal keys: each row with the first and with the previous one of its key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    new = np.ones(len(order), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    places = np.flatnonzero(~new)
    firsts = _run_starts(new)[places]
    other = firsts != places - 1
    left = np.concatenate([firsts, places[other] - 1])
    right = np.concatenate([places, places[other]])
    return order[left], order[right]


def _similarity(files: Sequence[Path], starts: Indices, left: Indices, right: Indices) -> NDArray[np.float64]:
    """The estimated Jaccard similarity of each pair of documents: the share of the 160 numbers that are equal."""
    equal = np.empty(len(left))
    for begin in range(0, len(left), COMPARE):
        pairs = slice(begin, begin + COMPARE)
        equal[pairs] = (_minhashes(files, starts, left[pairs]) == _minhashes(files, starts, right[pairs])).sum(axis=1)
    return equal / NUM_HASHES


def _minhashes(files: Sequence[Path], starts: Indices, documents: Indices) -> NDArray[np.uint16]:
    """(documents, 160). The files are mapped for this call only, so that their pages do not add up in memory."""
    numbers = np.empty((len(documents), NUM_HASHES), np.uint16)
    where = np.searchsorted(starts, documents, side="right") - 1
    for index in np.unique(where):
        here = where == index
        numbers[here] = np.memmap(files[index], RECORD, "r")["minhash"][documents[here] - starts[index]]
    return numbers


def _connect(first: Indices, left: Indices, right: Indices) -> None:
    """Unites the sets of each pair. `first` leads from each document to the first one of its set (union-find)."""
    while len(left):
        left, right = first[left], first[right]
        apart = left != right
        left, right = np.minimum(left, right)[apart], np.maximum(left, right)[apart]
        np.minimum.at(first, right, left)  # if one set is to join several, the others join in the next round
        while not np.array_equal(first, nearer := first[first]):
            first[:] = nearer
