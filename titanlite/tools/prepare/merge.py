"""The steps that need all parts of a job: the search for duplicates, and the manifest.

What it is: the shards of the parts are the shards of the result; nothing is copied. The manifest
lists them in order, then the records of the parts are removed, and the working folder gets its
final name. So a prepared folder is complete or absent, and each of these steps can be repeated
after an interruption.
What it costs: the search for duplicates needs memory for each document (`duplicates.py`); the rest
reads only the records.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.prepared_manifest import FORMAT, read_manifest, token_dtype
from titanlite.data.verification import expected_files
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file, sync_folder
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.duplicates import find_duplicates
from titanlite.tools.prepare.filter_report import FilterReport
from titanlite.tools.prepare.inputs import check_inputs
from titanlite.tools.prepare.job import NAME, Job, afresh
from titanlite.tools.prepare.part import (
    DUPLICATE,
    EXAMPLES,
    FILTERED,
    HELD_OUT,
    KEPT,
    signatures_path,
    verdicts_path,
)
from titanlite.tools.prepare.records import SPLITS, PartRecord, read_record, record_path
from titanlite.tools.prepare.rows import numbered
from titanlite.tools.prepare.signatures import RECORD

MANIFEST = "manifest.json"


def missing_parts(job: Job, work: Path, read: bool = False) -> list[int]:
    """The parts without a record."""
    return [part for part in range(job.parts) if not record_path(work, part, read).exists()]


def decide_duplicates(job: Job, work: Path, log: Callable[[str], None]) -> None:
    """Marks the duplicates among the documents of all parts, which must have been read.

    A copy of a document from a separate validation source is dropped from the training documents,
    not the other way.
    """
    if verdicts_path(work, job.parts - 1, final=True).exists():
        return
    verdicts = []  # of each part: (documents,)
    passed = []  # of each part: the indices of the documents that the filters keep
    held_out = []  # of each part: whether each of these is from a separate validation source
    for part in range(job.parts):
        path = verdicts_path(work, part)
        of_part = np.fromfile(path, np.uint8)
        indices = np.flatnonzero(of_part != FILTERED)
        signed = signatures_path(work, part).stat().st_size // RECORD.itemsize
        if len(indices) != signed:
            problem = f"keeps {len(indices)} documents, and {signed} have a signature"
            raise ConfigError(f"{path}: {problem}; {afresh(work)}")
        verdicts.append(of_part)
        passed.append(indices)
        held_out.append(of_part[indices] == HELD_OUT)
    signatures = [signatures_path(work, part) for part in range(job.parts)]
    duplicates = find_duplicates(signatures, job.duplicates, np.concatenate(held_out))
    log(
        f"duplicates among {len(duplicates.first):,} documents: "
        f"{duplicates.exact:,} equal, {duplicates.near:,} similar"
    )
    ends = np.cumsum([len(indices) for indices in passed])
    stays = np.split(duplicates.stays, ends[:-1])
    for part in range(job.parts):  # in this order: the last file says that all are there
        verdicts[part][passed[part]] = np.where(stays[part], KEPT, DUPLICATE)
        replace_file(verdicts_path(work, part, final=True), verdicts[part].tobytes())


def check_bad_rows(job: Job, records: list[PartRecord], limit: float) -> None:
    """Raises ConfigError if more rows than allowed could not be read.

    `limit`: a number of rows, or, below 1, a share of all.
    """
    rows = sum(record.rows for record in records)
    bad = sum(record.bad for record in records)
    if limit < 1:
        most = limit * rows
        allowed = f"{100 * limit:g} %"
    else:
        most = limit
        allowed = f"{limit:g}"
    if bad > most:
        problem = (
            f"{bad:,} of {rows:,} documents cannot be read; allowed: {allowed} (--max-bad-rows)"
        )
        raise ConfigError([problem, *_bad_rows(job, records)])


def _bad_rows(job: Job, records: list[PartRecord]) -> list[str]:
    """The first rows that could not be read, with file and line."""
    examples = list(itertools.chain.from_iterable(record.examples for record in records))
    rows = numbered(job, examples[:EXAMPLES])
    return [f"{row['file']}:{row['row']}: {row['text']}" for row in rows]


def merge(
    job: Job,
    work: Path,
    folder: Path,
    tokenizer: Tokenizer,
    limit: float,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Makes the complete parts in `work` the prepared folder; returns its manifest.

    Raises ConfigError if more rows than `limit` could not be read, a shard is incomplete, or no
    document is left.
    """
    if folder.exists():
        raise ConfigError(
            f"{folder}: exists; move it away and repeat the command, which goes on with {work}"
        )
    if not (work / MANIFEST).exists():
        records = [read_record(job, work, part) for part in range(job.parts)]
        check_inputs(job.files, work)
        check_bad_rows(job, records, limit)
        manifest = _manifest(job, records, tokenizer)
        _check_shards(job, work, manifest)
        if not any(split["tokens"] for split in manifest["splits"].values()):
            _report(manifest, log)
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
    _report(manifest, log)
    return manifest


def _check_shards(job: Job, work: Path, manifest: dict[str, Any]) -> None:
    """Raises ConfigError for shard files that are absent or incomplete.

    Removes the records of their parts, so that the next command makes them again.
    """
    problems = []
    parts = set()
    for name, expected in expected_files(manifest).items():
        path = work / name
        size = path.stat().st_size if path.is_file() else 0
        if size != expected.size:
            problems.append(f"{path}: {size} bytes, expected {expected.size}")
            parts.add(int(name.partition("-")[2].partition(".")[0]))  # train-00012.starts.bin: 12
    for part in parts:
        record_path(work, part).unlink()
    if problems:
        again = ", ".join(f"{part + 1}/{job.parts}" for part in sorted(parts))
        raise ConfigError([*problems[:EXAMPLES], f"repeat the command, or its --part {again}"])


def _manifest(job: Job, records: list[PartRecord], tokenizer: Tokenizer) -> dict[str, Any]:
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        shards = [record.shards[split] for record in records if record.shards[split]["tokens"]]
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
    report = FilterReport()
    for record in records:
        report.add(record.report)
    for dropped in report.rules.values():
        dropped.examples = numbered(job, dropped.examples)
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
        **({"pairs": True} if job.chat.pairs else {}),
        "rows": {
            "rows": sum(record.rows for record in records),
            "bad": sum(record.bad for record in records),
            "examples": _bad_rows(job, records),
        },
        "filters": report.to_json(),
        "splits": splits,
    }


def _report(manifest: dict[str, Any], log: Callable[[str], None]) -> None:
    rows = manifest["rows"]
    if rows["bad"]:
        log(f"left out {rows['bad']:,} of {rows['rows']:,} documents that cannot be read, such as:")
        for example in rows["examples"]:
            log(f"  {example}")
    report = FilterReport.from_json(manifest["filters"])
    if report.documents:
        for line in report.summary():
            log(line)
