"""Runs a job to its end: all parts on all cores, then the merge.

What it is: the orchestration on one machine (or on Ray). On several machines without Ray, the same
steps are separate commands: `--part i/n` for each part, and `--merge`
(`tools/cli/prepare_command.py`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from titanlite.data.prepared_manifest import AGAIN
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import make_folder
from titanlite.runtime.progress import progress_bar
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.changed_input import keep_unchanged, only_input_differs
from titanlite.tools.prepare.job import NAME, Job, begin_job, differences, read_job, write_job
from titanlite.tools.prepare.merge import (
    MANIFEST,
    check_bad_rows,
    decide_duplicates,
    merge,
    missing_parts,
)
from titanlite.tools.prepare.plan_job import Settings, plan_job
from titanlite.tools.prepare.records import read_record
from titanlite.tools.prepare.shard_writer import TEMPORARY
from titanlite.tools.prepare.sources import Found, Source
from titanlite.tools.prepare.workers import problems, run_on_ray, run_parts

Log = Callable[[str], None]
BAD_ROWS = 0.01  # the share of rows that may be unreadable


@dataclass(frozen=True)
class Options:
    """How a job is run. Only `settings` decides the bytes of the result."""

    settings: Settings = field(default_factory=Settings)
    workers: int = 0  # processes; 0: one per core
    max_bad_rows: float = BAD_ROWS
    engine: str = "local"  # or ray


def working_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.parts")


def begin(
    sources: list[tuple[Source, Found]],
    tokenizer: Tokenizer,
    folder: Path,
    settings: Settings,
    restart: Log | None = None,
) -> Job:
    """The job for a prepared folder, in its working folder.

    Raises ConfigError if another one was begun there.
    `restart`: if only the input has changed since, remove what depends on it, and log that. The
    caller must hold the folder alone.
    """
    work = working_folder(folder)
    begun = read_job(work) if (work / NAME).exists() else None
    job = plan_job(sources, tokenizer, settings, begun)
    make_folder(work)
    if restart and begun and only_input_differs(begun, job):
        num_kept = keep_unchanged(begun, job, work)
        write_job(job, work)
        changes = differences(begun, job)
        restart(
            f"the input is not that of the earlier attempt ({changes}); "
            f"{num_kept} of {job.parts} parts are kept"
        )
    begin_job(job, work)
    return job


def build(
    sources: list[tuple[Source, Found]],
    tokenizer: Tokenizer,
    folder: Path,
    options: Options,
    log: Log,
) -> None:
    """Prepares sources into `folder`, which does not exist yet.

    Finished parts of an earlier attempt are kept. The caller holds the folder alone (`locks.py`).
    Raises ConfigError for files that cannot be read, too many bad rows, or a full disk.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: has no manifest.json; {AGAIN}")
    started = time.monotonic()
    work = working_folder(folder)
    bytes_read = 0
    is_new = not (work / NAME).exists()
    try:
        job = begin(sources, tokenizer, folder, options.settings, restart=log)
        size = "an unknown size"
        if job.has_known_size:
            size = f"{len(job.files)} files, {job.bytes / 1e6:.1f} MB"
        log(f"preparing {job.name}: {size} from {', '.join(job.roots)}")
        for path in work.glob(f"*{TEMPORARY}*"):  # of a process that was killed
            path.unlink(missing_ok=True)
        if not (work / MANIFEST).exists():
            if job.duplicates.remove != "none":
                _run(job, work, tokenizer, options, log, read=True)
                decide_duplicates(job, work, log)
            bytes_read = _run(job, work, tokenizer, options, log)
        manifest = merge(job, work, folder, tokenizer, options.max_bad_rows, log)
    except BaseException as error:
        finished = [*work.glob("part-*.json"), *work.glob("read-*.json"), *work.glob(MANIFEST)]
        if is_new and not finished:  # nothing that another attempt could use
            shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(problems(error)) from None
        raise
    tokens = {split: entry["tokens"] for split, entry in manifest["splits"].items()}
    seconds = time.monotonic() - started
    rate = ""
    if bytes_read:  # without the parts of an earlier attempt
        rate = f" ({bytes_read / 1e6 / seconds:.1f} MB/s)"
    log(
        f"prepared {tokens['train']:,} training and {tokens['validation']:,} validation tokens "
        f"in {seconds:.1f} s{rate}: {folder}"
    )


def _run(
    job: Job, work: Path, tokenizer: Tokenizer, options: Options, log: Log, read: bool = False
) -> int:
    """One pass over the parts that have not been through it.

    Returns the number of bytes that were read.
    """
    todo = missing_parts(job, work, read)
    if len(todo) < job.parts:
        log(f"going on: {job.parts - len(todo)} of {job.parts} parts are there already")
    with progress_bar(job.size(todo), "reading" if read else "tokenising") as bar:
        if options.engine == "ray":
            for part in run_on_ray(work, todo):
                bar.update(job.size([part]) or 0)
        else:
            workers = options.workers or usable_processors()
            records = []
            for part in run_parts(job, work, tokenizer, todo, workers, bar.update):
                records.append(read_record(job, work, part, read))
                # A number, unlike a share of all, can be exceeded before the end
                if options.max_bad_rows >= 1:
                    check_bad_rows(job, records, options.max_bad_rows)
        return int(bar.n)


def usable_processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
