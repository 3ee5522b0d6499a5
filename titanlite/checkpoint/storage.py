"""Checkpoint folders on disk, and the protocol by which each of them is complete or absent.

What it is: `checkpoints/step-N/` contains two safetensors files per process, small files that make
the folder self-contained (resolved config, model shape, tokenizer, data manifest) and
`manifest.json`. A save

    1. creates `step-N.tmp-<id>`, with a random id;
    2. lets each process write its files there and sync them to the disk;
    3. writes the small files and the manifest, with the size and SHA-256 of all files;
       and syncs them and the folder;
    4. renames the folder to `step-N`, and syncs the parent folder.

So a folder was complete when it was named `step-N`, whenever a process died, and nothing is written
into it later.
A deletion renames the folder first and then removes the files. A damaged checkpoint is renamed,
never deleted.
What it costs: each process writes its shards once: 12 bytes per parameter in fp32 with AdamW, over
all processes.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.manifest import (
    NAME,
    FileEntry,
    Manifest,
    RunMetadata,
    TensorEntry,
    to_text,
)
from titanlite.checkpoint.shard_file import Written, write_files
from titanlite.checkpoint.state import State
from titanlite.checkpoint.write_plan import Plan, Table, shared_tensors, tensor_entries
from titanlite.distributed.agreement import PATIENT, broadcast, gather_on_rank0
from titanlite.runtime.files import make_folder, sync_folder, write_synced

logger = logging.getLogger("titanlite")
RECORD = "stability.json"  # in the run's folder: divergences and rollbacks (divergence.py)


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier ones are unchanged."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def list_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in a `checkpoints` folder, ascending."""
    steps = []
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d{1,18})", path.name)
        if match and path.is_dir():
            steps.append(int(match[1]))
    return sorted(steps)


def write_step(
    folder: Path,
    step: int,
    state: State,
    extra_files: dict[str, bytes],
    facts: RunMetadata,
    failure: Exception | None = None,
) -> Manifest | None:
    """Writes and commits a checkpoint of CPU tensors; all processes call it together.

    Returns the manifest on rank 0. Raises SaveError on all processes, and leaves no new step
    folder, if one of them fails or passes a `failure`, an error that it had before.
    """
    save = _Save(folder, step, extra_files, facts)
    try:
        save.name, save.shared = _together(lambda: save.plan_writes(state, failure), save.begin)
        _together(save.write, save.commit)
    except SaveError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            for unfinished in folder.glob(f"step-{step}.tmp-*"):
                shutil.rmtree(unfinished, ignore_errors=True)  # frees space if the disk is full
        raise SaveError(f"step {step} could not be saved in {folder}: {error}") from None
    return save.manifest


def _together(work: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
    """What `decide` returns on rank 0, given the results of `work` on all ranks.

    If any raises, all raise SaveError.
    """
    value = None
    decision = None
    problem = ""
    try:
        value = work()
    except Exception as error:
        logger.debug("this process's part of the save failed", exc_info=True)
        problem = reason(error)
        if dist.is_initialized() and dist.get_world_size() > 1:
            problem = f"rank {dist.get_rank()}: {problem}"
    results = gather_on_rank0((value, problem), PATIENT)
    if results:  # rank 0
        problems = [problem for _, problem in results if problem]
        problem = problems[0] if problems else ""
        if not problem:
            try:
                decision = decide([value for value, _ in results])
            except Exception as error:
                problem = reason(error)
    decision, problem = broadcast((decision, problem), PATIENT)
    if problem:
        raise SaveError(problem)
    return decision


class _Save:
    """The parts of a save, in order.

    All ranks plan and write; rank 0 begins and commits, with the results of all.
    """

    plan: Plan
    entries: dict[str, TensorEntry]  # on rank 0
    # What `begin` returns, on all ranks: the temporary folder's name; tensors of several stages
    name: str
    shared: dict[str, int]
    manifest: Manifest | None = None  # on rank 0, when it is committed

    def __init__(
        self, folder: Path, step: int, extra_files: dict[str, bytes], facts: RunMetadata
    ) -> None:
        self.folder = folder
        self.step = step
        self.extra_files = extra_files
        self.facts = facts

    def plan_writes(self, state: State, failure: Exception | None) -> tuple[Table, list[Any]]:
        if failure is not None:
            raise failure
        self.plan = Plan(state)
        table = self.plan.table if self.plan.rank == self.plan.first else {}  # once per stage
        return table, self.plan.boxes()

    def begin(self, plans: list[tuple[Table, list[Any]]]) -> tuple[str, dict[str, int]]:
        tables = [table for table, _ in plans]
        self.entries = tensor_entries(tables, [boxes for _, boxes in plans])
        temporary = self.folder / f"step-{self.step}.tmp-{secrets.token_hex(4)}"
        make_folder(temporary)
        return temporary.name, shared_tensors(tables)

    def write(self) -> dict[str, Written]:
        temporary = self.folder / self.name
        files = {temporary / name: parts for name, parts in self.plan.files(self.shared).items()}
        return {path.name: written for path, written in write_files(files).items()}

    def commit(self, results: list[dict[str, Any]]) -> None:
        """`results`: what `write` returned on each rank, as JSON: named tuples are lists."""
        temporary = self.folder / self.name
        files: dict[str, FileEntry] = {}
        all_finite = True
        for written in results:
            for name, (entry, finite) in written.items():
                files[name] = FileEntry(*entry)
                all_finite = all_finite and finite
        for name, content in self.extra_files.items():
            write_synced(temporary / name, content)
            files[name] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        manifest = Manifest(
            step=self.step,
            finite=all_finite,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            torch=torch.__version__,
            files=files,
            tensors=self.entries,
            **self.facts._asdict(),
        )
        write_synced(temporary / NAME, to_text(manifest).encode())
        _publish(temporary, step_folder(self.folder, self.step))
        self.manifest = manifest


def _publish(temporary: Path, final: Path) -> None:
    sync_folder(temporary)
    temporary.rename(final)
    try:
        sync_folder(final.parent)  # makes the rename durable
    except OSError as error:  # the checkpoint is committed and readable, so the save has not failed
        logger.warning(
            "%s: %s while syncing it; a power failure now could lose %s",
            final.parent,
            error,
            final.name,
        )


def reason(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def sweep(folder: Path) -> None:
    """Removes the folders of interrupted saves and deletions.

    One process calls it, while no process writes.
    """
    for path in (*folder.glob("step-*.tmp-*"), *folder.glob("step-*.deleted")):
        remove_folder(path)


def remove_folder(path: Path) -> None:
    """Removes a folder with its content, or a link to one."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
