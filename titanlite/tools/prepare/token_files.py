"""Token ids that other programs wrote: nanoGPT's and llm.c's .bin, Megatron's .bin with .idx.

What it is: the ids as they are, without a bos or eos around a document. Megatron's index lists the
documents. The other files are one sequence of ids; documents are between occurrences of the
tokenizer's eos or bos: if the first id of a file is one of them, it begins documents (llm.c,
nanochat), otherwise eos ends them (nanoGPT). A file without either is a single document, and its
last twentieth is for validation.
Why it is here: ids need not be decoded and encoded again, so runs can be compared with the other
program on equal ids. The file does not name its tokenizer; an id beyond the vocabulary of the given
one is an error.
What it costs: a block of a million ids, and of an index the places of as many sequences, are in
memory at a time.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.detect_content import LLMC, MEGATRON
from titanlite.tools.prepare.documents import Document
from titanlite.tools.prepare.job import HOLDOUT, File, Piece

# Ids that are read at a time; also the most that are hashed to choose a document's split
BLOCK = 1 << 20
DOCUMENTS = 1 << 16  # whose places are read from an index at a time
LLMC_HEADER = 1024  # bytes
INDEX_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("bounds", "<u8")]
)
DTYPES = {3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's codes of integers that ids can be

Ids = np.ndarray[Any, Any]


class Layout(NamedTuple):
    """Where the ids are in a file."""

    dtype: np.dtype[Any]
    offset: int  # bytes of the header
    num_ids: int


def token_documents(piece: Piece, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents that begin in a piece.

    Raises ConfigError for a damaged file, or an id beyond the vocabulary.
    """
    file = piece.file
    layout = token_layout(file.path, file.size, tokenizer)
    low, high = (_first_id(layout, place) for place in (piece.begin, piece.end))
    if file.kind == "megatron":
        bounds = _indexed(file, layout, low, high)
    else:
        bounds = _bounds(file, layout, tokenizer, low, high)
    if file.split == "tail":
        cut = layout.num_ids - layout.num_ids // HOLDOUT
        bounds = iter([(0, cut, "train"), (cut, layout.num_ids, "validation")])
    row = 0
    for begin, end, split in bounds:
        if low <= begin < high and begin < end:
            blocks = _read(file, layout, begin, end, tokenizer)
            size = (end - begin) * layout.dtype.itemsize
            yield Document(row, split, (), blocks, label="ids", length=end - begin, progress=size)
            row += 1
        elif begin >= high:
            break


def _first_id(layout: Layout, place: int) -> int:
    """The index of the first id from a byte of the file on. The header belongs to the first id."""
    return max(1, -((layout.offset - place) // layout.dtype.itemsize)) if place else 0


def token_layout(path: str, size: int, tokenizer: Tokenizer) -> Layout:
    """The layout of a file, from its header, its index, or a look at its ids.

    Raises ConfigError for a wrong size.
    """
    start = np.fromfile(path, "<u4", 1024)
    offset = 0
    dtype: np.dtype[Any] = np.dtype("<u2")
    if len(start) and int(start[0]) in LLMC:
        if size < LLMC_HEADER:
            raise ConfigError(
                f"{path}: {size} bytes, fewer than its header of {LLMC_HEADER}; it is truncated"
            )
        offset = LLMC_HEADER
        dtype = np.dtype(LLMC[int(start[0])])
        if size - offset != int(start[2]) * dtype.itemsize:
            found = (size - offset) // dtype.itemsize
            raise ConfigError(
                f"{path}: its header says {start[2]} ids at byte 8, but {found} follow; it is truncated"
            )
    elif (index := Path(path).with_suffix(".idx")).is_file():
        dtype = np.dtype(DTYPES[_header(index)[0]])
    elif size % 4 == 0 and len(start) > 1 and int(start.max()) < max(tokenizer.size, 1 << 16):
        # Two ids of 16 bits would be a larger number, unless each second one is 0
        dtype = np.dtype("<u4")
    if (size - offset) % dtype.itemsize:
        raise ConfigError(
            f"{path}: {size} bytes, not a whole number of {dtype.itemsize}-byte ids; it is truncated"
        )
    return Layout(dtype, offset, (size - offset) // dtype.itemsize)


def has_documents(file: File, tokenizer: Tokenizer) -> bool:
    """Whether the first ids contain a bos or eos."""
    layout = token_layout(file.path, file.size, tokenizer)
    ids = np.fromfile(file.path, layout.dtype, BLOCK, offset=layout.offset)
    return bool(np.isin(ids, [tokenizer.bos, tokenizer.eos]).any())


def _read(file: File, layout: Layout, begin: int, end: int, tokenizer: Tokenizer) -> Iterator[Ids]:
    """Ids begin to end in blocks. Raises ConfigError for one beyond the vocabulary."""
    for start in range(begin, end, BLOCK):
        at = layout.offset + start * layout.dtype.itemsize
        ids = np.fromfile(file.path, layout.dtype, min(BLOCK, end - start), offset=at)
        if len(ids) < min(BLOCK, end - start):
            raise ConfigError(f"{file.path}: became shorter while it was read; start again")
        wrong = (ids >= tokenizer.size) | (ids < 0)
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ConfigError(
                f"{file.path}: id {ids[first]} at byte {at + first * layout.dtype.itemsize}; expected ids below "
                f"{tokenizer.size}, the size of the tokenizer {tokenizer.path}: was the file made with another one?"
            )
        yield ids


def _bounds(
    file: File, layout: Layout, tokenizer: Tokenizer, low: int, high: int
) -> Iterator[tuple[int, int, str]]:
    """(first id, end, split) of each document that begins from id `low` to `high` - 1; only these
    are scanned.
    """
    first = np.fromfile(file.path, layout.dtype, 1, offset=layout.offset)
    begins = len(first) > 0 and int(first[0]) in (tokenizer.bos, tokenizer.eos)
    delimiter = int(first[0]) if begins else tokenizer.eos
    after = not begins  # a delimiter that ends a document belongs to it
    begin = 0 if low == 0 else -1  # -1: the document that begins before `low` has not ended yet
    for start in range(max(0, low - after), layout.num_ids, BLOCK):
        if begin < 0 and start + after >= high:
            return
        ids = np.fromfile(
            file.path, layout.dtype, BLOCK, offset=layout.offset + start * layout.dtype.itemsize
        )
        for place in np.flatnonzero(ids == delimiter):
            cut = start + int(place) + after
            if 0 <= begin < cut:
                yield begin, cut, file.split
            begin = cut
            if begin >= high:
                return
    if 0 <= begin < layout.num_ids:
        yield begin, layout.num_ids, file.split


def _header(index: Path) -> tuple[int, int, int]:
    """(code of the type, number of sequences, number of document bounds) of Megatron's index."""
    header = np.fromfile(index, INDEX_HEADER, 1)
    if not len(header) or header[0]["magic"] != MEGATRON.rstrip(b"\0") or header[0]["version"] != 1:
        raise ConfigError(
            f"{index}: not a Megatron index of version 1: its first {INDEX_HEADER.itemsize} bytes differ"
        )
    code = int(header[0]["dtype"])
    if code not in DTYPES:
        raise ConfigError(
            f"{index}: type {code} at byte 17; expected one of {', '.join(map(str, DTYPES))} (integers)"
        )
    return code, int(header[0]["sequences"]), int(header[0]["bounds"])


class Index(NamedTuple):
    """Megatron's index, mapped into memory."""

    path: Path
    sizes: Ids  # (sequences,): the number of ids of each
    pointers: Ids  # (sequences,): the byte at which each begins
    bounds: Ids  # (documents + 1,): the first sequence of each document, and the end

    def start(self, sequence: int, itemsize: int) -> int:
        """The byte at which a sequence begins: where the one before it ends."""
        return (
            int(self.pointers[sequence - 1]) + int(self.sizes[sequence - 1]) * itemsize
            if sequence
            else 0
        )

    def document(self, number: int, itemsize: int) -> int:
        """The byte at which a document begins."""
        sequence = int(self.bounds[number])
        if not 0 <= sequence <= len(self.sizes):
            raise self.disorder()
        return self.start(sequence, itemsize)

    def disorder(self) -> ConfigError:
        first = INDEX_HEADER.itemsize + 12 * len(self.sizes)
        return ConfigError(f"{self.path}: the documents, from byte {first} on, are not in order")


def _open_index(path: Path) -> Index:
    """Raises ConfigError if its size does not fit its header."""
    _, sequences, count = _header(path)
    at = INDEX_HEADER.itemsize
    expected = at + sequences * 12 + count * 8
    size = path.stat().st_size
    if size != expected:
        raise ConfigError(
            f"{path}: {size} bytes, expected {expected} by its header; it is truncated"
        )
    data = np.memmap(path, np.uint8, "r")
    cuts = at + 4 * sequences, at + 12 * sequences
    places = data[cuts[0] : cuts[1]].view("<i8"), data[cuts[1] :].view("<i8")
    index = Index(path, data[at : cuts[0]].view("<i4"), *places)
    if count and (index.bounds[0] != 0 or index.bounds[-1] != sequences):
        raise index.disorder()
    return index


def _indexed(file: File, layout: Layout, low: int, high: int) -> Iterator[tuple[int, int, str]]:
    """(first id, end, split) of each document of a Megatron file that begins from id `low` to
    `high` - 1.

    Only their part of the index is read and checked; the parts of all pieces are the whole index,
    also of a damaged one. Raises ConfigError if index and file do not fit.
    """
    index = _open_index(Path(file.path).with_suffix(".idx"))
    itemsize = layout.dtype.itemsize
    documents = range(max(0, len(index.bounds) - 1))
    first = (
        bisect.bisect_left(documents, low * itemsize, key=lambda i: index.document(i, itemsize))
        if low
        else 0
    )
    last = bisect.bisect_left(documents, high * itemsize, key=lambda i: index.document(i, itemsize))
    last = len(documents) if high >= layout.num_ids else last
    for begin in range(first, last, DOCUMENTS):
        bounds = np.array(index.bounds[begin : min(begin + DOCUMENTS, last) + 1])
        if bounds[0] < 0 or bounds[-1] > len(index.sizes) or (np.diff(bounds) < 0).any():
            raise index.disorder()
        _check_sequences(index, file, layout, range(int(bounds[0]), int(bounds[-1])))
        before = bounds[bounds > 0] - 1
        starts = np.zeros(len(bounds), np.int64)
        starts[bounds > 0] = index.pointers[before] // itemsize + index.sizes[before]
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            yield start, end, file.split


def _check_sequences(index: Index, file: File, layout: Layout, sequences: range) -> None:
    """Raises ConfigError unless each of these sequences begins where the one before it ends, within
    the file.
    """
    itemsize = layout.dtype.itemsize
    for begin in sequences[::BLOCK]:
        place = slice(begin, min(begin + BLOCK, sequences.stop))
        sizes = index.sizes[place].astype("<i8")
        pointers = np.array(index.pointers[place])
        ends = pointers + sizes * itemsize
        expected = np.concatenate([[index.start(begin, itemsize)], ends[:-1]])
        wrong = (pointers != expected) | (sizes < 0) | (ends > layout.num_ids * itemsize)
        if wrong.any():
            first = int(np.argmax(wrong))
            at = INDEX_HEADER.itemsize + 4 * len(index.sizes) + 8 * (begin + first)
            raise ConfigError(
                f"{index.path}: sequence {begin + first}, at byte {at}, is at byte {pointers[first]} of {file.path} "
                f"with {sizes[first]} ids; expected the sequences one after the other, within its {file.size}"
            )
