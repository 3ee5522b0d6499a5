"""Reads token ids that litdata wrote for its `TokensLoader`: chunk-0-0.bin with index.json.

What it is: a chunk begins with the number n of its items and the n + 1 bytes at which they begin
and the last one ends, in 32 bits each. The items follow. For `TokensLoader` an item is ids without
a header of their own, and index.json has their type. It reads a chunk as one sequence of ids, and
so does titanlite: documents are between occurrences of eos or bos.
Reference: https://github.com/Lightning-AI/litdata, src/litdata/streaming/writer.py (0.2.76)
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError

INDEX = "index.json"
MOST_INDEX = 1 << 26  # bytes
# What data_format says of ids without a header -> litdata's codes of integers that ids can be
TYPES = {
    "no_header_tensor": {
        13: "<i2",
        14: "<i2",
        15: "<i4",
        16: "<i4",
        17: "<i8",
        18: "<i8",
        20: "<u2",
    },
    "no_header_numpy": {1: "<i2", 2: "<i4", 3: "<i8", 5: "<u2", 6: "<u4", 7: "<u8"},
}


def chunk_layout(path: str, size: int) -> tuple[np.dtype[Any], int] | None:
    """Returns (type of the ids, bytes before them); None for a file that is no chunk of litdata.

    Raises ConfigError for a chunk of something else, or without its index.
    """
    folder = Path(path).parent
    index = read_index(folder)
    listed = Path(path).name in chunk_names(index)
    offset, end = _header(path, size)
    if not listed:
        if offset:
            raise ConfigError(
                f"{path}: is a chunk of litdata; put the {INDEX} that lists it beside it, which "
                "has the type of its ids"
            )
        return None
    config = index.get("config")
    formats = config.get("data_format") if isinstance(config, dict) else None
    data_format = formats[0] if isinstance(formats, list) and len(formats) == 1 else ""
    kind, _, code = str(data_format).partition(":")
    if kind not in TYPES:
        row = "{'text': row}" if formats == ["str"] else "row"
        raise ConfigError(
            f"{folder}: rows of litdata ({formats}), not token ids; write them as JSON lines: "
            'python -c "import json, litdata, sys; '
            f"[print(json.dumps({row})) for row in litdata.StreamingDataset(sys.argv[1])]"
            f'" {shlex.quote(str(folder))} > rows.jsonl'
        )
    types = {str(number): dtype for number, dtype in TYPES[kind].items()}
    if code not in types:
        raise ConfigError(
            f"{folder / INDEX}: data_format {formats!r:.80}: expected {kind} and one of "
            f"{', '.join(types)}, which are integers"
        )
    if not offset or end != size:
        raise ConfigError(
            f"{path}: is a chunk in {folder / INDEX}, but does not begin as one of litdata: it is "
            "damaged or encrypted"
        )
    dtype = np.dtype(types[code])
    if (size - offset) % dtype.itemsize:
        raise ConfigError(
            f"{path}: {size - offset} bytes after its header, not a whole number of "
            f"{dtype.itemsize}-byte ids"
        )
    count = (size - offset) // dtype.itemsize
    stated = _stated_ids(index, Path(path).name)
    if stated not in (None, count):
        raise ConfigError(
            f"{path}: holds {count} ids of {dtype}, but {folder / INDEX} says {stated} (dim): one "
            "of the two files is of another"
        )
    return dtype, offset


def _stated_ids(index: dict[str, Any], name: str) -> object:
    """The number of ids that the index states of a chunk; None if it does not."""
    chunks = [chunk for chunk in index["chunks"] if isinstance(chunk, dict)]
    return next((chunk.get("dim") for chunk in chunks if chunk.get("filename") == name), None)


def read_index(folder: Path) -> dict[str, Any]:
    """The index.json of a folder; empty if there is none, or it is no JSON object."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        index = read_json(path, MOST_INDEX)
    except (ValueError, OSError):
        return {}
    return index if isinstance(index, dict) else {}


def chunk_names(index: dict[str, Any]) -> set[str]:
    """The files that an index of litdata lists."""
    chunks = index.get("chunks")
    if not isinstance(chunks, list):
        return set()
    return {str(chunk.get("filename")) for chunk in chunks if isinstance(chunk, dict)}


def _header(path: str, size: int) -> tuple[int, int]:
    """Reads (bytes of a chunk's header, where its last item ends); zeros without a header."""
    start = np.fromfile(path, "<u4", 2)
    if len(start) < 2:
        return 0, 0
    count = int(start[0])
    offset = 4 * (count + 2)
    if int(start[1]) != offset or offset > size:
        return 0, 0
    places = np.fromfile(path, "<u4", count + 1, offset=4)
    if (places[1:] < places[:-1]).any() or int(places[-1]) > size:
        return 0, 0
    return offset, int(places[-1])
