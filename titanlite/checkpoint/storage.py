"""Checkpoint folders on disk, and the protocol by which each of them is complete or absent.

What it is: `checkpoints/step-N/` contains two safetensors files per process, small files that make the folder
self-contained (resolved config, model shape, tokenizer, data manifest) and `manifest.json`. A save

    1. creates `step-N.tmp-<id>`, with a random id;
    2. lets each process write its files there and sync them to the disk;
    3. writes the small files and the manifest, with the size and SHA-256 of all files, and syncs them and the folder;
    4. renames the folder to `step-N`, and syncs the parent folder.

So a folder was complete when it was named `step-N`, whenever a process died, and nothing is written into it later.
A deletion renames the folder first and then removes the files. A damaged checkpoint is renamed, never deleted.
What it costs: each process writes its shards once: 12 bytes per parameter in fp32 with AdamW, over all processes.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import shutil
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp import Contents, Writer
from titanlite.checkpoint.manifest import FileEntry, Manifest, RunMetadata
from titanlite.config.files import make_folder, sync_folder, write_synced
from titanlite.config.schema import ConfigError

logger = logging.getLogger("titanlite")
# DCP gives this warning in every save and load of a single process. A filter around a call would affect all threads.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier ones are unchanged."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def list_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in a `checkpoints` folder, ascending."""
    found = ((path, re.fullmatch(r"step-(\d{1,18})", path.name)) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for path, match in found if match and path.is_dir())


def write_step(
    folder: Path,
    step: int,
    state: dict[str, Any],
    extra_files: dict[str, bytes],
    facts: RunMetadata,
    group: Any = None,
    failure: Exception | None = None,
) -> Manifest | None:
    """Writes and commits a checkpoint of CPU tensors; all processes of `group` call it together.

    Returns the manifest on rank 0. Raises SaveError on all processes, and leaves no new step folder, if one of them
    fails or passes a `failure`, an error that it had before.
    """
    committed: list[Manifest] = []

    def commit(temporary: Path, contents: Contents) -> None:
        _write_small_files(temporary, extra_files, contents)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest = Manifest(
            step=step,
            finite=contents.finite,
            created=now,
            torch=torch.__version__,
            files=contents.files,
            tensors=contents.tensors,
            **facts._asdict(),
        )
        _write_manifest(temporary, manifest)
        _publish(temporary, step_folder(folder, step))
        committed.append(manifest)

    try:
        writer = Writer(folder, lambda: _begin(folder, step), commit, failure)
        dcp.save(state, storage_writer=writer, no_dist=single_process(), process_group=group)
    except CheckpointException as error:  # a BaseException, raised on all processes with the errors of each
        for rest in folder.glob(f"step-{step}.tmp-*") if dist.get_rank() == 0 else ():
            shutil.rmtree(rest, ignore_errors=True)  # frees space if the disk is full
        raise SaveError(f"step {step} could not be saved in {folder}: {reason(error)}") from error
    return committed[0] if committed else None


def _begin(folder: Path, step: int) -> Path:
    temporary = folder / f"step-{step}.tmp-{secrets.token_hex(4)}"
    make_folder(temporary)
    return temporary


def _write_small_files(temporary: Path, files: dict[str, bytes], contents: Contents) -> None:
    for name, content in files.items():
        write_synced(temporary / name, content)
        contents.files[name] = FileEntry(len(content), hashlib.sha256(content).hexdigest())


def _write_manifest(temporary: Path, manifest: Manifest) -> None:
    write_synced(temporary / manifests.NAME, manifests.to_text(manifest).encode())


def _publish(temporary: Path, final: Path) -> None:
    sync_folder(temporary)
    temporary.rename(final)
    try:
        sync_folder(final.parent)  # makes the rename durable
    except OSError as error:  # the checkpoint is committed and readable, so the save has not failed
        logger.warning("%s: %s while syncing it; a power failure now could lose %s", final.parent, error, final.name)


def reason(error: CheckpointException) -> str:
    """The first process's error in one line. The exception's own text contains the stack traces of all."""
    cause = next(iter(error.failures.values()))[0]
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


def single_process() -> bool:
    """Whether this is the only process. If so, DCP reads and writes without collectives.

    With collectives, training on a CPU would be 30 % slower afterwards: DCP's gather makes gloo's threads start
    additional OpenMP teams, and with more threads than cores libgomp puts waiting threads to sleep.
    """
    return not dist.is_initialized() or dist.get_world_size() == 1


def sweep(folder: Path) -> None:
    """Removes the folders of interrupted saves and deletions. One process calls it, while no process writes."""
    for path in (*folder.glob("step-*.tmp-*"), *folder.glob("step-*.deleted")):
        remove_folder(path)


def set_aside(path: Path, why: str) -> Path:
    """Renames a step folder to `step-N.<why>`: it no longer counts as a step, and its files are kept."""
    for count in range(1, 1000):
        aside = path.with_name(f"{path.name}.{why}" + (f"-{count}" if count > 1 else ""))
        if not aside.exists():
            return path.rename(aside)
    raise ConfigError(f"{path}: 999 folders are named {path.name}.{why}; remove some")


def delete_step(folder: Path, step: int) -> None:
    """Removes a checkpoint. It is renamed first, so that a partly deleted one is never read."""
    renamed = step_folder(folder, step).rename(folder / f"step-{step}.deleted")
    sync_folder(folder)  # otherwise a power failure could undo the rename, but not the removal of files
    remove_folder(renamed)


def remove_folder(path: Path) -> None:
    """Removes a folder with its content, or a link to one."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
