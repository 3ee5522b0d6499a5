"""Where checkpoints lie on disk and how one becomes visible.

What it is: `checkpoints/step-N/` holds one DCP file per process, DCP's `.metadata` index, and the small files that
make the folder complete on its own (resolved config, model shape, tokenizer, data manifest). It is written as
`step-N.tmp` and renamed when every process has written its part, so a folder with a step's name is a complete one.
What it costs: each process writes its own shards once, fp32: 12 bytes per parameter with the optimizer, over all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.config import ConfigError


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def list_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a `checkpoints` folder, ascending."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*") if (path / ".metadata").is_file())
    return sorted(int(match[1]) for match in found if match)


def find_step_folder(path: Path) -> Path:
    """The checkpoint a user's path means: a step folder, or the newest of a run. Raises ConfigError if none."""
    with contextlib.suppress(OSError):  # a name too long, say
        if (path / ".metadata").is_file():
            return path
        for folder in (path / "checkpoints", path):
            if steps := list_steps(folder):
                return step_folder(folder, steps[-1])
    raise ConfigError(
        f"{path}: no checkpoint; expected a run's folder (outputs/<run>) or a step's (checkpoints/step-N)"
    )


def write_step(folder: Path, step: int, state: dict[str, Any], extra_files: dict[str, bytes]) -> Path:
    """Writes a checkpoint; all processes call it together. The step is not there yet."""
    final = step_folder(folder, step)
    temporary = final.with_name(f"{final.name}.tmp")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a save that was interrupted
        temporary.mkdir(parents=True)
    dist.barrier()
    # One thread: with more, an error in a writer thread is lost (pytorch#191391).
    writer = FileSystemWriter(temporary, single_file_per_rank=True, thread_count=1, sync_files=True)
    with _alone() as alone:
        dcp.save(state, storage_writer=writer, no_dist=alone)
    if first:
        for name, content in extra_files.items():
            with (temporary / name).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
        temporary.rename(final)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)  # the rename itself reaches the disk
        os.close(descriptor)
    dist.barrier()
    return final


def read_step(path: Path, state: dict[str, Any], alone: bool = False) -> None:
    """Fills `state` in place, whatever layout wrote it: all processes together, or this one `alone`.

    Raises ConfigError where the folder is damaged or holds another model.
    """
    try:
        with _alone() as single:
            dcp.load(state, storage_reader=FileSystemReader(path), no_dist=alone or single)
    except (Exception, CheckpointException) as error:  # torch's CheckpointException is a BaseException
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise ConfigError(
            f"{path}: cannot be read ({reason.strip()}); it is damaged or another model's. "
            "Move it away, and the checkpoint before it is used"
        ) from error


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Whether this is the only process, which reads and writes without collectives (and without a warning of that).

    Not only because it can: DCP's gather makes gloo's threads start OpenMP teams of their own. Then there are more
    threads than cores, libgomp lets them all wait asleep, and training on CPU is 30 % slower from there on.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield not dist.is_initialized() or dist.get_world_size() == 1


def sweep(folder: Path) -> None:
    """Removes what an interrupted save or deletion has left behind. One process calls it, while no other writes."""
    for path in (*folder.glob("step-*.tmp"), *folder.glob("step-*.deleted")):
        shutil.rmtree(path, ignore_errors=True)


def delete_step(folder: Path, step: int) -> None:
    """Removes a checkpoint; renamed first, so a partly deleted one is never taken for a complete one."""
    doomed = step_folder(folder, step).rename(folder / f"step-{step}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)


def size_gb(path: Path) -> float:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e9
