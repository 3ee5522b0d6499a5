"""Where checkpoints lie on disk, and the protocol by which one is complete or absent.

What it is: `checkpoints/step-N/` holds two safetensors files per process, the small files that make the folder complete
on its own (resolved config, model shape, tokenizer, data manifest) and `manifest.json`. A save

    1. makes `step-N.tmp-<id>`, with an id that no save before had;
    2. lets each process write its files there and sync them to the disk;
    3. writes the small files and the manifest, with the size and SHA-256 of all, and syncs them and the folder;
    4. renames the folder to `step-N`, and syncs the parent.

So a folder with a step's name was complete when it got that name, whatever died when; nothing is ever written into it
again. Deleting goes the other way: first the name, then the files. A damaged one is renamed, never deleted.
What it costs: each process writes its own shards once: 12 bytes per parameter in fp32 with the optimizer, over all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp import Contents, Reader, Writer
from titanlite.checkpoint.manifest import (
    DTYPES,
    CorruptCheckpoint,
    FileEntry,
    Manifest,
    RunMetadata,
    describe_os_error,
    file_problems,
    read_manifest,
)
from titanlite.checkpoint.shard_file import DTYPE_NAMES, digest_of
from titanlite.config.schema import ConfigError

logger = logging.getLogger("titanlite")
# DCP says this of every save and load of a single process. Set here and not around them: filters are not for threads.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def list_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in a `checkpoints` folder, ascending."""
    found = ((path, re.fullmatch(r"step-(\d{1,18})", path.name)) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for path, match in found if match and path.is_dir())


def find_step_folder(path: Path) -> Path:
    """The checkpoint a user's path means: a step folder, or the newest of a run. Raises ConfigError if none."""
    with contextlib.suppress(OSError):  # a name too long, say
        if (path / manifests.NAME).is_file():
            return path
        for folder in (path / "checkpoints", path):
            if steps := list_steps(folder):
                return step_folder(folder, steps[-1])
    raise ConfigError(
        f"{path}: no checkpoint; expected a run's folder (outputs/<run>) or a step's (checkpoints/step-N)"
    )


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

    Returns the manifest on rank 0. Raises SaveError on all processes where one of them fails, or comes with a `failure`
    in place of a state; nothing is visible then.
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
        dcp.save(state, storage_writer=writer, no_dist=_single_process(), process_group=group)
    except CheckpointException as error:  # a BaseException, which carries any error of any process to all
        for rest in folder.glob(f"step-{step}.tmp-*") if dist.get_rank() == 0 else ():
            shutil.rmtree(rest, ignore_errors=True)  # a full disk needs the room
        raise SaveError(f"step {step} could not be saved in {folder}: {_reason(error)}") from error
    return committed[0] if committed else None


def _begin(folder: Path, step: int) -> Path:
    temporary = folder / f"step-{step}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir(parents=True)
    return temporary


def _write_small_files(temporary: Path, files: dict[str, bytes], contents: Contents) -> None:
    for name, content in files.items():
        _write(temporary / name, content)
        contents.files[name] = FileEntry(len(content), digest_of(temporary / name))


def _write_manifest(temporary: Path, manifest: Manifest) -> None:
    _write(temporary / manifests.NAME, manifests.to_text(manifest).encode())


def _publish(temporary: Path, final: Path) -> None:
    sync_folder(temporary)
    temporary.rename(final)
    try:
        sync_folder(final.parent)  # the rename itself reaches the disk
    except OSError as error:  # it is committed, and can be read: no reason to save again
        logger.warning("%s: %s when syncing it; a power failure now could lose %s", final.parent, error, final.name)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Names made or changed in the folder are on the disk after this, where the file system does that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync folders
            raise
    finally:
        os.close(descriptor)


def verify_files(
    folder: Path,
    manifest: Manifest,
    names: list[str] | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[str]:
    """What is wrong with a checkpoint's files (or some of them): all of their bytes are read, by several threads.

    `progress` is called with the number of bytes of each block, by several threads.
    """
    wanted = manifest.files if names is None else {name: manifest.files[name] for name in names}
    if problems := file_problems(folder, manifest):
        return problems

    def problem(name: str) -> str:
        try:
            same = digest_of(folder / name, progress) == wanted[name].sha256
            return "" if same else f"{folder / name}: its SHA-256 has changed"
        except OSError as error:
            return describe_os_error(folder / name, error)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return [found for found in threads.map(problem, wanted) if found]


def verify_together(folder: Path, prefix: str = "", group: Any = None) -> list[str]:
    """Reads the manifest and verifies the files whose name begins so, dealt out to all processes; the same on each.

    Raises ConfigError on all where one of them cannot read what may be whole.
    """
    problems: list[str] = []
    obstacles: list[str] = []
    rank, world = dist.get_rank(), dist.get_world_size()
    deadline = time.monotonic() + 10
    while rank and not (folder / manifests.NAME).exists() and time.monotonic() < deadline:
        time.sleep(0.1)  # a network file system may show a new folder late
    try:
        manifest = read_manifest(folder)
        wanted = sorted(name for name in manifest.files if name.startswith(prefix))
        problems = verify_files(folder, manifest, wanted[rank::world])
    except CorruptCheckpoint as error:
        problems = error.problems
    except ConfigError as error:
        obstacles = error.problems
    found = [(problems, obstacles)] * world
    if not _single_process():
        dist.all_gather_object(found, (problems, obstacles), group=group)
    if obstacles := sorted({obstacle for _, own in found for obstacle in own}):
        raise ConfigError(obstacles)
    return sorted({problem for own, _ in found for problem in own})


def require_matching_tensors(folder: Path, manifest: Manifest, state: dict[str, Any]) -> None:
    """Raises ConfigError where the checkpoint has not all tensors of `state` in their shapes.

    Floating-point dtypes may differ: precision may change within a run, and what is read is rounded.
    """
    problems = []
    for name, value in ((f"{part}.{name}", value) for part, values in state.items() for name, value in values.items()):
        if (entry := manifest.tensors.get(name)) is None:
            problems.append(f"{folder}: holds no {name}")
            continue
        both_float = DTYPES[entry.dtype].is_floating_point and value.is_floating_point()
        if entry.shape != list(value.shape) or not (both_float or DTYPES[entry.dtype] == value.dtype):
            now = f"{DTYPE_NAMES.get(value.dtype)} {list(value.shape)}"
            problems.append(f"{folder}: {name} is {entry.dtype} {entry.shape}, and {now} in this model")
    if problems:
        more = [f"and {len(problems) - 5} more like these"] if len(problems) > 6 else []
        raise ConfigError(problems[: 5 if more else 6] + more)


def read_step(folder: Path, state: dict[str, Any], alone: bool = False, group: Any = None) -> Manifest:
    """Fills `state` in place, whatever layout wrote it: all processes of `group` together, or this one `alone`.

    Raises ConfigError where it holds other tensors (nothing is filled then), CorruptCheckpoint where it is incomplete.
    """
    manifest = read_manifest(folder)
    require_matching_tensors(folder, manifest, state)
    try:
        dcp.load(
            state, storage_reader=Reader(folder, manifest), no_dist=alone or _single_process(), process_group=group
        )
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, (CorruptCheckpoint, OSError, SafetensorError, ValueError)) for cause in causes):
            raise CorruptCheckpoint(f"{folder}: cannot be read: {_reason(error)}") from error
        raise
    return manifest


def _reason(error: CheckpointException) -> str:
    """The first process's error in one line; the exception's own text is the stack traces of all."""
    cause = next(iter(error.failures.values()))[0]
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


def _single_process() -> bool:
    """Whether this is the only process, which reads and writes without collectives.

    Not only because it can: DCP's gather makes gloo's threads start OpenMP teams of their own. Then there are more
    threads than cores, libgomp lets them all wait asleep, and training on CPU is 30 % slower from there on.
    """
    return not dist.is_initialized() or dist.get_world_size() == 1


def sweep(folder: Path) -> None:
    """Removes what an interrupted save or deletion has left behind. One process calls it, while no other writes."""
    for path in (*folder.glob("step-*.tmp-*"), *folder.glob("step-*.deleted")):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path, why: str) -> Path:
    """Renames a step folder to `step-N.<why>`, so that it is no step any more and nothing of it is lost."""
    for count in range(1, 1000):
        aside = path.with_name(f"{path.name}.{why}" + (f"-{count}" if count > 1 else ""))
        if not aside.exists():
            return path.rename(aside)
    raise ConfigError(f"{path}: there are too many folders named {path.name}.{why}; remove some")


def delete_step(folder: Path, step: int) -> None:
    """Removes a checkpoint; renamed first, so a partly deleted one is never taken for a complete one."""
    doomed = step_folder(folder, step).rename(folder / f"step-{step}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
