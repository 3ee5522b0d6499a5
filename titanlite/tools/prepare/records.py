"""The records of a job's parts: what each complete part wrote beside its files.

What it is: `read-<part>.json` for a part whose documents have signatures, `part-<part>.json` for
one whose shards are complete. A record stands for its files: as long as it is absent, the part is
to be made (again).
Why it is here: a working folder may have been interrupted, copied or damaged, so a record is
checked as a whole when it is read: its types, that its shards are those of its part, and that its
examples are of the job's files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.typed_json import Count, Sha256, typed
from titanlite.tools.prepare.filter_report import Example, FilterReport
from titanlite.tools.prepare.job import Job, afresh, read_json

SPLITS = ("train", "validation")
NO_FINGERPRINT = "0" * 64


class FileEntry(TypedDict):
    """A file of a shard."""

    file: str
    sha256: Sha256


class Shard(FileEntry):
    """A shard of a split, as the manifest lists it."""

    tokens: Count
    documents: Count
    starts: FileEntry
    mask: FileEntry | None


@dataclass(frozen=True)
class PartRecord:
    """What a part consists of.

    Of a part that was only read, there are no shards, and no fingerprint.
    """

    rows: Count
    bad: Count
    examples: list[Example]  # of bad rows
    report: FilterReport
    shards: dict[str, Shard] = dataclasses.field(default_factory=dict)  # split -> shard
    text_bytes: dict[str, Count] = dataclasses.field(default_factory=dict)
    fingerprint: Sha256 = NO_FINGERPRINT


def record_path(work: Path, part: int, read: bool = False) -> Path:
    """The record of a complete part: of its shards, or of its documents and signatures."""
    return work / f"{'read' if read else 'part'}-{part:05d}.json"


def read_record(job: Job, work: Path, part: int, read: bool = False) -> PartRecord:
    """A part's record. Raises ConfigError if it is absent, damaged, or of another job."""
    path = record_path(work, part, read)
    content = read_json(path)
    try:
        record = typed(PartRecord, content)
        _require_consistent(job, part, record, read)
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); {afresh(work)}") from None
    return record


def _require_consistent(job: Job, part: int, record: PartRecord, read: bool) -> None:
    """Raises ValueError."""
    splits = [] if read else sorted(SPLITS)
    if not sorted(record.shards) == sorted(record.text_bytes) == splits:
        raise ValueError(f"shards, text_bytes: expected {' and '.join(splits) or 'none'}")
    if (record.fingerprint == NO_FINGERPRINT) != read:
        raise ValueError(f"fingerprint: expected {'none' if read else 'one'}")
    for split, shard in record.shards.items():
        entries = {"": shard, ".starts": shard["starts"], ".mask": shard["mask"]}
        for kind, entry in entries.items():
            if entry is not None and entry["file"] != (name := f"{split}-{part:05d}{kind}.bin"):
                raise ValueError(f"shards.{split}: expected {name}, found {entry['file']!r:.100}")
    sizes = {file.path: file.size for file in job.files}
    for example in (
        *record.examples,
        *(e for rule in record.report.rules.values() for e in rule.examples),
    ):
        if not 0 <= example.get("begin", -1) <= sizes.get(example["file"], -1):
            raise ValueError(
                f"examples: expected a row of a file of the job, found {example['file']!r:.100}"
            )
