"""Reads text files, each a document.

What it is: the text of a file in blocks that end at line ends, so that a file of any size is read
with little memory. A file whose split is `tail` is two documents: its last twentieth is for
validation. A large file may be cut into pieces at line ends; its document then begins in one part
and ends in another.
What it costs: a file is read twice, first to check that all of it is text; one that is cut into
pieces, only once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.compressed import damaged, open_file, unreadable
from titanlite.tools.prepare.documents import BYTE_ORDER_MARK, MAX_DOCUMENT, BadRow, Document
from titanlite.tools.prepare.job import HOLDOUT, File, Piece

BLOCK = 400_000  # bytes of text that are tokenised at a time


def text_documents(piece: Piece, joined: bool) -> Iterator[Document | BadRow]:
    """The document of a file, or the two, or the ranges of them that are in this piece.

    `joined`: each document in one block, because it is compared or encoded as a whole.
    Raises ConfigError if compressed data is damaged, or a file that is cut into pieces is not text.
    """
    file = piece.file
    size = file.size  # bytes of text
    if piece.whole:
        problem, size = _check(file)
        if problem:
            yield BadRow(0, problem)
            return
    if joined and size > MAX_DOCUMENT:
        yield BadRow(0, f"a document of {size} bytes; to compare it, at most {MAX_DOCUMENT}")
        return

    # The piece, from line end to line end
    piece_begin = 0
    piece_end = size
    if piece.begin > 0:
        piece_begin = _line_end(file, piece.begin)
    if piece.end < file.size:
        piece_end = _line_end(file, piece.end)

    # The documents of the whole file: the text before the cut is for training
    start = _start(file)
    cut = size
    if file.split == "validation":
        cut = start
    elif file.split == "tail":
        cut = _line_end(file, size - size // HOLDOUT)
    row = 0
    for split, first, last in (("train", start, cut), ("validation", cut, size)):
        begin = max(piece_begin, first)
        end = min(piece_end, last)
        if begin >= end:
            continue
        blocks: Iterable[str] = (_decode(block, file) for block in _read(file, begin, end))
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
        )
        row += 1


def read_texts(files: list[File]) -> Iterator[str]:
    """The text of whole files, in blocks. Raises ConfigError for a file that is not UTF-8."""
    for file in files:
        end = file.size
        if file.compression:
            end = 1 << 62  # the length of the text is not known
        for block in _read(file, _start(file), end):
            yield _decode(block, file)


def _check(file: File) -> tuple[str, int]:
    """Why a file is not text, "" if it is, and the bytes that were read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    with _open(file) as stream:
        while True:
            block = _read_some(stream, BLOCK, file)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"not UTF-8 text ({error.reason} near byte {size + error.start})", size
            if "\0" in text:
                return (
                    f"contains a NUL byte near byte {size + block.find(0)}, so it is not text",
                    size,
                )
            if not block:
                return "", size
            size += len(block)


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
        return
    while count > 0:
        block = _read_some(stream, min(BLOCK, count), file)
        if not block:
            return
        count -= len(block)


def _start(file: File) -> int:
    """The byte at which the text begins: after a byte order mark."""
    with _open(file) as stream:
        mark = _read_some(stream, len(BYTE_ORDER_MARK), file)
    if mark == BYTE_ORDER_MARK:
        return len(mark)
    return 0


def _line_end(file: File, offset: int) -> int:
    """The first line end from `offset` on; in a very long line, the start of the next character."""
    with _open(file) as stream:
        _skip(stream, offset, file)
        block = _read_some(stream, BLOCK, file)
    line_end = block.find(b"\n") + 1
    if line_end == 0:
        return offset + _first_character(block)
    return offset + line_end


def _read(file: File, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of a part of a file in blocks that end at line ends, or between characters in a
    very long line.
    """
    with _open(file) as stream:
        _skip(stream, begin, file)
        carried = b""  # the bytes after the last line end
        unread = end - begin
        while unread > 0:
            read = _read_some(stream, min(BLOCK, unread), file)
            if read:
                unread -= len(read)
            elif file.compression:
                unread = 0  # the end of the text
            else:
                raise ConfigError(f"{file.path}: became shorter while it was read; start again")
            block = carried + read
            cut = len(block)
            if unread > 0:
                cut = block.rfind(b"\n") + 1 or _last_character(block)
            carried = block[cut:]
            if cut:
                yield block[:cut]


def _first_character(block: bytes) -> int:
    """The offset of the first UTF-8 character that begins in a block."""
    for i in range(min(4, len(block))):
        if _begins_character(block[i]):
            return i
    return len(block)


def _last_character(block: bytes) -> int:
    """The offset of the last UTF-8 character that begins in a block."""
    for i in range(len(block) - 1, max(0, len(block) - 5), -1):
        if _begins_character(block[i]):
            return i
    return len(block)


def _begins_character(byte: int) -> bool:
    return byte & 0xC0 != 0x80


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
