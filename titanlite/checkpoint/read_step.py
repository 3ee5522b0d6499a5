"""Reading a checkpoint: its files are verified, its tensors compared with those of the model, then
loaded.

What it is: `verify_together` hashes all files, each rank some of them, before anything is loaded.
`read_step` compares names, shapes and dtypes with the state to be filled; then each rank reads the
cells of each tensor's grid that overlap its own part, in any layout. No rank needs to know what the
others read.
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
from safetensors import SafetensorError

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import DTYPE_NAMES, DTYPES, CorruptCheckpoint, Manifest, part_key
from titanlite.checkpoint.manifest_reader import (
    describe_os_error,
    file_problems,
    parse_manifest,
    read_text,
)
from titanlite.checkpoint.shard_reader import ShardFile, digest_of
from titanlite.checkpoint.state import RandomState
from titanlite.checkpoint.storage import list_steps, reason, step_folder
from titanlite.checkpoint.write_plan import State, local_parts
from titanlite.distributed.agreement import PATIENT, broadcast, on_all_ranks
from titanlite.runtime.errors import ConfigError


def find_step_folder(path: Path) -> Path:
    """The checkpoint at a user's path: a step folder, or the newest of a run.

    Raises ConfigError if there is none.
    """
    with contextlib.suppress(OSError):  # for example a name that is too long
        if (path / manifests.NAME).is_file():
            return path
        for folder in (path / "checkpoints", path):
            steps = list_steps(folder)
            if steps:
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
    """Problems of a checkpoint's files, or of those in `names`: several threads read and hash all
    bytes.

    `progress` is called with the number of bytes of each block, by several threads.
    """
    wanted = manifest.files if names is None else {name: manifest.files[name] for name in names}
    problems = file_problems(folder, wanted)
    if problems:
        return problems

    def problem(name: str) -> str:
        try:
            same = digest_of(folder / name, progress) == wanted[name].sha256
            return "" if same else f"{folder / name}: its SHA-256 is not the one in the manifest"
        except OSError as error:
            return describe_os_error(folder / name, error)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return [found for found in threads.map(problem, wanted) if found]


def verify_together(folder: Path, prefix: str = "") -> Manifest:
    """The manifest, if the files whose names begin with `prefix` match it. Each rank reads some of
    them.

    Raises on all ranks CorruptCheckpoint with the problems of all, or the error of a rank that
    fails for a reason outside the checkpoint.
    """
    path = folder / manifests.NAME
    deadline = time.monotonic() + 10
    text = on_all_ranks(
        lambda: read_text(path) if dist.get_rank() == 0 else "", PATIENT, CorruptCheckpoint
    )
    text = broadcast(text, PATIENT)

    def verify() -> Manifest:
        # a network file system may show it late
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.1)
        manifest = parse_manifest(path, text)
        if re.fullmatch(r"step-\d+", folder.name) and folder.name != f"step-{manifest.step}":
            raise CorruptCheckpoint(f"{folder}: its manifest is that of step {manifest.step}")
        wanted = sorted(name for name in manifest.files if name.startswith(prefix))
        problems = verify_files(folder, manifest, wanted[dist.get_rank() :: dist.get_world_size()])
        if problems:
            raise CorruptCheckpoint(problems)
        return manifest

    manifest: Manifest = on_all_ranks(verify, PATIENT, CorruptCheckpoint)
    return manifest


def read_step(folder: Path, manifest: Manifest, state: State, alone: bool = False) -> None:
    """Fills `state` in place from a checkpoint of any layout: all processes together, or this one
    `alone`.

    Raises ConfigError, before anything is filled, if tensors do not fit; CorruptCheckpoint if files
    are damaged. An error of one process is raised on all.
    """

    def compare() -> None:
        require_matching_tensors(folder, manifest, state)

    def fill() -> None:
        _fill(folder, manifest, state)

    if alone:
        compare()
        fill()
    else:
        on_all_ranks(compare, PATIENT)
        on_all_ranks(fill, PATIENT, CorruptCheckpoint)


def require_matching_tensors(folder: Path, manifest: Manifest, state: State) -> None:
    """Raises ConfigError unless the checkpoint has all tensors of `state`, in the same shapes.

    Floating-point dtypes may differ, because precision may change within a run: values are rounded
    when they are read.
    """
    problems = []
    for name, value in (
        (f"{part}.{name}", value)
        for part, values in state.items()
        for name, value in values.items()
    ):
        entry = manifest.tensors.get(name)
        if entry is None:
            problems.append(f"{folder}: has no {name}")
            continue
        both_float = DTYPES[entry.dtype].is_floating_point and value.is_floating_point()
        if entry.shape != tuple(value.shape) or not (
            both_float or DTYPES[entry.dtype] == value.dtype
        ):
            now = f"{DTYPE_NAMES.get(value.dtype)} {list(value.shape)}"
            problems.append(
                f"{folder}: {name} is {entry.dtype} {list(entry.shape)}; this model needs {now}"
            )
    if problems:
        more = [f"and {len(problems) - 5} more like these"] if len(problems) > 6 else []
        raise ConfigError(problems[: 5 if more else 6] + more)


def _fill(folder: Path, manifest: Manifest, state: State) -> None:
    """Reads this process's part of each tensor. Raises CorruptCheckpoint."""
    files: dict[str, ShardFile] = {}
    try:
        for part, _ in local_parts(state):
            entry = manifest.tensors[part.name]
            for box in entry.grid.overlapping(part.offsets, part.sizes):
                if box.file not in files:
                    files[box.file] = ShardFile(folder / box.file)
                starts = [max(numbers) for numbers in zip(box.offsets, part.offsets, strict=True)]
                sides = zip(box.offsets, box.sizes, part.offsets, part.sizes, strict=True)
                ends = [min(a + size, b + own) for a, size, b, own in sides]
                here, there = (
                    tuple(
                        slice(start - at, end - at)
                        for start, end, at in zip(starts, ends, offsets, strict=True)
                    )
                    for offsets in (part.offsets, box.offsets)
                )
                key = part_key(part.name, part.shape, box.offsets, box.sizes)
                part.local[here].copy_(files[box.file].read(key, entry.dtype, box.sizes, there))
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptCheckpoint(f"{folder}: cannot be read: {reason(error)}") from error


def load_states(folder: Path, states: dict[str, Any], state: dict[str, Any]) -> None:
    """Passes each part in `state` its state.

    Raises CorruptCheckpoint if that of the random generators is invalid.
    """
    for name in state:
        part = states[name]
        try:
            part.load_state_dict(state[name])
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            if not isinstance(part, RandomState):
                raise
            raise CorruptCheckpoint(
                f"{folder}: {name} is not a valid state of random generators ({str(error)[:200]})"
            ) from None
