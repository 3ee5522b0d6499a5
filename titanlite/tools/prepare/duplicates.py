"""Decides which of equal documents stay.

What it is: documents with the same hash of their text are duplicates, and the first one stays, but
one of a separate validation source before all others. Equal are documents that differ in Unicode's
spelling (NFC), in line ends, or in white space at start and end. For similar documents there is
datatrove (`docs/corpus.py`).
What it costs: 17 bytes per document on disk, and about 40 in memory while they are compared.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titanlite.data.prepared_manifest import AGAIN
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tools.prepare.job import Job

# A document has a hash, and a flag: it is from a separate validation source
RECORD = np.dtype([("hash", "<u8", (2,)), ("held_out", "?")])
KEPT = "kept.bin"  # a byte per document of all parts, 1 if it stays


def hashes_path(work: Path, part: int) -> Path:
    """The records of the documents of a part, which has been read."""
    return work / f"hashes-{part:05d}.bin"


def hash_document(text: str, prompt: str = "") -> bytes:
    """128 bits, equal for equal documents.

    `prompt`: before the text of a row. Many rows have the same answer to different prompts, so both
    are compared.
    """
    if prompt:
        text = f"{prompt}\0{text}"  # documents contain no NUL
    normal = unicodedata.normalize("NFC", text).replace("\r\n", "\n").strip()
    return hashlib.blake2b(normal.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def first_of_equal(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether each document stays."""
    low, high = records["hash"].T
    order = np.lexsort((~records["held_out"], high, low))  # stable: the earliest is first
    hashes = records["hash"][order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    stays = np.zeros(len(order), bool)
    stays[order[is_first]] = True
    return stays


def decide_duplicates(job: Job, work: Path, log: Callable[[str], None]) -> None:
    """Marks the duplicates among the documents of all parts, which must have been read.

    Raises ConfigError for a damaged file.
    """
    records = np.concatenate([_records(work, part) for part in range(job.parts)])
    stays = first_of_equal(records)
    log(f"duplicates: {np.count_nonzero(~stays):,} of {len(stays):,} documents")
    replace_file(work / KEPT, stays.tobytes())


def kept_documents(job: Job, work: Path, part: int) -> NDArray[np.bool_]:
    """Whether each document of a part stays. Raises ConfigError for a damaged file."""
    counts = [len(_records(work, number)) for number in range(job.parts)]
    path = work / KEPT
    if path.stat().st_size != sum(counts):
        raise ConfigError(f"{path}: expected {sum(counts)} bytes; {AGAIN}")
    begin = sum(counts[:part])
    return np.fromfile(path, np.uint8, counts[part], offset=begin) != 0


def _records(work: Path, part: int) -> NDArray[np.void]:
    path = hashes_path(work, part)
    size = path.stat().st_size
    if size % RECORD.itemsize:
        raise ConfigError(f"{path}: {size} bytes, not a multiple of {RECORD.itemsize}; {AGAIN}")
    if not size:  # an empty file cannot be mapped
        return np.empty(0, RECORD)
    return np.memmap(path, RECORD, "r")
