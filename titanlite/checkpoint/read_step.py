"""Reading a checkpoint: its tensors are compared with those of the model, then loaded.

What it is: `read_step` compares names, shapes and dtypes with the state to be filled; then each
rank reads the cells of each tensor's grid that overlap its own part, in any layout. No rank needs
to know what the others read. `step_files.py` has verified the files before.
What it costs: each rank maps the files that hold cells of its parts, and reads only these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from titanlite.checkpoint.grid import Box
from titanlite.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    NAME,
    CorruptCheckpoint,
    Manifest,
    TensorEntry,
    part_key,
)
from titanlite.checkpoint.shard_file import ShardFile
from titanlite.checkpoint.state import RandomState, State, Stateful
from titanlite.checkpoint.storage import list_steps, reason, step_folder
from titanlite.checkpoint.write_plan import Part, local_parts
from titanlite.distributed.agreement import PATIENT, on_all_ranks
from titanlite.runtime.errors import ConfigError

MAX_PROBLEMS = 6  # lines about tensors that do not fit


def find_step_folder(path: Path) -> Path:
    """The checkpoint at a user's path: a step folder, or the newest of a run.

    Raises ConfigError if there is none.
    """
    with contextlib.suppress(OSError):  # for example a name that is too long
        if (path / NAME).is_file():
            return path
        for folder in (path / "checkpoints", path):
            steps = list_steps(folder)
            if steps:
                return step_folder(folder, steps[-1])
    raise ConfigError(
        f"{path}: no checkpoint; expected a run's folder (outputs/<run>) or a step's "
        "(checkpoints/step-N)"
    )


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
    for part, values in state.items():
        for key, value in values.items():
            name = f"{part}.{key}"
            entry = manifest.tensors.get(name)
            if entry is None:
                problems.append(f"{folder}: has no {name}")
                continue
            saved_dtype = DTYPES[entry.dtype]
            both_float = saved_dtype.is_floating_point and value.is_floating_point()
            same_dtype = both_float or saved_dtype == value.dtype
            if entry.shape != tuple(value.shape) or not same_dtype:
                saved = f"{entry.dtype} {list(entry.shape)}"
                needed = f"{DTYPE_NAMES.get(value.dtype)} {list(value.shape)}"
                problems.append(f"{folder}: {name} is {saved}; this model needs {needed}")
    if len(problems) > MAX_PROBLEMS:
        shown = problems[: MAX_PROBLEMS - 1]
        raise ConfigError([*shown, f"and {len(problems) - len(shown)} more like these"])
    if problems:
        raise ConfigError(problems)


def _fill(folder: Path, manifest: Manifest, state: State) -> None:
    """Reads this process's part of each tensor. Raises CorruptCheckpoint."""
    files: dict[str, ShardFile] = {}
    try:
        for part, _ in local_parts(state):
            entry = manifest.tensors[part.name]
            for cell in entry.grid.overlapping(part.offsets, part.sizes):
                if cell.file not in files:
                    files[cell.file] = ShardFile(folder / cell.file)
                _copy_overlap(files[cell.file], entry, cell, part)
    except ConfigError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise CorruptCheckpoint(f"{folder}: cannot be read: {reason(error)}") from error


def _copy_overlap(file: ShardFile, entry: TensorEntry, cell: Box, part: Part) -> None:
    """Copies what a cell and this process's part of a tensor have in common."""
    in_cell = []  # in each dimension
    in_part = []
    for cell_start, cell_size, part_start, part_size in zip(
        cell.offsets, cell.sizes, part.offsets, part.sizes, strict=True
    ):
        start = max(cell_start, part_start)
        end = min(cell_start + cell_size, part_start + part_size)
        in_cell.append(slice(start - cell_start, end - cell_start))
        in_part.append(slice(start - part_start, end - part_start))
    key = part_key(part.name, part.shape, cell.offsets, cell.sizes)
    saved = file.read(key, entry.dtype, cell.sizes, tuple(in_cell))
    part.local[tuple(in_part)].copy_(saved)


def load_states(folder: Path, states: Mapping[str, Stateful], state: State) -> None:
    """Passes each part in `state` its state.

    Raises CorruptCheckpoint if that of the random generators is invalid.
    """
    for name, values in state.items():
        part = states[name]
        try:
            part.load_state_dict(values)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            if not isinstance(part, RandomState):
                raise
            raise CorruptCheckpoint(
                f"{folder}: {name} is not a valid state of random generators ({str(error)[:200]})"
            ) from None
