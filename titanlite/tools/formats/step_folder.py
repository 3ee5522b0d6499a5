"""Reads a run's checkpoint, a step folder, as a `FullState`.

What it is: the manifest says which box of each tensor lies in which file, and the files' headers at
which byte. A run's folder means its newest committed step.
What it costs: the manifest, the header of each file and the small files are read; hashes are
compared by `intact.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from titanlite.checkpoint.folders import find_step_folder, list_steps, step_folder
from titanlite.checkpoint.manifest import DTYPES, CorruptCheckpoint, read_manifest
from titanlite.checkpoint.step_files import file_problems, read_file
from titanlite.model.flavors import LlamaConfig
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.tools.formats.full_state import About, FullState, FullTensor
from titanlite.tools.formats.huggingface_tokenizer import content_of
from titanlite.tools.formats.safetensors_files import read_header
from titanlite.tools.formats.shape_file import from_json, sequence_length


def is_step_folder(path: Path) -> bool:
    """Whether the path is a step's folder, or a run's folder with a step."""
    with contextlib.suppress(OSError):  # a name too long, say
        if (path / "manifest.json").is_file():
            return True
        return any(list_steps(folder) for folder in (path / "checkpoints", path))
    return False


def open_step(path: Path, step: int | None) -> FullState:
    """Opens a step's folder, or a step of a run; `step` None: the newest.

    Raises CorruptCheckpoint or ConfigError.
    """
    folder = find_step_folder(path)
    if step is not None:
        folder = step_folder(folder.parent, step)
        if not folder.is_dir():
            allowed = ", ".join(str(number) for number in list_steps(folder.parent))
            raise ConfigError(f"--step {step}: not in {folder.parent}; allowed: {allowed}")
    manifest = read_manifest(folder)
    problems = file_problems(folder, manifest.files)
    if problems:
        raise CorruptCheckpoint(problems)
    headers = {
        name: read_header(folder / name)[0]
        for name in manifest.files
        if name.endswith(".safetensors")
    }
    model: dict[str, FullTensor] = {}
    others: dict[str, FullTensor] = {}
    for name, entry in manifest.tensors.items():
        parts = []
        for box in entry.grid.boxes():
            stored = headers[box.file].get(name)
            if stored is None or (stored.dtype, stored.shape) != (DTYPES[entry.dtype], box.sizes):
                raise CorruptCheckpoint(
                    f"{folder / box.file}: does not hold {name} as the manifest says"
                )
            parts.append(dataclasses.replace(stored.parts[0], offsets=box.offsets))
        whole = FullTensor(DTYPES[entry.dtype], entry.shape, tuple(parts))
        group = model if name.startswith("model.") else others
        group[name.removeprefix("model.")] = whole
    small_files = {
        name: read_file(folder, manifest, name)
        for name in manifest.files
        if not name.endswith(".safetensors")
    }
    length = manifest.config.get("training", {}).get("seq_len", 0)
    about = About(
        "titanlite",
        model_of(folder / "model.json", small_files.get("model.json")),
        content_of(small_files),
        manifest.step,
        sequence_length(length),
        manifest.degrees,
        manifest.finite,
        manifest.config,
        manifest.data,
        small_files,
    )
    return FullState(folder, about, model, others)


def model_of(path: Path, content: bytes | None, within: str = "") -> LlamaConfig | None:
    """The model that a model.json describes; `within`: where in the file it is.

    Raises CorruptCheckpoint.
    """
    if content is None:
        return None
    try:
        return from_json(content.decode())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"its {within} is not" if within else "not"
        raise CorruptCheckpoint(
            f"{path}: {what} titanlite's description of a model ({reason_of(error)})"
        ) from None
