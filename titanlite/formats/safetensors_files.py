"""safetensors files, one or several with an index: what lies where in them, and writing them as a stream.

What it is: 8 bytes of length, a JSON header, the numbers. Several files have a `model.safetensors.index.json` beside
them, which says what lies in which: Hugging Face's convention, and ours in that case.
What it costs: reading an index opens each file once. Writing holds one block of rows.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanlite.checkpoint.manifest import DTYPES, CorruptCheckpoint
from titanlite.checkpoint.shard_file import DTYPE_NAMES
from titanlite.config.schema import ConfigError
from titanlite.formats.full_state import FullTensor, Part

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes: the library's own bound


Told = Callable[[memoryview], None]  # hears of the bytes that are written, when they are


def both(first: Told, second: Told) -> Told:
    """Who tells both."""

    def told(data: memoryview) -> None:
        first(data)
        second(data)

    return told


class Outgoing(NamedTuple):
    """A tensor to write: its rows come in blocks when they are asked for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, FullTensor], dict[str, str]]:
    """The tensors of one file, and its metadata. Raises CorruptCheckpoint where it is no whole safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:  # the library checks that the header fits the file
            metadata = file.metadata() or {}
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header: dict[str, Any] = json.loads(raw.read(min(length, LARGEST_HEADER)))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: no whole safetensors file ({error})") from None
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ConfigError(f"{path}: {name!r} is {entry['dtype']}; allowed: {', '.join(DTYPES)}")
        shape = tuple(entry["shape"])
        part = Part(path, 8 + length + entry["data_offsets"][0], (0,) * len(shape), shape or (1,))
        found[name] = FullTensor(DTYPES[entry["dtype"]], shape, (part,))
    return found, metadata


def read_folder(folder: Path) -> dict[str, FullTensor]:
    """The tensors of a folder with model.safetensors, or an index and its files. Raises CorruptCheckpoint."""
    if not (folder / INDEX).is_file():
        return read_header(folder / "model.safetensors")[0]
    try:
        places = json.loads((folder / INDEX).read_bytes())["weight_map"]
        files = sorted(set(places.values()))
        if any(type(name) is not str or name != os.path.basename(name) for name in files):
            raise ValueError("it names a file outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{folder / INDEX}: cannot be used ({error})") from None
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise CorruptCheckpoint([f"{folder / name}: No such file, and {INDEX} names it" for name in absent])
    tensors = {name: tensor for file in files for name, tensor in read_header(folder / file)[0].items()}
    if missing := [name for name in places if name not in tensors]:
        raise CorruptCheckpoint(f"{folder / INDEX}: names {missing[0]!r}, which is in none of its files")
    return tensors


def write_file(path: Path, tensors: dict[str, Outgoing], metadata: dict[str, str], told: Told) -> None:
    """Writes and syncs one file. Raises OSError, and what reading raises."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin aligned
    with path.open("xb") as file:
        file.write(start := len(text).to_bytes(8, "little") + text)
        told(memoryview(start))
        for tensor in tensors.values():
            write_blocks(file, tensor, told)
        file.flush()
        os.fsync(file.fileno())


def write_blocks(file: BinaryIO, tensor: Outgoing, told: Told) -> None:
    """The tensor's numbers, from where the file stands."""
    for block in tensor.blocks():
        data = block.contiguous().reshape(-1).view(torch.uint8).numpy().data
        file.write(data)
        told(data)


def write_folder(folder: Path, tensors: dict[str, Outgoing], shard_size: int, told: Told) -> None:
    """model.safetensors, or, beyond `shard_size` bytes, model-0000i-of-0000n.safetensors and their index."""
    shards: list[dict[str, Outgoing]] = [{}]
    room = shard_size
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_size
        shards[-1][name] = tensor
        room -= tensor.nbytes
    metadata = {"format": "pt"}  # transformers asks for it
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0], metadata, told)
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        write_file(folder / file, shard, metadata, told)
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    with (folder / INDEX).open("x") as listing:
        listing.write(json.dumps(index, indent=1) + "\n")
        listing.flush()
        os.fsync(listing.fileno())
