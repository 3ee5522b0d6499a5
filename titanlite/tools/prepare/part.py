"""One part of a job -> its shard files and a record of what was read.

What it is: the work of one process, alone or among many on any machines. `tokenise_part` writes the
shards of part i. If duplicates are to be removed, `read_part` comes first: it writes the signatures
of all documents that the filters keep, and a byte for each document; when the duplicates among all
parts are known (`merge.py`), `tokenise_part` follows.
What it costs: two thirds of the time is spent in tiktoken (`benchmarks/prepare.py`). Memory does
not grow with the input: a block of text or ids, or one row, at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from titanlite.data.prepared_manifest import token_dtype
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat.conversation import Piece as ChatPiece
from titanlite.tools.chat.conversation import encode
from titanlite.tools.prepare.documents import BadRow, Document
from titanlite.tools.prepare.filter_report import Example, FilterReport
from titanlite.tools.prepare.filters import rejection
from titanlite.tools.prepare.inputs import check_inputs
from titanlite.tools.prepare.job import HOLDOUT, NO_FILTERS, Job, Piece
from titanlite.tools.prepare.readers import read_documents
from titanlite.tools.prepare.records import SPLITS, read_record, record_path
from titanlite.tools.prepare.shard_writer import HashedFile, ShardWriter
from titanlite.tools.prepare.signatures import signature

EXAMPLES = 5  # bad rows that are shown, of each part
# What becomes of a document; HELD_OUT is kept before an equal KEPT one
FILTERED, KEPT, DUPLICATE, HELD_OUT = range(4)

Progress = Callable[[int], object]


class Digest(Protocol):
    """A hash object of hashlib, whose class has no public name."""

    def update(self, data: bytes, /) -> None: ...


def signatures_path(work: Path, part: int) -> Path:
    return work / f"signatures-{part:05d}.bin"


def verdicts_path(work: Path, part: int, final: bool = False) -> Path:
    """A byte for each document: by the filters, or (`final`) also by the removal of duplicates."""
    name = "kept" if final else "passed"
    return work / f"{name}-{part:05d}.bin"


def run_part(job: Job, work: Path, tokenizer: Tokenizer, part: int, progress: Progress) -> None:
    """The next step of a part that is not done yet.

    Raises ConfigError if its input has changed since the job began.
    """
    read = job.duplicates.remove != "none" and not verdicts_path(work, part, final=True).exists()
    if record_path(work, part, read).exists():
        return
    check_inputs((piece.file for piece in job.pieces(part)), work)
    if read:
        read_part(job, work, tokenizer, part, progress)
    else:
        tokenise_part(job, work, tokenizer, part, progress)


class Tally:
    """What was read and what was left out."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows = 0
        self.bad = 0
        self._advanced = 0  # progress within the document that is being read
        self.examples: list[Example] = []  # of bad rows
        self.report = FilterReport()

    def documents(
        self, part: int, tokenizer: Tokenizer, progress: Progress
    ) -> Iterator[tuple[Piece, Document]]:
        """The documents of a part.

        Bad rows are counted here. Progress amounts to the size of each piece, if known.
        """
        for piece in self.job.pieces(part):
            remaining = piece.end - piece.begin if piece.file.has_known_size else 1 << 62
            for item in read_documents(self.job, piece, tokenizer):
                self._advanced = 0
                if isinstance(item, BadRow):
                    self._count_bad(piece, item)
                elif isinstance(item, Document):
                    self.rows += 1
                    yield piece, self._advancing(item, progress)
                size = min(item.progress, remaining)
                progress(max(0, size - self._advanced))
                remaining -= size
            if piece.file.has_known_size:
                progress(remaining)

    def _count_bad(self, piece: Piece, bad_row: BadRow) -> None:
        self.rows += 1
        self.bad += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(
                {
                    "file": piece.file.path,
                    "row": bad_row.row,
                    "begin": piece.begin,
                    "text": bad_row.problem,
                }
            )

    def _advancing(self, document: Document, progress: Progress) -> Document:
        """The document; if its blocks come from a file, the progress advances with each of them."""
        if not isinstance(document.blocks, Iterator):
            return document

        def blocks() -> Iterator[str]:
            characters = 0
            for block in document.blocks:
                yield block
                characters += len(block)
                place = document.progress * characters // max(1, document.length)
                progress(place - self._advanced)
                self._advanced = place

        return document._replace(blocks=blocks())

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "bad": self.bad,
            "examples": self.examples,
            "report": self.report.to_json(),
        }


def read_part(job: Job, work: Path, tokenizer: Tokenizer, part: int, progress: Progress) -> None:
    """Filters the documents of a part and writes their signatures."""
    tally = Tally(job)
    signatures = HashedFile(signatures_path(work, part))
    verdicts = HashedFile(verdicts_path(work, part))
    try:
        for piece, document in tally.documents(part, tokenizer, progress):
            text = "".join(document.blocks)
            rule = rejection(text, job.filters)
            tally.report.count(text, rule, piece.file.path, document.row, piece.begin)
            verdict = KEPT
            if rule:
                verdict = FILTERED
            elif job.separate_validation and piece.file.split == "validation":
                verdict = HELD_OUT
            verdicts.write(bytes([verdict]))
            if not rule:
                signatures.write(signature(text, job.duplicates.remove == "near", document.prompt))
        signatures.finish()
        verdicts.finish()
    except BaseException:
        signatures.discard()
        verdicts.discard()
        raise
    record = json.dumps(tally.as_json()).encode()
    replace_file(record_path(work, part, read=True), record, shared=True)


def tokenise_part(
    job: Job, work: Path, tokenizer: Tokenizer, part: int, progress: Progress
) -> None:
    """Writes the shards of a part, and then its record."""
    if tokenizer.sha256 != job.tokenizer_sha256:
        raise ConfigError(
            f"{tokenizer.path}: has SHA-256 {tokenizer.sha256[:8]}, not {job.tokenizer_sha256[:8]}"
        )
    dtype = token_dtype(tokenizer.size)
    masked = bool(job.prompt_field or job.chat.template)
    writers = {split: ShardWriter(work, split, part, dtype, masked) for split in SPLITS}
    digest = hashlib.sha256(tokenizer.sha256.encode())
    tally = Tally(job)
    verdicts = None
    if job.duplicates.remove != "none":
        verdicts = np.fromfile(verdicts_path(work, part, final=True), np.uint8)
    # Once: of 128,000 ids this takes as long as many documents
    token_bytes = np.asarray(tokenizer.token_bytes)
    count = 0
    try:
        for piece, document in tally.documents(part, tokenizer, progress):
            verdict = None
            if verdicts is not None:
                if count == len(verdicts):
                    raise _other_documents(job, part)
                verdict = int(verdicts[count])
            if _stays(tally, piece, document, verdict):
                _write(document, tokenizer, writers, digest, token_bytes)
            count += 1
        if verdicts is not None and count < len(verdicts):
            raise _other_documents(job, part)
        shards = {split: writer.finish() for split, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    record = tally.as_json()
    if verdicts is not None:  # `read_part` has counted what the filters reject
        report = read_record(job, work, part, read=True).report
        report.add(tally.report)
        record["report"] = report.to_json()
    text_bytes = {split: writer.text_bytes for split, writer in writers.items()}
    record |= {"shards": shards, "text_bytes": text_bytes, "fingerprint": digest.hexdigest()}
    replace_file(record_path(work, part), json.dumps(record).encode(), shared=True)


def _other_documents(job: Job, part: int) -> ConfigError:
    names = list(dict.fromkeys(piece.file.path for piece in job.pieces(part)))
    others = ""
    if len(names) > 1:
        others = f" or {len(names) - 1} others"
    return ConfigError(
        f"{names[0]}{others}: has another number of documents than before; repeat the command"
    )


def _stays(tally: Tally, piece: Piece, document: Document, verdict: int | None) -> bool:
    """Whether a document is kept; counts it if it is not."""
    if verdict is not None:
        if verdict == DUPLICATE:
            tally.report.drop(
                "".join(document.blocks), "duplicate", piece.file.path, document.row, piece.begin
            )
        return verdict == KEPT
    if tally.job.filters == NO_FILTERS or document.ids is not None:
        return True
    text = "".join(document.blocks)
    rule = rejection(text, tally.job.filters)
    tally.report.count(text, rule, piece.file.path, document.row, piece.begin)
    return not rule


def _write(
    document: Document,
    tokenizer: Tokenizer,
    writers: dict[str, ShardWriter],
    digest: Digest,
    token_bytes: NDArray[np.int64],
) -> None:
    """Appends a document to the shard of its split: bos, prompt, text, eos.

    Ids of others are appended as they are.
    """
    content: Iterator[Any] = iter(document.blocks if document.ids is None else document.ids)
    split = document.split
    if split == "hash":  # of the prompt and the first block of text, or of the first block of ids
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
        if document.rejected:
            writer.begin_document()
            _write_conversation(document.rejected, tokenizer, writer, digest)
        return
    if document.ids is not None:
        _write_ids(content, writer, digest, token_bytes)
        return
    if document.begins:
        writer.write([tokenizer.bos], targets=not document.prompt)
    if document.prompt:
        digest.update(document.prompt.encode())
        writer.write(tokenizer.encode(document.prompt), targets=False)
    if tokenizer.whole_documents:
        content = iter(["".join(content)])
    for block in content:
        data = block.encode()
        digest.update(data)
        writer.text_bytes += len(data)
        writer.write(tokenizer.encode(block))
    if document.ends:
        writer.write([tokenizer.eos])


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


def _split_of(data: bytes) -> str:
    """Held out is one document of HOLDOUT, by a hash of its content."""
    number = int.from_bytes(hashlib.sha256(data).digest(), "big")
    return "validation" if number % HOLDOUT == 0 else "train"


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
