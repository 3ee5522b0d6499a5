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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.data.prepared_manifest import token_dtype
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
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

Progress = Callable[[int], Any]


def signatures_path(work: Path, part: int) -> Path:
    return work / f"signatures-{part:05d}.bin"


def verdicts_path(work: Path, part: int, final: bool = False) -> Path:
    """A byte for each document: by the filters, or also by the removal of duplicates."""
    return work / f"{'kept' if final else 'passed'}-{part:05d}.bin"


def run_part(job: Job, work: Path, tokenizer: Tokenizer, part: int, progress: Progress) -> None:
    """The next step of a part that is not done yet.

    Raises ConfigError if its input has changed since the job began.
    """
    read = job.duplicates.remove != "none" and not verdicts_path(work, part, final=True).exists()
    if not record_path(work, part, read).exists():
        check_inputs((piece.file for piece in job.pieces(part)), work)
        (read_part if read else tokenise_part)(job, work, tokenizer, part, progress)


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
            left = piece.end - piece.begin if piece.file.has_known_size else 1 << 62
            for found in read_documents(self.job, piece, tokenizer):
                self._advanced = 0
                if isinstance(found, BadRow):
                    self.rows += 1
                    self.bad += 1
                    if len(self.examples) < EXAMPLES:
                        self.examples.append(
                            {
                                "file": piece.file.path,
                                "row": found.row,
                                "begin": piece.begin,
                                "text": found.problem,
                            }
                        )
                elif isinstance(found, Document):
                    self.rows += 1
                    yield piece, self._advancing(found, progress)
                done = min(found.progress, left)
                progress(max(0, done - self._advanced))
                left -= done
            progress(left if piece.file.has_known_size else 0)

    def _advancing(self, document: Document, progress: Progress) -> Document:
        """The document; if its blocks come from a file, the progress advances with each of them."""

        def blocks() -> Iterator[str]:
            characters = 0
            for block in document.blocks:
                yield block
                characters += len(block)
                place = document.progress * characters // max(1, document.length)
                progress(place - self._advanced)
                self._advanced = place

        return (
            document._replace(blocks=blocks())
            if isinstance(document.blocks, Iterator)
            else document
        )

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
            held_out = job.separate_validation and piece.file.split == "validation"
            verdicts.write(bytes([FILTERED if rule else HELD_OUT if held_out else KEPT]))
            if not rule:
                signatures.write(signature(text, job.duplicates.remove == "near", document.prompt))
        signatures.finish()
        verdicts.finish()
    except BaseException:
        signatures.discard()
        verdicts.discard()
        raise
    replace_file(
        record_path(work, part, read=True), json.dumps(tally.as_json()).encode(), shared=True
    )


def tokenise_part(
    job: Job, work: Path, tokenizer: Tokenizer, part: int, progress: Progress
) -> None:
    """Writes the shards of a part, and then its record."""
    if tokenizer.sha256 != job.tokenizer_sha256:
        raise ConfigError(
            f"{tokenizer.path}: has SHA-256 {tokenizer.sha256[:8]}, not {job.tokenizer_sha256[:8]}"
        )
    dtype = token_dtype(tokenizer.size)
    masked = bool(job.prompt_field)
    writers = {split: ShardWriter(work, split, part, dtype, masked) for split in SPLITS}
    digest = hashlib.sha256(tokenizer.sha256.encode())
    tally = Tally(job)
    verdicts = (
        np.fromfile(verdicts_path(work, part, True), np.uint8)
        if job.duplicates.remove != "none"
        else None
    )
    # Once: of 128,000 ids this takes as long as many documents
    token_bytes = np.asarray(tokenizer.token_bytes)
    count = 0
    try:
        for piece, document in tally.documents(part, tokenizer, progress):
            if verdicts is not None and count == len(verdicts):
                raise _other_documents(job, part)
            if _stays(tally, piece, document, None if verdicts is None else verdicts[count]):
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
    if verdicts is not None:  # the filters have been counted, when the signatures were made
        report = read_record(job, work, part, read=True).report
        report.add(tally.report)
        record["report"] = report.to_json()
    text_bytes = {split: writer.text_bytes for split, writer in writers.items()}
    record |= {"shards": shards, "text_bytes": text_bytes, "fingerprint": digest.hexdigest()}
    replace_file(record_path(work, part), json.dumps(record).encode(), shared=True)


def _other_documents(job: Job, part: int) -> ConfigError:
    names = list(dict.fromkeys(piece.file.path for piece in job.pieces(part)))
    others = f" or {len(names) - 1} others" if len(names) > 1 else ""
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
    digest: Any,
    token_bytes: NDArray[np.int64],
) -> None:
    """Appends a document to the shard of its split: bos, prompt, text, eos.

    Ids of others are appended as they are.
    """
    content: Iterator[Any] = iter(document.ids if document.ids is not None else document.blocks)
    split = document.split
    if split == "hash":  # of the text, or of the first block of ids
        first = next(content)
        content = itertools.chain([first], content)
        identity = (
            document.prompt + first if document.ids is None else first.astype("<u4").tobytes()
        )
        data = identity if isinstance(identity, bytes) else identity.encode()
        split = SPLITS[int.from_bytes(hashlib.sha256(data).digest(), "big") % HOLDOUT == 0]
    digest.update(
        f"{document.label} {split} {document.length}\n".encode("utf-8", "surrogateescape")
    )
    writer = writers[split]
    if document.begins:
        writer.begin_document()
    if document.ids is not None:
        _write_ids(content, writer, digest, token_bytes)
        return
    if document.begins:
        writer.write([tokenizer.bos], targets=not document.prompt)
    if document.prompt:
        digest.update(document.prompt.encode())
        writer.write(tokenizer.encode(document.prompt), targets=False)
    for block in content:
        data = block.encode()
        digest.update(data)
        writer.text_bytes += len(data)
        writer.write(tokenizer.encode(block))
    if document.ends:
        writer.write([tokenizer.eos])


def _write_ids(
    blocks: Iterator[Any], writer: ShardWriter, digest: Any, token_bytes: NDArray[np.int64]
) -> None:
    for block in blocks:
        ids = block.astype("<u4")
        digest.update(ids.tobytes())
        writer.text_bytes += int(token_bytes[ids].sum())
        writer.write(ids)
