"""Reads token ids that other programs wrote, in the layouts of `token_layout.py`.

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

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.documents import Document
from titanlite.tools.prepare.job import HOLDOUT, File
from titanlite.tools.prepare.token_layout import (
    INDEX_HEADER,
    Ids,
    Layout,
    megatron_header,
    token_layout,
    wrong_length,
)

# Ids that are read at a time; also the most that are hashed to choose a document's split
BLOCK = 1 << 20
SMALLEST_MARK = -100  # that programs write in place of an id: -1 or this number
DOCUMENTS = 1 << 16  # documents whose places are read from an index at a time


def token_documents(file: File, tokenizer: Tokenizer, ids: str = "auto") -> Iterator[Document]:
    """The documents of a file. `ids`: the type of its ids, if the user named it.

    Raises ConfigError for a damaged file, or an id beyond the vocabulary.
    """
    named = ids if file.kind == "tokens" else "auto"
    layout = token_layout(file.path, file.size, tokenizer, named)
    if file.split == "tail":
        cut = layout.num_ids - layout.num_ids // HOLDOUT
        bounds = iter([(0, cut, "train"), (cut, layout.num_ids, "validation")])
    elif file.kind == "megatron":
        bounds = ((begin, end, file.split) for begin, end in indexed_documents(file, layout))
    else:
        bounds = ((begin, end, file.split) for begin, end in _delimited(file, layout, tokenizer))
    row = 0
    for begin, end, split in bounds:
        if begin < end:
            blocks = read_ids(file, layout, begin, end, tokenizer)
            yield Document(row, split, (), blocks, label="ids", length=end - begin)
            row += 1


def has_documents(file: File, layout: Layout, tokenizer: Tokenizer) -> bool:
    """Whether the first ids contain a bos or eos."""
    ids = np.fromfile(file.path, layout.dtype, BLOCK, offset=layout.offset)
    return bool(np.isin(ids, [tokenizer.bos, tokenizer.eos]).any())


def read_ids(
    file: File, layout: Layout, begin: int, end: int, tokenizer: Tokenizer
) -> Iterator[Ids]:
    """Ids begin to end in blocks. Raises ConfigError for one beyond the vocabulary."""
    for start in range(begin, end, BLOCK):
        count = min(BLOCK, end - start)
        offset = layout.offset + start * layout.dtype.itemsize
        ids = np.fromfile(file.path, layout.dtype, count, offset=offset)
        if len(ids) < count:
            raise ConfigError(f"{file.path}: became shorter while it was read; start again")
        wrong = (ids >= tokenizer.size) | (ids < 0)
        if wrong.any():
            first = int(np.argmax(wrong))
            place = offset + first * layout.dtype.itemsize
            raise _no_id(file, layout, ids[first : first + 1], place, tokenizer)
        yield ids


def _no_id(
    file: File, layout: Layout, number: Ids, place: int, tokenizer: Tokenizer
) -> ConfigError:
    """The error for a number, an array of one, that is not an id of the tokenizer."""
    dtype = layout.dtype
    signed = int(number.view(dtype.str.replace("u", "i"))[0])
    is_mark = SMALLEST_MARK <= signed < 0
    where = f"{file.path}: id {number[0]} at byte {place}, read as {dtype}"
    if is_mark and dtype.kind == "u":
        where += f" ({signed} with a sign)"
    if number[0] < 0 or (is_mark and dtype.itemsize > 2):  # of 16 bits it may be a larger id
        return ConfigError(
            f"{where}; expected ids from 0 on: negative numbers mark padding or tokens without a "
            "loss; write the file without them"
        )
    return ConfigError(
        f"{where}; expected ids below {tokenizer.size}, the size of the tokenizer "
        f"{tokenizer.path}: was the file made with another one{layout.made_with}?"
    )


def _delimited(file: File, layout: Layout, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Finds (first id, end) of each document, between occurrences of bos or eos."""
    first = np.fromfile(file.path, layout.dtype, 1, offset=layout.offset)
    delimiter = tokenizer.eos
    after = 1  # it ends a document, and the next one begins after it
    if len(first) and int(first[0]) in (tokenizer.bos, tokenizer.eos):
        delimiter = int(first[0])
        after = 0  # it begins one
    begin = 0
    for start in range(0, layout.num_ids, BLOCK):
        offset = layout.offset + start * layout.dtype.itemsize
        ids = np.fromfile(file.path, layout.dtype, BLOCK, offset=offset)
        for place in np.flatnonzero(ids == delimiter):
            end = start + int(place) + after
            yield begin, end
            begin = end
    yield begin, layout.num_ids


class Index(NamedTuple):
    """Megatron's index, mapped into memory."""

    path: Path
    sizes: Ids  # (sequences,): the number of ids of each
    pointers: Ids  # (sequences,): the byte at which each begins
    bounds: Ids  # (documents + 1,): the first sequence of each document, and the end

    def end(self, sequence: int, itemsize: int) -> int:
        """The byte at which a sequence ends; 0 for the one before the first."""
        if sequence < 0:
            return 0
        return int(self.pointers[sequence]) + int(self.sizes[sequence]) * itemsize

    def disorder(self) -> ConfigError:
        first = INDEX_HEADER.itemsize + 12 * len(self.sizes)
        return ConfigError(f"{self.path}: the documents, from byte {first} on, are not in order")


def _open_index(path: Path) -> Index:
    """Raises ConfigError if its size does not fit its header."""
    _, sequences, num_bounds = megatron_header(path)
    sizes_at = INDEX_HEADER.itemsize
    pointers_at = sizes_at + 4 * sequences
    bounds_at = pointers_at + 8 * sequences
    expected = bounds_at + 8 * num_bounds
    size = path.stat().st_size
    if size != expected:
        raise ConfigError(
            f"{path}: {size} bytes, expected {expected} by its header; "
            + wrong_length(size, expected)
        )
    data = np.memmap(path, np.uint8, "r")
    index = Index(
        path,
        sizes=data[sizes_at:pointers_at].view("<i4"),
        pointers=data[pointers_at:bounds_at].view("<i8"),
        bounds=data[bounds_at:].view("<i8"),
    )
    if num_bounds and (index.bounds[0] != 0 or index.bounds[-1] != sequences):
        raise index.disorder()
    return index


def indexed_documents(file: File, layout: Layout) -> Iterator[tuple[int, int]]:
    """Reads (first id, end) of each document of a Megatron file.

    Raises ConfigError if index and file do not fit.
    """
    index = _open_index(Path(file.path).with_suffix(".idx"))
    itemsize = layout.dtype.itemsize
    for begin in range(0, len(index.bounds) - 1, DOCUMENTS):
        bounds = np.array(index.bounds[begin : begin + DOCUMENTS + 1])
        if bounds[0] < 0 or bounds[-1] > len(index.sizes) or (np.diff(bounds) < 0).any():
            raise index.disorder()
        _check_sequences(index, file, layout, range(int(bounds[0]), int(bounds[-1])))
        # A document begins where the sequence before its first one ends
        starts = [index.end(bound - 1, itemsize) // itemsize for bound in bounds.tolist()]
        yield from itertools.pairwise(starts)
    end = index.end(len(index.sizes) - 1, itemsize)
    if end < file.size:
        raise ConfigError(
            f"{file.path}: {file.size} bytes, but {index.path.name} ends at byte {end}; "
            "one of the two files is of another"
        )


def _check_sequences(index: Index, file: File, layout: Layout, sequences: range) -> None:
    """Raises ConfigError unless these sequences follow one another, within the file."""
    itemsize = layout.dtype.itemsize
    for begin in sequences[::BLOCK]:
        place = slice(begin, min(begin + BLOCK, sequences.stop))
        sizes = index.sizes[place].astype("<i8")
        pointers = np.array(index.pointers[place])
        ends = pointers + sizes * itemsize
        expected = np.concatenate([[index.end(begin - 1, itemsize)], ends[:-1]])
        wrong = (pointers != expected) | (sizes < 0) | (ends > layout.num_ids * itemsize)
        if wrong.any():
            first = int(np.argmax(wrong))
            sequence = begin + first
            pointer_at = INDEX_HEADER.itemsize + 4 * len(index.sizes) + 8 * sequence
            raise ConfigError(
                f"{index.path}: sequence {sequence}, at byte {pointer_at}, is at byte "
                f"{pointers[first]} of {file.path} with {sizes[first]} ids; expected the sequences "
                f"one after the other, within its {file.size}"
            )
