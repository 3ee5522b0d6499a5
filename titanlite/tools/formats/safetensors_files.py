"""safetensors files, one or several with an index: where their tensors lie, and writing them block
by block.

What it is: 8 bytes of length, a JSON header, the numbers. Several files come with
`model.safetensors.index.json`, which lists the file of each tensor: Hugging Face's convention.
What it costs: reading an index opens each file once. Writing holds one block of rows.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from titanlite.checkpoint.manifest import DTYPES, CorruptCheckpoint
from titanlite.checkpoint.shard_file import header_bytes
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.runtime.files import read_bounded
from titanlite.tools.formats.export import Outgoing
from titanlite.tools.formats.full_state import FullTensor, Part
from titanlite.tools.formats.output_path import write_small_files

INDEX = "model.safetensors.index.json"
# Bytes, some 100,000 tensors; the library reads up to 100 MB, which take over 1 GB as objects
LARGEST_HEADER = 1 << 24


def read_header(path: Path) -> tuple[dict[str, FullTensor], dict[str, str]]:
    """The tensors of one file, and its metadata.

    Raises CorruptCheckpoint unless it is a complete safetensors file.
    """
    try:
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            if length > LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes; expected at most {LARGEST_HEADER}")
            # The library checks that the header fits the file
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            header: dict[str, Any] = json.loads(raw.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: not a complete safetensors file ({error})") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ConfigError(f"{path}: {name!r} is {entry['dtype']}; allowed: {', '.join(DTYPES)}")
        shape = tuple(entry["shape"])
        part = Part(path, 8 + length + entry["data_offsets"][0], (0,) * len(shape), shape or (1,))
        tensors[name] = FullTensor(DTYPES[entry["dtype"]], shape, (part,))
    return tensors, metadata


def read_folder(folder: Path) -> dict[str, FullTensor]:
    """The tensors of a folder with model.safetensors, or an index and its files.

    Raises CorruptCheckpoint.
    """
    if not (folder / INDEX).is_file():
        return read_header(folder / "model.safetensors")[0]
    try:
        places = json.loads(read_bounded(folder / INDEX))["weight_map"]
        files = sorted(set(places.values()))
        if any(type(name) is not str or name != os.path.basename(name) for name in files):
            raise ValueError("it names a file outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{folder / INDEX}: cannot be used ({reason_of(error)})") from None
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        problems = [f"{folder / name}: No such file, and {INDEX} names it" for name in absent[:5]]
        if len(absent) > 5:
            problems.append(f"and {len(absent) - 5} more")
        raise CorruptCheckpoint(problems)
    tensors: dict[str, FullTensor] = {}
    for file in files:
        of_file, _ = read_header(folder / file)
        tensors |= of_file
    missing = [name for name in places if name not in tensors]
    if missing:
        raise CorruptCheckpoint(
            f"{folder / INDEX}: names {missing[0]!r}, which is in none of its files"
        )
    return tensors


def write_file(
    path: Path,
    tensors: dict[str, Outgoing],
    metadata: dict[str, str] | None = None,
    sync: bool = True,
) -> None:
    """Writes one file. Raises OSError, and what reading the source raises."""
    with path.open("xb") as file:
        file.write(header_bytes(tensors, metadata))
        for tensor in tensors.values():
            for block in tensor.blocks():
                file.write(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def write_folder(folder: Path, tensors: dict[str, Outgoing], shard_size: int) -> None:
    """model.safetensors, or, beyond `shard_size` bytes, model-0000i-of-0000n.safetensors and their
    index.
    """
    shards: list[dict[str, Outgoing]] = [{}]
    room = shard_size
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_size
        shards[-1][name] = tensor
        room -= tensor.nbytes
    metadata = {"format": "pt"}  # transformers requires it
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0], metadata)
        return
    places: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, shard, metadata)
        places |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": places,
    }
    write_small_files(folder, {INDEX: (json.dumps(index, indent=1) + "\n").encode()})
