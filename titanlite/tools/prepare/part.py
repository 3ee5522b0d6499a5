"""Makes one part of a job: its shard files and a record of what was read.

What it is: the work of one process. `tokenise_part` writes the shards of part i, and then its
record: as long as that is absent, the part is to be made (again). If duplicates are to be dropped,
`hash_part` comes first, for all parts: it writes a hash of each document, and `tokenise_part`
follows when the duplicates among all parts are known (`duplicates.py`).
What it costs: two thirds of the time is spent in tiktoken (`benchmarks/prepare.py`). Memory does
not grow with the input: a block of text or ids, or one row, at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from titanlite.data.prepared_manifest import token_dtype
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file, sync_folder
from titanlite.runtime.typed_json import Count, Sha256
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat.conversation import Piece as ChatPiece
from titanlite.tools.chat.conversation import encode
from titanlite.tools.prepare.datatrove_files import datatrove_documents
from titanlite.tools.prepare.documents import BadRow, Document
from titanlite.tools.prepare.duplicates import (
    KEPT,
    hash_document,
    hashes_path,
    kept_documents,
)
from titanlite.tools.prepare.job import HOLDOUT, IDS, Job, Piece
from titanlite.tools.prepare.rows import row_documents
from titanlite.tools.prepare.shard_writer import ShardWriter
from titanlite.tools.prepare.text_files import text_documents
from titanlite.tools.prepare.token_files import token_documents

EXAMPLES = 5  # bad rows that are shown, of each part
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")


class Example(TypedDict):
    """A row that could not be read: its number from the place `begin` of the file on."""

    file: str
    begin: Count
    row: Count
    problem: str


@dataclass
class Counts:
    """What was read of a part."""

    rows: Count = 0
    bad: Count = 0  # rows that could not be read
    duplicates: Count = 0
    examples: list[Example] = field(default_factory=list)  # bad rows


class FileEntry(TypedDict):
    """A file of a shard."""

    file: str
    sha256: Sha256


class Shard(FileEntry):
    """A shard, as the manifest lists it."""

    tokens: Count
    documents: Count
    starts: FileEntry
    mask: FileEntry | None


class Shards(TypedDict):
    """The shard of each split."""

    train: Shard
    validation: Shard


class TextBytes(TypedDict):
    """The bytes of text of each split."""

    train: Count
    validation: Count


@dataclass(frozen=True)
class PartRecord:
    """What a part consists of."""

    counts: Counts
    shards: Shards
    text_bytes: TextBytes
    fingerprint: Sha256


class Digest(Protocol):
    """A hash object of hashlib, whose class has no public name."""

    def update(self, data: bytes, /) -> None: ...


def record_path(work: Path, part: int) -> Path:
    """The record of a part whose shards are complete."""
    return work / f"part-{part:05d}.json"


def run_part(job: Job, work: Path, tokenizer: Tokenizer, part: int) -> None:
    """The next step of a part."""
    if job.drop_duplicates and not (work / KEPT).exists():
        hash_part(job, work, tokenizer, part)
    else:
        tokenise_part(job, work, tokenizer, part)


def read_documents(job: Job, piece: Piece, tokenizer: Tokenizer) -> Iterator[Document | BadRow]:
    """The documents that begin in a piece.

    Raises ConfigError for a file that is damaged as a whole.
    """
    if piece.file.kind == "text":
        return text_documents(piece, job.whole_documents)
    if piece.file.kind == "datatrove":
        return datatrove_documents(piece.file, tokenizer)
    if piece.file.kind in IDS:
        return token_documents(piece.file, tokenizer, job.ids)
    return row_documents(job, piece)


def hash_part(job: Job, work: Path, tokenizer: Tokenizer, part: int) -> None:
    """Writes a hash of each document of a part."""
    records = []
    for piece in job.pieces(part):
        held_out = job.separate_validation and piece.file.split == "validation"
        for item in read_documents(job, piece, tokenizer):
            if isinstance(item, Document):
                content = hash_document("".join(item.blocks), item.prompt)
                records.append(content + bytes([held_out]))
    # shared: a worker of an earlier attempt may live for a second after it
    replace_file(hashes_path(work, part), b"".join(records), shared=True)


def tokenise_part(job: Job, work: Path, tokenizer: Tokenizer, part: int) -> None:
    """Writes the shards of a part, and then its record.

    Raises ConfigError if the tokenizer is not that of the job.
    """
    if tokenizer.sha256 != job.tokenizer_sha256:
        raise ConfigError(
            f"{tokenizer.path}: has SHA-256 {tokenizer.sha256[:8]}, not {job.tokenizer_sha256[:8]}"
        )
    masked = bool(job.prompt_field or job.chat.template)
    dtype = token_dtype(tokenizer.size)
    writers: dict[str, ShardWriter] = {}
    for split in SPLITS:
        writers[split] = ShardWriter(work, split, part, dtype, masked)
    digest = hashlib.sha256(tokenizer.sha256.encode())
    counts = Counts()
    # Once: of 128,000 ids this takes as long as many documents
    token_bytes = np.asarray(tokenizer.token_bytes)
    begin = [tokenizer.bos] if job.enclosed else tokenizer.before
    end = [tokenizer.eos] if job.enclosed else []
    try:
        for document in _documents(job, work, tokenizer, part, counts):
            _write(document, begin, end, tokenizer, writers, digest, token_bytes)
        shards = {split: writer.finish() for split, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    record = {  # a PartRecord
        "counts": dataclasses.asdict(counts),
        "shards": shards,
        "text_bytes": {split: writer.text_bytes for split, writer in writers.items()},
        "fingerprint": digest.hexdigest(),
    }
    sync_folder(work)  # a power failure must not leave the record without its shards
    replace_file(record_path(work, part), json.dumps(record).encode(), shared=True)


def _documents(
    job: Job, work: Path, tokenizer: Tokenizer, part: int, counts: Counts
) -> Iterator[Document]:
    """The documents of a part that stay. Counts them and the others."""
    stays = None
    if job.drop_duplicates:
        stays = kept_documents(job, work, part)
    count = 0
    for piece in job.pieces(part):
        for item in read_documents(job, piece, tokenizer):
            counts.rows += 1
            if isinstance(item, BadRow):
                counts.bad += 1
                if len(counts.examples) < EXAMPLES:
                    counts.examples.append(
                        {
                            "file": piece.file.path,
                            "begin": piece.begin,
                            "row": item.row,
                            "problem": item.problem,
                        }
                    )
                continue
            count += 1
            if stays is None or (count <= len(stays) and stays[count - 1]):
                yield item
            else:
                counts.duplicates += 1
    if stays is not None and count != len(stays):
        name = next(job.pieces(part)).file.path
        raise ConfigError(
            f"{name} or a file after it: has another number of documents than before; "
            "repeat the command"
        )


def _write(
    document: Document,
    begin: list[int],
    end: list[int],
    tokenizer: Tokenizer,
    writers: dict[str, ShardWriter],
    digest: Digest,
    token_bytes: NDArray[np.int64],
) -> None:
    """Appends a document to the shard of its split: `begin`, prompt, text, `end`.

    Ids of others are appended as they are, or between `begin` and `end`.
    """
    content: Iterator[Any] = iter(document.blocks if document.ids is None else document.ids)
    split = document.split
    if split == "hash":  # hash the prompt and first block of text, or the first block of ids
        first = next(content)
        content = itertools.chain([first], content)
        if document.ids is None:
            data = (document.prompt + first).encode()
        else:
            data = first.astype("<u4").tobytes()
        split = _split_of(data)
    header = f"{document.label} {split} {document.length}\n"
    digest.update(header.encode("utf-8", "surrogateescape"))
    writer = writers[split]
    if document.begins:
        writer.begin_document()
    if document.pieces:
        _write_conversation(document.pieces, tokenizer, writer, digest)
        return
    enclosed = document.ids is None or document.enclosed
    if enclosed and document.begins:
        writer.write(begin, targets=not document.prompt)
    if document.ids is not None:
        _write_ids(content, writer, digest, token_bytes)
    else:
        _write_text(document.prompt, content, tokenizer, writer, digest)
    if enclosed and document.ends:
        writer.write(end)


def _write_text(
    prompt: str,
    blocks: Iterator[str],
    tokenizer: Tokenizer,
    writer: ShardWriter,
    digest: Digest,
) -> None:
    if prompt:
        digest.update(prompt.encode())
        writer.write(tokenizer.encode(prompt), targets=False)
    if tokenizer.whole_documents:
        blocks = iter(["".join(blocks)])
    for block in blocks:
        data = block.encode()
        digest.update(data)
        writer.text_bytes += len(data)
        writer.write(tokenizer.encode(block))


def _write_conversation(
    pieces: Sequence[ChatPiece], tokenizer: Tokenizer, writer: ShardWriter, digest: Digest
) -> None:
    """The ids of a conversation, whose template has written what is before and after it."""
    for piece in pieces:
        data = piece.text.encode()
        digest.update(data + (b"+" if piece.target else b"-"))
        writer.text_bytes += len(data)
    ids, targets = encode(pieces, tokenizer)
    position = 0
    for target, run in itertools.groupby(targets):
        length = len(list(run))
        writer.write(ids[position : position + length], targets=target)
        position += length


def _write_ids(
    blocks: Iterator[NDArray[np.integer]],
    writer: ShardWriter,
    digest: Digest,
    token_bytes: NDArray[np.int64],
) -> None:
    for block in blocks:
        ids = block.astype("<u4")
        digest.update(ids.tobytes())
        writer.text_bytes += int(token_bytes[ids].sum())
        writer.write(ids)


def _split_of(data: bytes) -> str:
    """Holds out one document of HOLDOUT, chosen by a hash of its content."""
    number = int.from_bytes(hashlib.sha256(data).digest(), "big")
    return "validation" if number % HOLDOUT == 0 else "train"
