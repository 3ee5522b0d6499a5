"""The signature of a document: what the removal of duplicates compares instead of texts.

What it is: a record of 340 bytes with (1) a 128-bit hash of the text, equal for equal texts, and
(2) a MinHash of its shingles (`shingles.py`): 160 numbers of 16 bits, of which about a share J is
equal in two documents with Jaccard similarity J = |A & B| / |A | B| of their sets of shingles A and
B.
The MinHash is computed in one pass (one-permutation hashing, NeurIPS 2012): the hash of a shingle
selects one of 160 bins, and the smallest hash in each bin is its number. A bin without a shingle
takes the number of another, in an order that is the same for all documents (optimal densification,
arXiv 1703.04664). The usual way, 160 hashes for each shingle, is 160 times the work for the same
accuracy: a standard error of sqrt(J (1 - J) / 160), 0.04 at J = 0.6.
Why it is here: the signature depends on the text alone, so that parts of a corpus can be read
anywhere, in any order.
What it costs: one core computes signatures of 14 to 30 MB of text per second
(`benchmarks/duplicates.py`).
"""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np
from numpy.typing import NDArray

from titanlite.tools.prepare.shingles import mix_hashes, window_hashes

WINDOW = 8  # bytes of a shingle: at 8, a changed word of five letters changes 12 shingles
NUM_HASHES = 160
RECORD = np.dtype([("exact", "<u8", (2,)), ("shingles", "<u4"), ("minhash", "<u2", (NUM_HASHES,))])


def _orders() -> NDArray[np.int64]:
    """(64, 160): column i lists the bins that bin i tries for its number, itself first."""
    bins = np.arange(NUM_HASHES, dtype=np.uint64)
    attempts = np.arange(64, dtype=np.uint64)[:, None]
    hashes = mix_hashes(bins + attempts * np.uint64(NUM_HASHES))
    orders = (hashes % np.uint64(NUM_HASHES)).astype(np.int64)
    orders[0] = np.arange(NUM_HASHES)
    return orders


# Bin i holds the hashes from i * 2^64 / 160 (rounded up) on
_BIN_STARTS = np.array([-((i << 64) // -NUM_HASHES) for i in range(NUM_HASHES)], dtype=np.uint64)
_BIN_ENDS = np.append(_BIN_STARTS[1:] - np.uint64(1), np.uint64(2**64 - 1))
_ORDERS = _orders()


def signature(text: str, near: bool = True, prompt: str = "") -> bytes:
    """The record of a document; without `near` only for the removal of equal documents.

    Equal are documents that differ in Unicode's spelling (NFC), in line ends, or in white space at
    start and end. `prompt`: of a row, before its text. Many rows have the same answer to different
    prompts, so both are compared.
    """
    if prompt:
        text = f"{prompt}\0{text}"  # documents contain no NUL
    record = np.zeros((), RECORD)
    normal = unicodedata.normalize("NFC", text).replace("\r\n", "\n").strip()
    data = normal.encode("utf-8", "surrogatepass")
    record["exact"] = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), "<u8")
    if near:
        record["shingles"], record["minhash"] = _minhash(text)
    return record.tobytes()


def _minhash(text: str) -> tuple[int, NDArray[np.uint16]]:
    """The number of distinct shingles (of a long text, the most of any block), and the MinHash."""
    shingles = 0
    smallest = np.full(NUM_HASHES, 2**64 - 1, np.uint64)
    filled = np.zeros(NUM_HASHES, bool)
    for hashes in window_hashes(text, WINDOW):
        if not len(hashes):
            continue
        hashes.sort()
        distinct = 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))
        shingles = max(shingles, distinct)
        # Bins are ranges of hashes, so the smallest hash of a bin is the first from the start of
        # the range on.
        places = np.searchsorted(hashes, _BIN_STARTS)
        firsts = hashes[np.minimum(places, len(hashes) - 1)]  # (160,)
        inside = (firsts >= _BIN_STARTS) & (firsts <= _BIN_ENDS)  # else the bin has no shingle
        smallest = np.where(inside, np.minimum(smallest, firsts), smallest)
        filled |= inside
    if not filled.all():
        attempt = filled[_ORDERS].argmax(axis=0)  # the first that leads to a bin with a shingle
        smallest = smallest[_ORDERS[attempt, np.arange(NUM_HASHES)]]
    return shingles, smallest.astype(np.uint16)  # the low bits; the high bits say which bin it is
