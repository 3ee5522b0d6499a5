"""Runs a job to its end: all parts on all cores, then the manifest.

What it is: the parts are made in a hidden working folder beside the result, whose name contains the
hash of the job, so that another input or option never meets these parts. Their shards are those of
the result; nothing is copied. When all are there, the manifest lists them, what only the work
needed is removed, and the working folder gets its final name. So a prepared folder is complete or
absent, and each step can be repeated after an interruption.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.data.prepared_manifest import AGAIN, FORMAT, read_manifest, token_dtype
from titanlite.data.verification import expected_files
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import make_folder, replace_file, sync_folder
from titanlite.runtime.lock_file import lock_file
from titanlite.runtime.progress import progress_bar
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.duplicates import KEPT, decide_duplicates, hashes_path
from titanlite.tools.prepare.job import (
    HASH,
    NAME,
    NO_CHAT,
    ChatConfig,
    Job,
    Piece,
    job_hash,
    read_typed,
    write_job,
)
from titanlite.tools.prepare.part import EXAMPLES, SPLITS, Example, PartRecord, record_path
from titanlite.tools.prepare.plan_job import check_unchanged, plan_job
from titanlite.tools.prepare.rows import first_row_number
from titanlite.tools.prepare.shard_writer import TEMPORARY
from titanlite.tools.prepare.sources import Found, Source
from titanlite.tools.prepare.token_layout import width_note
from titanlite.tools.prepare.workers import problems_of, run_parts

Log = Callable[[str], None]
BAD_ROWS = 0.01  # the share of rows that may be unreadable
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Options:
    """How a job is run. The first two decide the bytes of the result."""

    drop_duplicates: bool = False
    chat: ChatConfig = NO_CHAT
    workers: int = 0  # processes; 0: one per core
    max_bad_rows: float = BAD_ROWS  # below 1: a share of all


def working_folder(folder: Path, job: Job) -> Path:
    return folder.with_name(f".{folder.name}.parts-{job_hash(job)}")


def unfinished(folder: Path) -> list[Path]:
    """The working folders of all jobs that were begun for a prepared folder."""
    name = glob.escape(f".{folder.name}.parts-")
    return list(folder.parent.glob(name + HASH * "[0-9a-f]"))


@contextlib.contextmanager
def hold(folder: Path, wait: bool) -> Iterator[None]:
    """Keeps other processes from working on a prepared folder: `.NAME.lock` beside it is locked.

    `wait`: wait for such a process; without it there is a ConfigError.
    """
    make_folder(folder.parent)
    lock = folder.with_name(f".{folder.name}.lock")
    with lock_file(lock, f"{folder}: another process works in this folder; wait for it", wait):
        yield


def build(
    sources: list[tuple[Source, Found]],
    tokenizer: Tokenizer,
    folder: Path,
    options: Options,
    log: Log,
) -> None:
    """Prepares sources into `folder`, which does not exist yet.

    Finished parts of an earlier attempt at the same job are kept; those of others are removed at
    the end. The caller holds the folder (`hold`).
    Raises ConfigError for files that cannot be read, too many bad rows, or a full disk.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: has no manifest.json; {AGAIN}")
    started = time.monotonic()
    try:
        job = plan_job(sources, tokenizer, options.drop_duplicates, options.chat)
        work = working_folder(folder, job)
        try:
            make_folder(work)
            write_job(job, work)
            size = "an unknown size"
            if job.has_known_size:
                size = f"{len(job.files)} files, {job.bytes / 1e6:.1f} MB"
            log(f"preparing {job.name}: {size} from {', '.join(job.roots)}")
            for line in _notes(job):
                log(line)
            for path in work.glob(f"*{TEMPORARY}*"):  # a killed process has left them
                path.unlink(missing_ok=True)
            if not (work / MANIFEST).exists():
                _make_parts(job, work, tokenizer, options, log)
            manifest = finish(job, work, folder, tokenizer, options.max_bad_rows, log)
        except BaseException:
            finished = [*work.glob("part-*.json"), *work.glob("hashes-*.bin")]
            if not finished and not (work / MANIFEST).exists():
                shutil.rmtree(work, ignore_errors=True)  # nothing that another attempt could use
            raise
    except OSError as error:
        raise ConfigError(problems_of(error)) from None
    for other in unfinished(folder):
        shutil.rmtree(other, ignore_errors=True)
    tokens = {split: entry["tokens"] for split, entry in manifest["splits"].items()}
    log(
        f"prepared {tokens['train']:,} training and {tokens['validation']:,} validation tokens "
        f"in {time.monotonic() - started:.1f} s: {folder}"
    )


def _notes(job: Job) -> list[str]:
    """What the files were taken for, where a user may not expect it."""
    notes = []
    kinds = collections.Counter(file.kind for file in job.files)
    if len(kinds) > 1:
        counts = ", ".join(f"{count:,} of {kind}" for kind, count in kinds.items())
        notes.append(f"the files are of several kinds: {counts}")
    whole = [file for file in job.files if file.kind == "tokens" and file.split == "tail"]
    if whole:
        others = f" and {len(whole) - 1:,} more" if len(whole) > 1 else ""
        notes.append(
            f"{whole[0].path}{others}: neither bos nor eos is among the first ids, so the file is "
            "one document, whose last twentieth is for validation; Megatron lists documents in .idx"
        )
    for file in job.files:
        note = width_note(file.path, file.size, job.ids) if file.kind == "tokens" else ""
        if note:
            notes.append(note)
            break  # a folder's other files are alike
    return notes


def _make_parts(job: Job, work: Path, tokenizer: Tokenizer, options: Options, log: Log) -> None:
    """Makes the parts that are not there yet."""
    workers = options.workers or usable_processors()
    steps: list[tuple[str, Callable[[Path, int], Path]]] = [("tokenising", record_path)]
    if job.drop_duplicates and not (work / KEPT).exists():
        steps.insert(0, ("comparing", hashes_path))
    for name, result_of in steps:
        todo = [part for part in range(job.parts) if not result_of(work, part).exists()]
        if len(todo) < job.parts:
            log(f"going on: {job.parts - len(todo)} of {job.parts} parts are there already")
        total = sum(job.size(part) for part in todo) if job.has_known_size else None
        with progress_bar(total, name) as bar:
            for part in run_parts(job, work, tokenizer, todo, workers):
                bar.update(job.size(part))
        if result_of is hashes_path:
            decide_duplicates(job, work, log)


def usable_processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def finish(
    job: Job, work: Path, folder: Path, tokenizer: Tokenizer, limit: float, log: Log
) -> dict[str, Any]:
    """Makes the complete parts in `work` the prepared folder; returns its manifest.

    Raises ConfigError if more rows than `limit` could not be read, an input file has changed, or
    no document is left.
    """
    if folder.exists():
        raise ConfigError(
            f"{folder}: exists; move it away and repeat the command, which goes on with {work}"
        )
    if not (work / MANIFEST).exists():
        records = [read_typed(PartRecord, record_path(work, part)) for part in range(job.parts)]
        try:
            check_unchanged(job.files)
        except ConfigError:
            shutil.rmtree(work, ignore_errors=True)  # a part may be of the changed file
            raise
        _check_bad_rows(job, records, limit)
        manifest = _manifest(job, records, tokenizer)
        if not any(split["tokens"] for split in manifest["splits"].values()):
            # Its parts are of no use to another attempt, whose options must differ
            shutil.rmtree(work)
            raise ConfigError(f"{', '.join(job.roots)}: no document is left to train on")
        replace_file(work / MANIFEST, json.dumps(manifest, indent=1).encode())
    manifest = read_manifest(work)
    stays = {*expected_files(manifest), MANIFEST, NAME}  # the job, to repeat the command
    for path in work.iterdir():
        if path.name not in stays:
            path.unlink()
    sync_folder(work)
    work.rename(folder)
    sync_folder(folder.parent)
    rows = manifest["rows"]
    if rows["bad"]:
        log(f"left out {rows['bad']:,} of {rows['rows']:,} documents that cannot be read, such as:")
        for example in rows["examples"]:
            log(f"  {example}")
    return manifest


def _check_bad_rows(job: Job, records: list[PartRecord], limit: float) -> None:
    """Raises ConfigError if more rows than allowed could not be read.

    `limit`: a number of rows, or, below 1, a share of all.
    """
    rows = sum(record.counts.rows for record in records)
    bad = sum(record.counts.bad for record in records)
    most = limit
    allowed = f"{limit:g}"
    if limit < 1:
        most = limit * rows
        allowed = f"{100 * limit:g} %"
    if bad > most:
        problem = (
            f"{bad:,} of {rows:,} documents cannot be read; allowed: {allowed} (--max-bad-rows)"
        )
        raise ConfigError([problem, *_bad_rows(job, records)])


def _bad_rows(job: Job, records: list[PartRecord]) -> list[str]:
    """The first rows that could not be read, with file and line."""
    files = {file.path: file for file in job.files}
    examples: list[Example] = []
    for record in records:
        examples += [example for example in record.counts.examples if example["file"] in files]
    lines = []
    for example in examples[:EXAMPLES]:
        file = files[example["file"]]
        # The lines before a piece have to be read and counted
        number = first_row_number(Piece(file, example["begin"], file.size)) + example["row"]
        lines.append(f"{file.path}:{number}: {example['problem']}")
    return lines


def _manifest(job: Job, records: list[PartRecord], tokenizer: Tokenizer) -> dict[str, Any]:
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        shards = [record.shards[split] for record in records]
        shards = [shard for shard in shards if shard["tokens"]]
        splits[split] = {
            "tokens": sum(shard["tokens"] for shard in shards),
            "documents": sum(shard["documents"] for shard in shards),
            "bytes": sum(record.text_bytes[split] for record in records),
            "shards": shards,
        }
    text_bytes = sum(split["bytes"] for split in splits.values())
    fingerprint = records[0].fingerprint
    if len(records) > 1:
        joined = "".join(record.fingerprint for record in records)
        fingerprint = hashlib.sha256(joined.encode()).hexdigest()
    return {
        "format": FORMAT,
        "name": job.name,
        "roots": list(job.roots),
        "python": platform.python_version(),
        "files": len(job.files),
        "bytes": job.bytes if job.has_known_size else text_bytes,
        "parts": job.parts,
        "fingerprint": fingerprint,
        "tokenizer": {
            "file": tokenizer.path.name,
            "sha256": tokenizer.sha256,
            "size": tokenizer.size,
        },
        "dtype": token_dtype(tokenizer.size).str,
        **({"chat_template": job.chat.template} if job.chat.template else {}),
        **({"answer_end": job.chat.marker.strip()} if job.chat.marker else {}),
        "rows": {
            "rows": sum(record.counts.rows for record in records),
            "bad": sum(record.counts.bad for record in records),
            "examples": _bad_rows(job, records),
        },
        "duplicates": sum(record.counts.duplicates for record in records),
        "splits": splits,
    }
