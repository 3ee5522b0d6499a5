"""Finds where the ids are in a file of token ids, and of which type they are.

What it is: files that state the type are read as they say: llm.c's header, NumPy's, Megatron's
index. A file without any of these (nanoGPT, `ndarray.tofile`, the memory maps of OLMo and dolma,
which are named .npy) has ids of 16 bits unless its data can be wider ids: there each second half is
the upper one, which is 0 or small, while the lower one is not. Then it is refused, and the option
or key `ids` decides, because the same bytes can be ids of 16 bits with a 0 after each. Only a
tokenizer whose ids do not fit into 16 bits excludes those, so its ids of 32 bits are read without
the option. 8 bits, floats and big-endian order are refused.
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
from titanlite.tools.prepare.detect_content import LLMC, LLMC_HEADER, MEGATRON, NUMPY

INDEX_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("bounds", "<u8")]
)
DTYPES = {3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's codes of integers that ids can be
MOST_NUMPY_HEADER = 1 << 16  # bytes
DESCR = re.compile(rb"'descr'\s*:\s*'([<>|][iu][1248])'")
SHAPE = re.compile(rb"'shape'\s*:\s*\(\s*(\d{1,18})\s*,\s*\)")
# The types of a file that states none: 8 bits only if the user says so
RAW_TYPES = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "int64": "<i8"}
OPTION = "--ids"
BLOCKS = 16  # that are looked at, evenly over a file
BLOCK = 1 << 16  # bytes of each
LARGEST_UPPER = 63  # the upper half of 4,194,303, the largest id that a tokenizer may have
LARGEST_ID = 1 << 22
CLEAR = 0.5  # the difference of two shares from which on each second half is an upper one
EQUAL = 0.25  # and up to which it is not
FEWEST = 32  # numbers from which on floats, 8 bits and big-endian order show
MANY = 1 << 14  # pairs of bytes from which on their distributions can be compared
ALIKE = 0.1  # the difference of two distributions up to which they count as one
SHOWN = 4  # ids of each reading in a message

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
            "it is truncated, or its ids are of another type"
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
    return None


def _llmc_layout(path: str, size: int) -> Layout:
    if size < LLMC_HEADER:
        raise ConfigError(
            f"{path}: {size} bytes, fewer than its header of {LLMC_HEADER}; it is truncated"
        )
    header = np.fromfile(path, "<u4", 3)
    version, type_name = LLMC[int(header[0])]
    if header[1] != version:
        raise ConfigError(
            f"{path}: llm.c's version {header[1]} at byte 4; expected {version}, which goes with "
            f"its magic number {header[0]}"
        )
    dtype = np.dtype(type_name)
    stated_ids = int(header[2])
    num_ids = (size - LLMC_HEADER) // dtype.itemsize
    stated_bytes = stated_ids * dtype.itemsize
    if size - LLMC_HEADER != stated_bytes:
        raise ConfigError(
            f"{path}: its header says {stated_ids} ids at byte 8, but {num_ids} follow; "
            + wrong_length(size - LLMC_HEADER, stated_bytes)
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
    stated_bytes = layout.num_ids * layout.dtype.itemsize
    if size - offset != stated_bytes:
        raise ConfigError(
            f"{path}: its header says {layout.num_ids} ids, but {following} follow; "
            + wrong_length(size - offset, stated_bytes)
        )
    return layout


def wrong_length(found: int, stated: int) -> str:
    """Says why a file that has `found` bytes may not have those that its header states."""
    if found < stated:
        return "it is truncated"
    return "something was added to it, or its header is damaged"


def megatron_header(index: Path) -> tuple[int, int, int]:
    """Reads (code of the type, number of sequences, number of bounds) of Megatron's index."""
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

    Raises ConfigError if the data can be of several types, or of none that is read.
    """
    data = _sample(path, size)
    _refuse_other_types(path, data, setting)
    possible = [
        name
        for name in _possible_types(data, tokenizer)
        if size >= np.dtype(RAW_TYPES[name]).itemsize
    ] or ["uint16"]  # of a file of one byte, which is too short for any
    if len(possible) > 1:
        readings = ", or ".join(_reading(data, size, name) for name in possible)
        raise ConfigError(f"{path}: its bytes can be {readings}; say which by {setting}")
    (name,) = possible
    if name == "uint16" and tokenizer.size > 1 << 16:
        raise ConfigError(
            f"{path}: looks like ids of 16 bits, which the {tokenizer.size} ids of the tokenizer "
            f"{tokenizer.path} exceed: was the file made with another one, or are larger ids "
            f"cut off? If neither, say so by {setting}: uint16"
        )
    return np.dtype(RAW_TYPES[name])


def _possible_types(data: bytes, tokenizer: Tokenizer) -> list[str]:
    """The types that the ids can be of."""
    excess = _excess_of_small(_as(data, "<u2"))
    if excess is None:
        return ["uint16", "uint32", "int64"]
    if excess <= EQUAL:
        return ["uint16"]
    possible = ["uint32"]
    if tokenizer.size <= 1 << 16 or excess < CLEAR:
        possible.insert(0, "uint16")
    wider = _excess_of_small(_as(data, "<u4"))
    if wider is None or wider > EQUAL:
        possible.append("int64")
    return possible


def _reading(data: bytes, size: int, name: str) -> str:
    """What a file holds if its ids are of this type."""
    dtype = np.dtype(RAW_TYPES[name])
    count = size // dtype.itemsize
    first = np.frombuffer(data[: min(count, SHOWN) * dtype.itemsize], dtype).tolist()
    more = ", ..." if count > SHOWN else ""
    return f"{name} ({count:,} ids: {', '.join(map(str, first))}{more})"


def width_note(path: str, size: int, ids: str) -> str:
    """Notes what is odd about a file whose type of ids the user named, and no header states.

    Empty unless each second id of that type is 0, as the upper half of a wider one.
    """
    if ids == "auto" or _stated_layout(path, size):
        return ""
    wider = {"uint8": "uint16", "uint16": "uint32", "uint32": "int64"}.get(ids)
    words = _as(_sample(path, size), RAW_TYPES[ids])
    excess = _excess_of_small(words)
    if wider is None or excess is None or excess < CLEAR or words[1::2].any():
        return ""
    return f"{path}: as {ids} each second id is 0, as in a file of {wider}: is the type right?"


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


def _refuse_other_types(path: str, data: bytes, setting: str) -> None:
    """Raises ConfigError for floats, ids of 8 bits, or with the upper half first (big-endian)."""
    for kind in ("<f4", "<f8", ">f4", ">f8", "<f2"):
        if _are_whole(_as(data, kind)):
            raise ConfigError(
                f"{path}: looks like numbers of {np.dtype(kind).name}; write them with "
                f"numpy.save(FILE, ids.astype('<u4')), or name their type by {setting}"
            )
    for kind in ("u1", "<u2", "<u4"):
        words = _as(data, kind)
        excess = _excess_of_small(words.reshape(-1, 2)[:, ::-1].reshape(-1))
        if len(words) > 2 * FEWEST and excess is not None and excess >= CLEAR:
            raise ConfigError(
                f"{path}: looks like ids whose upper half comes first (big-endian); write them "
                f"with numpy.save(FILE, ids); if it does not, name their type by {setting}"
            )
    if _are_bytes(_as(data, "u1")):
        raise ConfigError(
            f"{path}: looks like ids of 8 bits; name their type by {setting}: uint8 if they are"
        )


def _are_whole(numbers: Ids) -> bool:
    """Whether all floats are whole numbers that can be ids, or -1 to -100 in place of one."""
    with np.errstate(invalid="ignore"):  # the bytes of ids can be any float
        numbers = numbers[numbers != 0].astype("<f8")
        return (
            len(numbers) >= FEWEST
            and bool((np.abs(numbers) < LARGEST_ID).all())
            and bool((numbers == np.round(numbers)).all())
        )


def _are_bytes(halves: Ids) -> bool:
    """Whether bytes are ids themselves: of 16 bits, the upper and the lower ones differ."""
    pairs = len(halves) // 2
    excess = _excess_of_small(halves)
    if pairs < FEWEST or excess is None or abs(excess) > EQUAL:
        return False
    if halves.max() < 128:  # lower bytes of ids of 16 bits reach 255
        return True
    lower = np.bincount(halves[0::2], minlength=256)
    upper = np.bincount(halves[1::2], minlength=256)
    return pairs >= MANY and int(np.abs(lower - upper).sum()) <= 2 * ALIKE * pairs


def _excess_of_small(words: Ids) -> float | None:
    """Computes how much more often each second word is 0, or small, than the word before it.

    It is near 1 where the second words are upper halves of ids, and near 0 where all words are ids
    themselves. None if all words are 0, which are padding, and show nothing.
    """
    lower = words[0::2]
    upper = words[1::2]
    used = (lower != 0) | (upper != 0)
    if not used.any():
        return None
    lower = lower[used]
    upper = upper[used]
    zero = float(np.mean(upper == 0) - np.mean(lower == 0))
    small = float(np.mean(upper <= LARGEST_UPPER) - np.mean(lower <= LARGEST_UPPER))
    return max(zero, small)
