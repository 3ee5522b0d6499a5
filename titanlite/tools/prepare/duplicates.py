"""Which documents of a corpus are duplicates of an earlier one: exact ones, and near ones by
MinHash LSH.

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
        kept: NDArray[np.bool_] = self.first == np.arange(len(self.first))
        return kept


def find_duplicates(
    files: Sequence[Path], config: DuplicateConfig, preferred: NDArray[np.bool_] | None = None
) -> Duplicates:
    """The duplicates among the documents whose signatures are in these files, one record after the
    other.

    The index of a document is its place in all files. It decides which of two documents stays, but
    a `preferred` one stays before any other.
    Raises ConfigError for a file that is not a whole number of records.
    """
    starts = np.cumsum([0, *(_num_records(path) for path in files)])
    count = int(starts[-1])
    preferred = np.zeros(count, bool) if preferred is None else preferred
    first = _preferred_of_equal(_first_of_equal(files, starts), preferred)
    distinct = first == np.arange(count)
    exact = int(np.count_nonzero(~distinct))
    if config.remove != "near":
        return Duplicates(first, exact, 0)
    for start, records in _records(files):
        distinct[start : start + len(records)] &= records["shingles"] >= MIN_SHINGLES
    rank = np.empty(count, np.int64)  # the order in which documents are decided
    rank[np.argsort(~preferred, kind="stable")] = np.arange(count)
    pairs = np.empty(0, np.uint64)
    near = np.arange(count)
    for _ in range(MAX_ROUNDS):
        found = _similar_pairs(
            files, starts, distinct & (near == np.arange(count)), config.threshold, pairs
        )
        if len(found) == len(pairs):
            break
        pairs = found
        near = _decide(pairs, rank)
    else:
        logger.warning(
            "the search for near duplicates ended after %d rounds; some similar documents may be left",
            MAX_ROUNDS,
        )
    return Duplicates(near[first], exact, int(np.count_nonzero(near != np.arange(count))))


def _preferred_of_equal(first: Indices, preferred: NDArray[np.bool_]) -> Indices:
    """For each document the first preferred one that is equal to it, or the first if there is none."""
    chosen = np.full(len(first), len(first))  # of each set, at the index of its first document
    np.minimum.at(chosen, first[preferred], np.flatnonzero(preferred))
    chosen = np.where(chosen < len(first), chosen, np.arange(len(first)))
    return chosen[first]


def _similar_pairs(
    files: Sequence[Path],
    starts: Indices,
    selected: NDArray[np.bool_],
    threshold: float,
    known: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """The known similar pairs and those found among the selected documents: i * documents + j with
    i < j, in order.
    """
    documents = np.flatnonzero(selected).astype(np.uint64)  # the rows of the bands
    count = np.uint64(len(selected))
    for band in range(0, BANDS, BANDS_AT_A_TIME):
        for keys in _band_keys(files, selected, range(band, min(band + BANDS_AT_A_TIME, BANDS))):
            left, right = (documents[rows] for rows in _candidates(keys))
            pairs = left * count + right
            unknown = ~_contains(known, pairs)
            left = left[unknown]
            right = right[unknown]
            pairs = pairs[unknown]
            similar = (
                _similarity(files, starts, left.astype(np.int64), right.astype(np.int64))
                >= threshold
            )
            # Fast where most are in order
            known = np.sort(np.concatenate([known, pairs[similar]]), kind="stable")
    return known


def _contains(ordered: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each of the values is among the ordered ones."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    found: NDArray[np.bool_] = (
        ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    )
    return found


def _decide(pairs: NDArray[np.uint64], rank: Indices) -> Indices:
    """For each document the first one that stays and is similar to it, its own index if it stays;
    in order of rank.
    """
    one, other = (
        place.astype(np.int64) for place in np.divmod(pairs, np.uint64(max(1, len(rank))))
    )
    swapped = rank[one] > rank[other]
    earlier = np.where(swapped, other, one)
    later = np.where(swapped, one, other)
    order = np.lexsort((rank[earlier], rank[later]))
    first = list(range(len(rank)))
    for start in range(0, len(order), READ):
        block = order[start : start + READ]
        for document, candidate in zip(later[block].tolist(), earlier[block].tolist(), strict=True):
            if first[document] == document and first[candidate] == candidate:
                first[document] = candidate
    return np.array(first, np.int64)


def _num_records(path: Path) -> int:
    size = path.stat().st_size
    if size % RECORD.itemsize:
        raise ConfigError(
            f"{path}: {size} bytes, expected a multiple of {RECORD.itemsize}; the file is incomplete"
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
        # (documents, 160)
        numbers = records["minhash"][selected[start : start + len(records)]].astype(np.uint64)
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


def _similarity(
    files: Sequence[Path], starts: Indices, left: Indices, right: Indices
) -> NDArray[np.float64]:
    """The estimated Jaccard similarity of each pair of documents: the share of the 160 numbers that
    are equal.
    """
    equal = np.empty(len(left))
    for begin in range(0, len(left), COMPARE):
        pairs = slice(begin, begin + COMPARE)
        equal[pairs] = (
            _minhashes(files, starts, left[pairs]) == _minhashes(files, starts, right[pairs])
        ).sum(axis=1)
    return equal / NUM_HASHES


def _minhashes(files: Sequence[Path], starts: Indices, documents: Indices) -> NDArray[np.uint16]:
    """(documents, 160).

    The files are mapped for this call only, so that their pages do not add up in memory.
    """
    numbers = np.empty((len(documents), NUM_HASHES), np.uint16)
    where = np.searchsorted(starts, documents, side="right") - 1
    for index in np.unique(where):
        here = where == index
        numbers[here] = np.memmap(files[index], RECORD, "r")["minhash"][
            documents[here] - starts[index]
        ]
    return numbers
