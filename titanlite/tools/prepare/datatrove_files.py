"""Reads token ids that datatrove's `DocumentTokenizer` wrote: `.ds` with `.ds.index`.

What it is: the ids are of 16 or 32 bits; the index holds the number of ids up to the end of each
document, in 64 bits. A file that was shuffled has its own index in the new order. `.ds.metadata`,
where it exists, holds the tokenizer's name, the bytes of an id, and the number of ids.
Why not as they are: what encloses a document depends on how datatrove was called. Its `eos_token=`
replaces the tokenizer's own post-processor, so that documents end with eos and lack bos; without it
they have what the post-processor adds. Here a document is what the index says, bos and eos at its
ends are dropped, and each is put there once, as around all other documents.
What it costs: a block of a million ids, and of an index the ends of as many documents as
`DOCUMENTS`, are in memory at a time.
Reference: https://github.com/huggingface/datatrove, src/datatrove/pipeline/tokens (0.10.1)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.documents import Document
from titanlite.tools.prepare.job import File
from titanlite.tools.prepare.token_files import BLOCK, DOCUMENTS, read_ids
from titanlite.tools.prepare.token_layout import Ids, Layout

END = np.dtype("<u8")  # where a document ends: the number of ids up to there
WIDTHS = (2, 4)  # bytes of an id
MOST_METADATA = 1 << 16  # bytes


def datatrove_documents(file: File, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a file; those without ids are passed over, as empty texts are.

    Raises ConfigError if file and index do not fit, or for an id beyond the vocabulary.
    """
    layout = datatrove_layout(file)
    row = 0
    for begin, end in _bounds(file, layout):
        begin, end = _without_enclosure(file, layout, begin, end, tokenizer)
        if begin < end:
            blocks = read_ids(file, layout, begin, end, tokenizer)
            yield Document(
                row, file.split, (), blocks, enclosed=True, label="ids", length=end - begin
            )
            row += 1


def datatrove_layout(file: File) -> Layout:
    """Computes how wide the ids are: the size of the file divided by the end of its last document.

    Raises ConfigError if there is no index, or if it does not fit the file.
    """
    index = _index(file)
    if not index.is_file():
        raise ConfigError(
            f"{file.path}: token ids of datatrove without {index.name}; "
            "write it with DocumentTokenizer(save_index=True)"
        )
    if Path(f"{file.path}.loss").exists():
        raise ConfigError(
            f"{file.path}.loss: a loss mask of datatrove, which is not read; "
            "write the ids without save_loss_metadata, or remove the file to train on all of them"
        )
    size = index.stat().st_size
    if size % END.itemsize:
        raise ConfigError(f"{index}: {size} bytes, not a whole number of 8-byte ends")
    count = size // END.itemsize
    num_ids = int(_ends(file, count - 1, 1)[0]) if count else 0
    fitting = [width for width in WIDTHS if num_ids * width == file.size]
    if not fitting:
        raise ConfigError(
            f"{file.path}: {file.size} bytes, but {index.name} ends after {num_ids} ids; expected "
            f"{2 * num_ids} or {4 * num_ids} bytes: one of the two files is cut off or of another"
        )
    name, width, stated_ids = _metadata(file)
    if width and (width not in fitting or stated_ids != num_ids):
        raise ConfigError(
            f"{file.path}.metadata: says {stated_ids} ids of {width} bytes, but the file has "
            f"{num_ids} of {fitting[0]}"
        )
    made_with = f" (its metadata names {name})" if name else ""
    return Layout(np.dtype(f"<u{fitting[0]}"), 0, num_ids, made_with)


def _metadata(file: File) -> tuple[str, int, int]:
    """Reads (tokenizer, bytes of an id, number of ids); ("", 0, 0) if there is no such file."""
    path = Path(f"{file.path}.metadata")
    if not path.exists():
        return "", 0, 0
    try:
        first, count, *_ = read_bounded(path, MOST_METADATA).decode().splitlines()
        name, _, width = first.rpartition("|")
        return name, int(width), int(count)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(
            f"{path}: expected NAME|BYTES of the tokenizer and the number of ids in two lines; "
            "remove the file to go on without it"
        ) from None


def _index(file: File) -> Path:
    return Path(f"{file.path}.index")


def _ends(file: File, first: int, count: int) -> Ids:
    """The ends of documents first, ..., first + count - 1."""
    ends = np.fromfile(_index(file), END, count, offset=first * END.itemsize)
    if len(ends) < count:
        raise ConfigError(f"{_index(file)}: became shorter while it was read; start again")
    return ends


def _bounds(file: File, layout: Layout) -> Iterator[tuple[int, int]]:
    """Reads (first id, end) of each document. Raises ConfigError if the ends are not in order."""
    count = _index(file).stat().st_size // END.itemsize
    begin = 0
    for first in range(0, count, DOCUMENTS):
        ends = _ends(file, first, min(DOCUMENTS, count - first))
        begins = np.concatenate([np.array([begin], END), ends[:-1]])
        wrong = (begins > ends) | (ends > layout.num_ids)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise ConfigError(
                f"{_index(file)}: document {first + place} ends after {ends[place]} ids, at byte "
                f"{(first + place) * END.itemsize}; expected {begins[place]} to {layout.num_ids}"
            )
        yield from zip(begins.tolist(), ends.tolist(), strict=True)
        begin = int(ends[-1])


def _without_enclosure(
    file: File, layout: Layout, begin: int, end: int, tokenizer: Tokenizer
) -> tuple[int, int]:
    """The bounds of a document without the bos and eos at its ends."""
    size = layout.dtype.itemsize
    head = np.fromfile(file.path, layout.dtype, min(BLOCK, end - begin), offset=begin * size)
    begin += _run(head, tokenizer.bos)
    count = min(BLOCK, end - begin)
    tail = np.fromfile(file.path, layout.dtype, count, offset=(end - count) * size)
    return begin, end - _run(tail[::-1], tokenizer.eos)


def _run(ids: Ids, special: int) -> int:
    """The number of times that `special` stands at the start."""
    others = np.flatnonzero(ids != special)
    return int(others[0]) if len(others) else len(ids)
