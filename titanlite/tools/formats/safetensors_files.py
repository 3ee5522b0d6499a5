"""Reads and writes safetensors files: one, several with an index, or the shards of DCP.

What it is: 8 bytes of length, a JSON header, the numbers. Several files come with
`model.safetensors.index.json`, which lists the file of each tensor: Hugging Face's convention. Or
each process of a trainer has written its parts of the tensors into `shard-*.safetensors`, without
an index: HuggingFaceStorageWriter(save_distributed=True) of torch.distributed.checkpoint, whose
headers have in `DCP_SHARDING_INFO` where in its tensor each part begins. The shape of such a tensor
is the end of its last part, and the parts must fill it exactly once.
What it costs: reading an index, or shards, opens each file once and reads its header; shards take
an entry for each part. Writing holds one block of rows.
Limit: nothing in shards says how many there are, and a process that has nothing to save writes
none. If a shard within a tensor is absent, there is a gap. If the last ones are absent, the tensors
are smaller, which is seen only where their shapes are compared with the model's.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from titanlite.checkpoint.grid import Box, grid_of
from titanlite.checkpoint.manifest import DTYPES, CorruptCheckpoint
from titanlite.checkpoint.shard_file import SAVED_OFFSETS, SHARDING_INFO, header_bytes
from titanlite.runtime.documents import parse_json, read_json
from titanlite.runtime.errors import ConfigError, reason_of, shortened
from titanlite.tools.formats.export import Outgoing
from titanlite.tools.formats.full_state import FullTensor, Part
from titanlite.tools.formats.in_place import NOTHING, Region, blocks_of, fill
from titanlite.tools.formats.output_path import write_small_files

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
# Bytes, some 100,000 tensors; the library reads up to 100 MB, which take over 1 GB as objects
LARGEST_HEADER = 1 << 24
LARGEST_SIZE = 1 << 62  # a dimension; torch's own limit is twice this
SHARDS = "shard-*.safetensors"
ZIP = b"PK\x03\x04"


def read_header(path: Path) -> tuple[dict[str, FullTensor], dict[str, str]]:
    """Reads the header of one file: its tensors and its metadata.

    Each has one part and that part's shape; in shards the part may begin anywhere in its tensor.
    Raises CorruptCheckpoint unless it is a complete safetensors file.
    """
    try:
        with path.open("rb") as raw:
            start = raw.read(8)
            if start.startswith(ZIP):
                raise ValueError(
                    "it begins with a zip archive: torch's HuggingFaceStorageWriter was given a "
                    "value that is not a tensor, such as a plain number; save only tensors with it"
                )
            length = int.from_bytes(start, "little")
            if length > LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes; expected at most {LARGEST_HEADER}")
            # The library checks that the header fits the file
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            header: dict[str, Any] = parse_json(raw.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{path}: not a complete safetensors file ({shortened(str(error))})"
        ) from None
    header.pop("__metadata__", None)
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    all_offsets = _saved_offsets(path, metadata, shapes)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ConfigError(f"{path}: {name!r} is {entry['dtype']}; allowed: {', '.join(DTYPES)}")
        shape = shapes[name]
        if max(shape, default=0) >= LARGEST_SIZE:
            raise CorruptCheckpoint(f"{path}: {name[:200]!r} has the impossible shape {shape}")
        begin = 8 + length + entry["data_offsets"][0]
        part = Part(path, begin, all_offsets[name], shape or (1,))
        tensors[name] = FullTensor(DTYPES[entry["dtype"]], shape, (part,))
    return tensors, metadata


def _saved_offsets(
    path: Path, metadata: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Where the parts in a file begin in their tensors. `shapes`: the shapes of the parts."""
    if SHARDING_INFO not in metadata:
        return {name: (0,) * len(shape) for name, shape in shapes.items()}
    try:
        entries = parse_json(metadata[SHARDING_INFO])
        all_offsets = {name: tuple(entries[name][SAVED_OFFSETS]) for name in shapes}
        for name, offsets in all_offsets.items():
            valid = all(type(offset) is int and 0 <= offset < LARGEST_SIZE for offset in offsets)
            if not valid or len(offsets) != len(shapes[name]):
                raise ValueError(
                    f"{name[:200]!r} has {len(shapes[name])} dimensions, and its saved_offsets "
                    f"are {offsets!r:.200}"
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"{path}: its {SHARDING_INFO} cannot be used ({reason_of(error)})"
        ) from None
    return all_offsets


def read_whole_file(path: Path) -> tuple[dict[str, FullTensor], dict[str, str]]:
    """The tensors of one file, and its metadata. Raises CorruptCheckpoint."""
    tensors, metadata = read_header(path)
    whole = {name: _joined(path, name, [tensor]) for name, tensor in tensors.items()}
    return whole, metadata


def read_folder(folder: Path) -> dict[str, FullTensor]:
    """The tensors of a folder with an index and its files, with model.safetensors, or with shards.

    Raises CorruptCheckpoint.
    """
    if (folder / INDEX).is_file():
        return _read_indexed(folder)
    shards = shards_of(folder)
    if not shards:
        return read_whole_file(folder / WHOLE)[0]
    pieces: dict[str, list[FullTensor]] = {}
    for shard in shards:
        for name, piece in read_header(shard)[0].items():
            pieces.setdefault(name, []).append(piece)
    return {name: _joined(folder, name, of_name) for name, of_name in pieces.items()}


def shards_of(folder: Path) -> list[Path]:
    """The shards in a folder; none if its tensors lie in other files."""
    if (folder / INDEX).is_file() or (folder / WHOLE).is_file():
        return []
    return sorted(path for path in folder.glob(SHARDS) if path.is_file())


def _read_indexed(folder: Path) -> dict[str, FullTensor]:
    try:
        places = read_json(folder / INDEX)["weight_map"]
        files = sorted(set(places.values()))
        if any(type(name) is not str or name != os.path.basename(name) for name in files):
            raise ValueError("it names a file outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{folder / INDEX}: cannot be used ({reason_of(error)})") from None
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        problems = [f"{folder / name}: No such file, and {INDEX} names it" for name in absent[:5]]
        if len(absent) > 5:
            problems.append(f"and {len(absent) - 5} more")
        raise CorruptCheckpoint(problems)
    tensors: dict[str, FullTensor] = {}
    for file in files:
        of_file, _ = read_whole_file(folder / file)
        tensors |= of_file
    missing = [name for name in places if name not in tensors]
    if missing:
        raise CorruptCheckpoint(
            f"{folder / INDEX}: names {shortened(missing[0])!r}, which is in none of its files"
        )
    return tensors


def _joined(source: Path, name: str, pieces: list[FullTensor]) -> FullTensor:
    """The tensor that these parts of it make up. Raises CorruptCheckpoint if they do not."""
    first = pieces[0]
    if len(pieces) == 1 and not any(first.parts[0].offsets):
        return first
    for piece in pieces:
        if piece.dtype != first.dtype:
            raise CorruptCheckpoint(
                f"{source}: {name[:200]!r} is {first.dtype} in {first.parts[0].file.name}, and "
                f"{piece.dtype} in {piece.parts[0].file.name}"
            )
    # A process without rows has saved an empty part
    filled = [piece for piece in pieces if 0 not in piece.shape] or pieces
    parts = tuple(piece.parts[0] for piece in filled)
    boxes = [Box(piece.parts[0].file.name, piece.parts[0].offsets, piece.shape) for piece in filled]
    ends = [
        [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]
        for box in boxes
    ]
    # With other numbers of dimensions some are left out here, and `grid_of` refuses
    shape = tuple(max(of_dim) for of_dim in zip(*ends, strict=False))
    try:
        grid_of(shape, boxes)
    except ValueError:
        raise CorruptCheckpoint(
            f"{source}: its {len(parts)} part(s) of {name[:200]!r} do not fill the shape "
            f"{shape!r:.200} exactly once; a file is absent, or one of another save is among them"
        ) from None
    return FullTensor(first.dtype, shape, parts)


def write_file(
    path: Path,
    tensors: dict[str, Outgoing],
    metadata: dict[str, str] | None = None,
    hashes: Mapping[Path, str] = NOTHING,
) -> None:
    """Writes one file. `hashes`: as in `blocks_of`.

    Raises OSError, and what reading the source raises.
    """
    header = header_bytes(tensors, metadata)
    with path.open("xb", buffering=0) as file:
        Region(file.fileno(), 0).append(memoryview(header))
        regions = {}
        begin = len(header)
        for name, tensor in tensors.items():
            regions[name] = Region(file.fileno(), begin)
            begin += tensor.nbytes
        fill(regions, blocks_of(tensors, hashes))
        os.fsync(file.fileno())


def write_folder(folder: Path, tensors: dict[str, Outgoing], shard_size: int) -> None:
    """Writes model.safetensors, or, beyond `shard_size` bytes, model-0000i-of-0000n.safetensors and
    their index.
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
        write_file(folder / WHOLE, shards[0], metadata)
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
