"""Text files: a file is a document.

What it is: the text of a file in blocks that end at line ends, so that a file of any size is read
with little memory. A file whose split is `tail` is two documents: its last twentieth is for
validation. A large file may be cut into pieces at line ends; its document then begins in one part
and ends in another.
What it costs: a file is read twice, first to check that all of it is text; one that is cut into
pieces, only once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.compressed import damaged, decompression, open_file, unreadable
from titanlite.tools.prepare.documents import (
    BYTE_ORDER_MARK,
    MAX_DOCUMENT,
    BadRow,
    Document,
    Skipped,
)
from titanlite.tools.prepare.job import HOLDOUT, File, Piece

BLOCK = 400_000  # bytes of text that are tokenised at a time
# Bytes of compressed text, after which the check that it is text reports its progress
CHECKED = 1 << 24


def text_documents(piece: Piece, joined: bool) -> Iterator[Document | BadRow | Skipped]:
    """The document of a file, or the two, or the ranges of them that are in this piece.

    For a compressed file, the check that it is text is half of the progress.

    `joined`: each document in one block, because it will be filtered or compared.
    Raises ConfigError if compressed data is damaged, or a file that is cut into pieces is not text.
    """
    file = piece.file
    size = 0 if piece.whole else file.size
    left = file.size  # of the progress
    reported = 0  # bytes of text
    for problem, count, position in _raw_blocks(file) if piece.whole else ():
        size += count
        if problem:
            yield BadRow(0, problem, left)
            return
        if file.compression and size - reported >= CHECKED:
            reported = size
            rest = file.size - position // 2
            yield Skipped(left - rest)
            left = rest
    if joined and size > MAX_DOCUMENT:
        yield BadRow(
            0, f"a document of {size} bytes; to filter or compare it, at most {MAX_DOCUMENT}", left
        )
        return
    low = 0 if piece.begin == 0 else _line_end(file, piece.begin)
    high = size if piece.end >= file.size else _line_end(file, piece.end)
    start = _start(file)
    cut = {"tail": _line_end(file, size - size // HOLDOUT), "validation": start}.get(
        file.split, size
    )
    row = 0
    for split, first, last in (("train", start, cut), ("validation", cut, size)):
        begin = max(low, first)
        end = min(high, last)
        if begin < end:
            blocks: Iterator[str] | list[str] = (
                _decode(block, file) for block in _read(file, begin, end)
            )
            if joined:
                blocks = ["".join(blocks)]
            yield Document(
                row,
                split,
                blocks,
                begins=begin == first,
                ends=end == last,
                label=file.relative,
                length=end - begin,
                progress=(end - begin) * left // max(1, size),
            )
            row += 1


def read_texts(files: list[File]) -> Iterator[str]:
    """The text of whole files, in blocks. Raises ConfigError for a file that is not UTF-8."""
    for file in files:
        for block in _read(file, _start(file), file.size if not file.compression else 1 << 62):
            yield _decode(block, file)


def _raw_blocks(file: File) -> Iterator[tuple[str, int, int]]:
    """(what is wrong, bytes, compressed bytes up to its end) of each block of a file."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with _open(file) as stream:
        compressed = decompression(stream)
        while True:
            block = _read_some(stream, BLOCK, file)
            position = compressed.position if compressed else 0
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                yield (
                    f"not UTF-8 text ({error.reason} near byte {offset + error.start})",
                    len(block),
                    position,
                )
                return
            if "\0" in text:
                yield (
                    f"contains a NUL byte near byte {offset + block.find(0)}, so it is not text",
                    len(block),
                    position,
                )
                return
            if not block:
                return
            offset += len(block)
            yield "", len(block), position


def _open(file: File) -> IO[bytes]:
    return open_file(Path(file.path), file.compression)


def _read_some(stream: IO[bytes], count: int, file: File) -> bytes:
    """Up to `count` bytes. Raises ConfigError for damaged compressed data."""
    try:
        return stream.read(count)
    except damaged() as error:
        if not file.compression:
            raise
        raise unreadable(file.path, file.compression, error) from None


def _skip(stream: IO[bytes], count: int, file: File) -> None:
    """Advances to byte `count`."""
    if not file.compression:
        stream.seek(count)
    while file.compression and count > 0:
        count -= len(_read_some(stream, min(BLOCK, count), file)) or count


def _start(file: File) -> int:
    """The byte at which the text begins: after a byte order mark."""
    with _open(file) as stream:
        mark = _read_some(stream, len(BYTE_ORDER_MARK), file)
    return len(mark) if mark == BYTE_ORDER_MARK else 0


def _line_end(file: File, offset: int) -> int:
    """The first line end from `offset` on; in a very long line, the start of the next character."""
    with _open(file) as stream:
        _skip(stream, offset, file)
        block = _read_some(stream, BLOCK, file)
    line = block.find(b"\n") + 1
    return offset + (line or _whole_characters(block, from_start=True))


def _read(file: File, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of a part of a file in blocks that end at line ends, or between characters in a
    very long line.
    """
    with _open(file) as stream:
        _skip(stream, begin, file)
        rest = b""
        left = end - begin
        while left > 0:
            read = _read_some(stream, min(BLOCK, left), file)
            if not read and not file.compression:
                raise ConfigError(f"{file.path}: became shorter while it was read; start again")
            left = left - len(read) if read else 0
            block = rest + read
            cut = len(block) if left == 0 else (block.rfind(b"\n") + 1 or _whole_characters(block))
            rest = block[cut:]
            if cut:
                yield block[:cut]


def _whole_characters(block: bytes, from_start: bool = False) -> int:
    """The offset of the last UTF-8 character of a block; with `from_start` of the first."""
    positions = (
        range(min(4, len(block)))
        if from_start
        else range(len(block) - 1, max(0, len(block) - 5), -1)
    )
    return next((i for i in positions if block[i] & 0xC0 != 0x80), len(block))


def _decode(block: bytes, file: File) -> str:
    """The text of a block. Raises ConfigError for bytes that are not UTF-8, or contain NUL."""
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file.path}: not UTF-8 text ({error.reason}); leave the file out of the source"
        ) from None
    if "\0" in text:
        raise ConfigError(
            f"{file.path}: contains a NUL byte, so it is not text; leave the file out of the source"
        )
    return text
