"""Verifies the bytes of a checkpoint whose format has hashes or CRC-32.

What it is: the files of a step folder have SHA-256 in its manifest, and the storages in a file of
torch.save have CRC-32. A stock DCP folder has CRC-32 within its files, which are compared when a
tensor is read. Other formats have none.
What it costs: reading and hashing all bytes of the weights, on up to four threads.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from titanlite.checkpoint.folders import list_steps, step_folder
from titanlite.checkpoint.manifest import CorruptCheckpoint, Manifest, read_manifest
from titanlite.checkpoint.step_files import verify_files
from titanlite.tools.formats.full_state import FullState, FullTensor, Record


def require_intact(
    full: FullState,
    everything: bool = False,
    progress: Callable[[int], object] | None = None,
    share: slice = slice(None),
) -> None:
    """Raises CorruptCheckpoint unless the weights, or with `everything` all tensors, match their
    hashes.

    `share`: which of the storages of torch.save are compared, by default all.
    """
    for source in full.sources:
        require_intact(source, everything, progress, share)
    if full.sources:
        return
    problems = _damaged_records(_records(full, everything)[share], progress)
    if problems:
        raise CorruptCheckpoint(problems[:6])
    if full.about.format != "titanlite":
        return
    manifest = read_manifest(full.path)
    problems = verify_files(full.path, manifest, _names(full, manifest, everything), progress)
    if problems:
        raise CorruptCheckpoint([*problems, other_steps(full.path)])


def hashes_of(full: FullState, everything: bool) -> dict[Path, str]:
    """The files of a step folder that `require_intact` reads, with their SHA-256; none of another
    format.
    """
    if full.sources or full.about.format != "titanlite":
        return {}
    manifest = read_manifest(full.path)
    names = _names(full, manifest, everything)
    return {full.path / name: manifest.files[name].sha256 for name in names}


def _names(full: FullState, manifest: Manifest, everything: bool) -> list[str]:
    """The files of a step folder that hold what is used."""
    if everything:
        return list(manifest.files)
    needed = {"model.json"}
    for tensor in full.tensors.values():
        needed |= {part.file.name for part in tensor.parts}
    return [name for name in manifest.files if name in needed]


def _records(full: FullState, everything: bool) -> list[Record]:
    """The storages to compare: without `everything` not those that hold training state only."""
    weights = _places(full.tensors)
    others = _places(full.others)
    records = []
    for record in full.records:
        only_others = _within(record, others) and not _within(record, weights)
        if record.length and (everything or not only_others):
            records.append(record)
    return records


def _places(tensors: dict[str, FullTensor]) -> list[tuple[str, int]]:
    """The file and byte at which each part of the tensors begins, sorted."""
    return sorted(
        (str(part.file), part.begin) for tensor in tensors.values() for part in tensor.parts
    )


def _within(record: Record, places: list[tuple[str, int]]) -> bool:
    """Whether one of the places is within the record."""
    first = bisect.bisect_left(places, (str(record.file), record.begin))
    return first < len(places) and places[first] < (str(record.file), record.begin + record.length)


def _damaged_records(records: list[Record], progress: Callable[[int], object] | None) -> list[str]:
    def check(record: Record) -> str:
        problem = record.problem(progress)
        return f"{record.file}: {record.name!r} is damaged: {problem}" if problem else ""

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return [problem for problem in threads.map(check, records) if problem]


def other_steps(folder: Path) -> str:
    """A line that names the other checkpoints of the run of a damaged one."""
    others = [
        str(step)
        for step in list_steps(folder.parent)
        if step_folder(folder.parent, step) != folder
    ]
    return f"{folder} is damaged; other steps in {folder.parent}: {', '.join(others) or 'none'}"
