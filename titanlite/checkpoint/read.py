"""Reading a checkpoint: its files are verified, its tensors compared with those of the model, then loaded.

What it is: `verify_together` hashes all files, each rank some of them, before anything is loaded. `read_step`
compares names, shapes and dtypes with the state to be filled; then each rank reads the parts that it needs.
What it costs: verification reads every byte once, with several threads on each node.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp import Reader
from titanlite.checkpoint.manifest import DTYPES, CorruptCheckpoint, Manifest
from titanlite.checkpoint.manifest_reader import describe_os_error, file_problems, read_manifest
from titanlite.checkpoint.shard_file import DTYPE_NAMES, digest_of
from titanlite.checkpoint.state import RandomState
from titanlite.checkpoint.storage import list_steps, reason, single_process, step_folder
from titanlite.config.schema import ConfigError
from titanlite.distributed.agreement import broadcast_from_rank0, gather, raise_together


def find_step_folder(path: Path) -> Path:
    """The checkpoint at a user's path: a step folder, or the newest of a run. Raises ConfigError if there is none."""
    with contextlib.suppress(OSError):  # for example a name that is too long
        if (path / manifests.NAME).is_file():
            return path
        for folder in (path / "checkpoints", path):
            if steps := list_steps(folder):
                return step_folder(folder, steps[-1])
    raise ConfigError(
        f"{path}: no checkpoint; expected a run's folder (outputs/<run>) or a step's (checkpoints/step-N)"
    )


def verify_files(
    folder: Path,
    manifest: Manifest,
    names: list[str] | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[str]:
    """Problems of a checkpoint's files, or of those in `names`: several threads read and hash all bytes.

    `progress` is called with the number of bytes of each block, by several threads.
    """
    wanted = manifest.files if names is None else {name: manifest.files[name] for name in names}
    if problems := file_problems(folder, manifest):
        return problems

    def problem(name: str) -> str:
        try:
            same = digest_of(folder / name, progress) == wanted[name].sha256
            return "" if same else f"{folder / name}: its SHA-256 is not the one in the manifest"
        except OSError as error:
            return describe_os_error(folder / name, error)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return [found for found in threads.map(problem, wanted) if found]


def verify_together(folder: Path, prefix: str = "", group: Any = None) -> list[str]:
    """Problems of the files whose names begin with `prefix`. Each rank reads some of them; all return the same list.

    Raises ConfigError on all ranks if one of them fails for a reason outside the checkpoint.
    """
    problems: list[str] = []
    obstacles: list[str] = []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path, deadline = folder / manifests.NAME, time.monotonic() + 10
    if broadcast_from_rank0(lambda: os.path.exists(path)):  # a network file system may show it late to the others
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.1)
    try:
        manifest = read_manifest(folder)
        if re.fullmatch(r"step-\d+", folder.name) and folder.name != f"step-{manifest.step}":
            raise CorruptCheckpoint(f"{folder}: its manifest is that of step {manifest.step}")
        wanted = sorted(name for name in manifest.files if name.startswith(prefix))
        problems = verify_files(folder, manifest, wanted[rank::world_size])
    except CorruptCheckpoint as error:
        problems = error.problems
    except ConfigError as error:
        obstacles = error.problems
    raise_together(obstacles, group)
    return sorted({problem for found in gather(problems, group) for problem in found})


def require_matching_tensors(folder: Path, manifest: Manifest, state: dict[str, Any]) -> None:
    """Raises ConfigError unless the checkpoint has all tensors of `state`, in the same shapes.

    Floating-point dtypes may differ, because precision may change within a run: values are rounded when they are read.
    """
    problems = []
    for name, value in ((f"{part}.{name}", value) for part, values in state.items() for name, value in values.items()):
        if (entry := manifest.tensors.get(name)) is None:
            problems.append(f"{folder}: has no {name}")
            continue
        both_float = DTYPES[entry.dtype].is_floating_point and value.is_floating_point()
        if entry.shape != list(value.shape) or not (both_float or DTYPES[entry.dtype] == value.dtype):
            now = f"{DTYPE_NAMES.get(value.dtype)} {list(value.shape)}"
            problems.append(f"{folder}: {name} is {entry.dtype} {entry.shape}; this model needs {now}")
    if problems:
        more = [f"and {len(problems) - 5} more like these"] if len(problems) > 6 else []
        raise ConfigError(problems[: 5 if more else 6] + more)


def load_states(folder: Path, states: dict[str, Any], state: dict[str, Any]) -> None:
    """Passes each part its state. Raises CorruptCheckpoint if that of the random generators is invalid."""
    for name, part in states.items():
        try:
            part.load_state_dict(state[name])
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            if not isinstance(part, RandomState):
                raise
            raise CorruptCheckpoint(
                f"{folder}: {name} is not a valid state of random generators ({str(error)[:200]})"
            ) from None


def read_step(folder: Path, state: dict[str, Any], alone: bool = False, group: Any = None) -> Manifest:
    """Fills `state` in place from a checkpoint of any layout: all processes of `group` together, or this one `alone`.

    Raises ConfigError, before anything is filled, if tensors do not fit; CorruptCheckpoint if files are damaged.
    """
    manifest = read_manifest(folder)
    require_matching_tensors(folder, manifest, state)
    try:
        dcp.load(state, storage_reader=Reader(folder, manifest), no_dist=alone or single_process(), process_group=group)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, (CorruptCheckpoint, OSError, SafetensorError, ValueError)) for cause in causes):
            raise CorruptCheckpoint(f"{folder}: cannot be read: {reason(error)}") from error
        raise
    return manifest
