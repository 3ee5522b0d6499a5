"""Reading a checkpoint: its files are verified, its tensors compared with those of the model, then loaded.

What it is: `verify_together` hashes all files, each rank some of them, before anything is loaded. `read_step`
compares names, shapes and dtypes with the state to be filled; then each rank reads the cells of each tensor's grid that
overlap its own part, in any layout. No rank needs to know what the others read.
What it costs: verification reads every byte once, with several threads on each node. The manifest is read by rank 0.
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
from titanlite.checkpoint.grid import Box
from titanlite.checkpoint.manifest import DTYPE_NAMES, DTYPES, CorruptCheckpoint, Manifest, part_key
from titanlite.checkpoint.manifest_reader import (
    describe_os_error,
    file_problems,
    parse_manifest,
    read_manifest,
    read_text,
)
from titanlite.checkpoint.plan import Part, State, local_parts
from titanlite.checkpoint.shard_reader import ShardFile, digest_of
from titanlite.checkpoint.state import RandomState
from titanlite.checkpoint.storage import list_steps, reason, step_folder
from titanlite.config.schema import ConfigError
from titanlite.distributed.agreement import broadcast, gather, raise_together


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
    if problems := file_problems(folder, wanted):
        return problems

    def problem(name: str) -> str:
        try:
            same = digest_of(folder / name, progress) == wanted[name].sha256
            return "" if same else f"{folder / name}: its SHA-256 is not the one in the manifest"
        except OSError as error:
            return describe_os_error(folder / name, error)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return [found for found in threads.map(problem, wanted) if found]


def verify_together(folder: Path, prefix: str = "", group: Any = None) -> Manifest:
    """The manifest, if the files whose names begin with `prefix` match it. Each rank reads some of them.

    Raises CorruptCheckpoint on all ranks with the problems that any has found, or ConfigError if a rank fails for a
    reason outside the checkpoint.
    """
    problems: list[str] = []
    obstacles: list[str] = []
    path, deadline = folder / manifests.NAME, time.monotonic() + 10
    text = _text_from_rank0(path, group)
    while not os.path.exists(path) and time.monotonic() < deadline:  # a network file system may show it late
        time.sleep(0.1)
    try:
        manifest = parse_manifest(path, text)
        if re.fullmatch(r"step-\d+", folder.name) and folder.name != f"step-{manifest.step}":
            raise CorruptCheckpoint(f"{folder}: its manifest is that of step {manifest.step}")
        wanted = sorted(name for name in manifest.files if name.startswith(prefix))
        problems = verify_files(folder, manifest, wanted[dist.get_rank() :: dist.get_world_size()])
    except CorruptCheckpoint as error:
        problems = error.problems
    except ConfigError as error:
        obstacles = error.problems
    raise_together(obstacles, group)
    if found := sorted({problem for own in gather(problems, group) for problem in own}):
        raise CorruptCheckpoint(found)
    return manifest


def _text_from_rank0(path: Path, group: Any) -> str:
    """A manifest's text, which rank 0 reads. Raises its error on all ranks: CorruptCheckpoint or ConfigError."""
    text, damage, obstacles = "", [], []
    if dist.get_rank() == 0:
        try:
            text = read_text(path)
        except CorruptCheckpoint as error:
            damage = error.problems
        except ConfigError as error:
            obstacles = error.problems
    text, damage, obstacles = broadcast((text, damage, obstacles), group)
    if damage:
        raise CorruptCheckpoint(damage)
    if obstacles:
        raise ConfigError(obstacles)
    return text


def mismatching_tensors(folder: Path, manifest: Manifest, state: State) -> list[str]:
    """Problems unless the checkpoint has all tensors of `state`, in the same shapes.

    Floating-point dtypes may differ, because precision may change within a run: values are rounded when they are read.
    """
    problems = []
    for name, value in ((f"{part}.{name}", value) for part, values in state.items() for name, value in values.items()):
        if (entry := manifest.tensors.get(name)) is None:
            problems.append(f"{folder}: has no {name}")
            continue
        both_float = DTYPES[entry.dtype].is_floating_point and value.is_floating_point()
        if entry.shape != tuple(value.shape) or not (both_float or DTYPES[entry.dtype] == value.dtype):
            now = f"{DTYPE_NAMES.get(value.dtype)} {list(value.shape)}"
            problems.append(f"{folder}: {name} is {entry.dtype} {list(entry.shape)}; this model needs {now}")
    more = [f"and {len(problems) - 5} more like these"] if len(problems) > 6 else []
    return problems[: 5 if more else 6] + more


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


def read_step(
    folder: Path, state: State, manifest: Manifest | None = None, group: Any = None, alone: bool = False
) -> Manifest:
    """Fills `state` in place from a checkpoint of any layout: all processes of `group` together, or this one `alone`.

    Raises ConfigError, before anything is filled, if tensors do not fit; CorruptCheckpoint if files are damaged.
    """
    manifest = manifest or read_manifest(folder)
    problem, mismatches = "", mismatching_tensors(folder, manifest, state)
    if found := mismatches if alone else list(dict.fromkeys(p for own in gather(mismatches, group) for p in own)):
        raise ConfigError(found)
    try:
        _fill(folder, state, manifest)
    except (CorruptCheckpoint, OSError, SafetensorError, ValueError) as error:
        problem = reason(error)
    if problems := [p for p in ([problem] if alone else gather(problem, group)) if p]:
        raise CorruptCheckpoint(f"{folder}: cannot be read: {problems[0]}")
    return manifest


def _fill(folder: Path, state: State, manifest: Manifest) -> None:
    """Reads this process's part of each tensor, from one file after the other."""
    wanted: dict[str, list[tuple[Box, Part]]] = {}
    for part, _ in local_parts(state):
        for box in manifest.tensors[part.name].grid.overlapping(part.offsets, part.sizes):
            wanted.setdefault(box.file, []).append((box, part))
    for name, pieces in wanted.items():
        file = ShardFile(folder / name)
        for box, part in pieces:
            starts = [max(numbers) for numbers in zip(box.offsets, part.offsets, strict=True)]
            sides = zip(box.offsets, box.sizes, part.offsets, part.sizes, strict=True)
            ends = [min(a + size, b + own) for a, size, b, own in sides]
            here, there = (
                tuple(slice(start - at, end - at) for start, end, at in zip(starts, ends, offsets, strict=True))
                for offsets in (part.offsets, box.offsets)
            )
            key = part_key(part.name, part.shape, box.offsets, box.sizes)
            part.local[here].copy_(file.read(key, manifest.tensors[part.name].dtype, box.sizes, there))
