"""Where the ids are in a file of token ids, and of which type they are.

What it is: files that state the type are read as they say: llm.c's header, NumPy's, Megatron's
index, litdata's index.json. A file without any of these (nanoGPT, `ndarray.tofile`, the memory maps
of OLMo and dolma, which are named .npy) is 16, 32 or 64 bits wide, and its data shows which: in
wide ids each second half is the upper one, which is 0 or small, while the lower one is not. If the
data does not show it, or shows 8 bits or big-endian order, the file is refused, and the option or
key `ids` decides.
Why not by the vocabulary: an id beyond it would make a file of 32 bits one of 16, with twice as
many ids.
What it costs: 1 MB of each file is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.detect_content import LLMC, MEGATRON, NUMPY
from titanlite.tools.prepare.litdata_chunk import chunk_layout

LLMC_HEADER = 1024  # bytes
INDEX_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("bounds", "<u8")]
)
DTYPES = {3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's codes of integers that ids can be
MOST_NUMPY_HEADER = 1 << 16  # bytes
DESCR = re.compile(rb"'descr'\s*:\s*'([<>|][iu][1248])'")
SHAPE = re.compile(rb"'shape'\s*:\s*\(\s*(\d{1,18})\s*,\s*\)")
RAW_TYPES = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8"}  # of a file that states none
OPTION = "--ids"
BLOCKS = 16  # that are looked at, evenly over a file
BLOCK = 1 << 16  # bytes of each
FEWEST = 32  # pairs of halves from which on the data decides
LARGEST_UPPER = 63  # the upper half of 4,194,303, the largest id that a tokenizer may have
CLEAR = 0.5  # the difference of two shares from which on each second half is an upper one
EQUAL = 0.25  # and up to which it is not

Ids = np.ndarray[Any, Any]


class Layout(NamedTuple):
    """Where the ids are in a file."""

    dtype: np.dtype[Any]
    offset: int  # bytes of the header
    num_ids: int
    made_with: str = ""  # what another file says of the tokenizer


def token_layout(
    path: str, size: int, tokenizer: Tokenizer, ids: str = "auto", setting: str = OPTION
) -> Layout:
    """The layout of a file, from its header, its index, or its data.

    `ids`: the type that the user named, one of RAW_TYPES, or auto; `setting`: its option or key.
    Raises ConfigError for a wrong size, a type that is none of ids, or that the data does not show.
    """
    layout = _stated_layout(path, size)
    if layout:
        if ids != "auto" and np.dtype(RAW_TYPES[ids]) != layout.dtype:
            raise ConfigError(f"{path}: states ids of type {layout.dtype}, {setting} says {ids}")
        return layout
    if ids == "auto":
        dtype = _type_of_data(path, size, tokenizer, setting)
    else:
        dtype = np.dtype(RAW_TYPES[ids])
    return _whole_file(path, size, dtype)


def _whole_file(path: str, size: int, dtype: np.dtype[Any]) -> Layout:
    """The layout of a file that has nothing but ids. Raises ConfigError if one is cut off."""
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path}: {size} bytes, not a whole number of {dtype.itemsize}-byte ids; "
            "it is truncated"
        )
    return Layout(dtype, 0, size // dtype.itemsize)


def _stated_layout(path: str, size: int) -> Layout | None:
    """The layout that a header or an index states; None without either."""
    with open(path, "rb") as file:
        start = file.read(len(NUMPY))
    if start == NUMPY:
        return _numpy_layout(path, size)
    if int.from_bytes(start[:4], "little") in LLMC:
        return _llmc_layout(path, size)
    index = Path(path).with_suffix(".idx")
    if path.endswith(".bin") and index.is_file():
        type_code, _, _ = megatron_header(index)
        return _whole_file(path, size, np.dtype(DTYPES[type_code]))
    chunk = chunk_layout(path, size)
    if chunk:
        dtype, offset = chunk
        return Layout(dtype, offset, (size - offset) // dtype.itemsize)
    return None


def _llmc_layout(path: str, size: int) -> Layout:
    if size < LLMC_HEADER:
        raise ConfigError(
            f"{path}: {size} bytes, fewer than its header of {LLMC_HEADER}; it is truncated"
        )
    header = np.fromfile(path, "<u4", 3)
    dtype = np.dtype(LLMC[int(header[0])])
    stated_ids = int(header[2])
    num_ids = (size - LLMC_HEADER) // dtype.itemsize
    if size - LLMC_HEADER != stated_ids * dtype.itemsize:
        raise ConfigError(
            f"{path}: its header says {stated_ids} ids at byte 8, but {num_ids} follow; "
            "it is truncated"
        )
    return Layout(dtype, LLMC_HEADER, num_ids)


def _numpy_layout(path: str, size: int) -> Layout:
    """The layout of a file of `numpy.save`. Raises ConfigError unless it is one row of integers.

    The header is a Python literal of three keys, which is searched and not evaluated.
    """
    with open(path, "rb") as file:
        version = file.read(len(NUMPY) + 2)[-2]
        length = int.from_bytes(file.read(2 if version == 1 else 4), "little")
        header = file.read(min(length, MOST_NUMPY_HEADER))
        offset = file.tell()
    dtype = DESCR.search(header)
    shape = SHAPE.search(header)
    if not dtype or not shape or len(header) < length:
        shown = header[:200].decode("ascii", "replace").strip()
        raise ConfigError(
            f"{path}: a NumPy array with the header {shown!r}; expected one row of integers, as "
            "from numpy.save(FILE, ids.reshape(-1))"
        )
    layout = Layout(np.dtype(dtype[1].decode()), offset, int(shape[1]))
    following = (size - offset) // layout.dtype.itemsize
    if size - offset != layout.num_ids * layout.dtype.itemsize:
        raise ConfigError(
            f"{path}: its header says {layout.num_ids} ids, but {following} follow; it is truncated"
        )
    return layout


def megatron_header(index: Path) -> tuple[int, int, int]:
    """(code of the type, number of sequences, number of document bounds) of Megatron's index."""
    header = np.fromfile(index, INDEX_HEADER, 1)
    magic = MEGATRON.rstrip(b"\0")  # numpy drops the zeros at the end of a string
    if not len(header) or header[0]["magic"] != magic or header[0]["version"] != 1:
        raise ConfigError(
            f"{index}: not a Megatron index of version 1: "
            f"its first {INDEX_HEADER.itemsize} bytes differ"
        )
    code = int(header[0]["dtype"])
    if code not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise ConfigError(f"{index}: type {code} at byte 17; expected one of {allowed} (integers)")
    return code, int(header[0]["sequences"]), int(header[0]["bounds"])


def _type_of_data(path: str, size: int, tokenizer: Tokenizer, setting: str) -> np.dtype[Any]:
    """The type of the ids in a file that does not state it.

    Raises ConfigError if the data does not show it.
    """
    data = _sample(path, size)
    _refuse_bytes_and_big_endian(path, data, setting)
    possible = list(RAW_TYPES)
    wide = _has_upper_halves(_as(data, "<u2"))
    if wide is False:
        possible = ["uint16"]
    elif wide:
        possible = ["uint32", "int64"]
        wider = _has_upper_halves(_as(data, "<u4"))
        if wider is not None:
            possible = ["int64" if wider else "uint32"]
    if len(possible) > 1:  # few ids, or odd ones: a type whose ids are all in the vocabulary
        possible = [name for name in possible if _fits(data, size, RAW_TYPES[name], tokenizer)]
    if len(possible) != 1:
        raise ConfigError(
            f"{path}: its {size} bytes do not show of which type its ids are; say it by {setting}: "
            f"one of {', '.join(RAW_TYPES)}"
        )
    (name,) = possible
    if name == "uint16" and tokenizer.size > 1 << 16:
        raise ConfigError(
            f"{path}: looks like ids of 16 bits, which the {tokenizer.size} ids of the tokenizer "
            f"{tokenizer.path} exceed: was the file made with another one, or are larger ids "
            f"cut off? If neither, say so by {setting}: uint16"
        )
    return np.dtype(RAW_TYPES[name])


def _sample(path: str, size: int) -> bytes:
    """Blocks of a file, evenly over it, each from a multiple of 8 bytes on."""
    step = max(BLOCK, size // BLOCKS // 8 * 8)
    blocks = []
    with open(path, "rb") as file:
        for offset in range(0, size, step):
            file.seek(offset)
            blocks.append(file.read(BLOCK))
    return b"".join(blocks)


def _as(data: bytes, dtype: str) -> Ids:
    """The whole pairs of numbers of a type that are in `data`."""
    pair = 2 * np.dtype(dtype).itemsize
    return np.frombuffer(data[: len(data) // pair * pair], dtype)


def _refuse_bytes_and_big_endian(path: str, data: bytes, setting: str) -> None:
    """Raises ConfigError for ids of 8 bits, or with the upper half first (big-endian)."""
    for dtype in ("u1", "<u2", "<u4"):
        swapped = _as(data, dtype).reshape(-1, 2)[:, ::-1].reshape(-1)
        if _has_upper_halves(swapped):
            raise ConfigError(
                f"{path}: looks like ids whose upper half comes first (big-endian); write them "
                f"with ids.astype('<u4').tofile(FILE), or name their type by {setting}"
            )
    halves = _as(data, "u1")
    if _has_upper_halves(halves) is False and halves.max() < 128:  # ids of 16 bits reach 255
        raise ConfigError(
            f"{path}: looks like ids of 8 bits; write them with ids.astype('<u2').tofile(FILE), "
            f"or name their type by {setting}"
        )


def _has_upper_halves(words: Ids) -> bool | None:
    """Whether each second word is the upper half of a number; None if that is unclear.

    Then it is 0, or small, far more often than the word before it. Words that are ids themselves
    are equally often so at both places.
    """
    lower = words[0::2]
    upper = words[1::2]
    used = (lower != 0) | (upper != 0)  # padding shows nothing
    lower = lower[used]
    upper = upper[used]
    if len(lower) < FEWEST:
        return None
    zero = float(np.mean(upper == 0) - np.mean(lower == 0))
    small = float(np.mean(upper <= LARGEST_UPPER) - np.mean(lower <= LARGEST_UPPER))
    difference = max(zero, small)
    if difference >= CLEAR:
        return True
    if difference <= EQUAL:
        return False
    return None


def _fits(data: bytes, size: int, dtype: str, tokenizer: Tokenizer) -> bool:
    """Whether the data can be ids of this type, all in the vocabulary."""
    width = np.dtype(dtype).itemsize
    ids = np.frombuffer(data[: len(data) // width * width], dtype)
    return size % width == 0 and bool(((ids >= 0) & (ids < tokenizer.size)).all())
