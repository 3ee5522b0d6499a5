"""Prepares sources by the command, and reads back what is in the folder."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.shards import Tokens
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.main import main

TOKENIZER = Tokenizer()


def prepared(folder: Path, *arguments: object) -> Path:
    """The folder that `titanlite prepare` makes of these arguments."""
    assert main(["prepare", *map(str, arguments), "--out", str(folder)]) == 0
    return folder


def text_of(folder: Path, split: str) -> str:
    """All text of a split; special tokens stand as their names."""
    tokens = Tokens(folder, read_manifest(folder), split)
    return TOKENIZER.decode(tokens.read(0, len(tokens)).tolist())


def ids_of(folder: Path) -> list[int]:
    """All ids of a prepared folder."""
    manifest = read_manifest(folder)
    splits = [Tokens(folder, manifest, split) for split in ("train", "validation")]
    return [int(i) for tokens in splits for i in tokens.read(0, len(tokens))]


def documents_of(folder: Path) -> list[str]:
    """The documents of both splits, each without bos and eos."""
    joined = "".join(text_of(folder, split) for split in ("train", "validation"))
    return joined.replace("<|end_of_text|>", "").split("<|begin_of_text|>")[1:]


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the record of what was verified, which contains times."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "verified.json"
    }


def write_megatron(path: Path, documents: list[list[int]], code: int = 8) -> None:
    """A .bin of uint16 and its .idx, of one sequence per document, as Megatron-LM writes them."""
    sizes = [len(document) for document in documents]
    path.with_suffix(".bin").write_bytes(
        np.concatenate([np.array(d, "<u2") for d in documents]).tobytes()
    )
    pointers = np.cumsum([0, *sizes[:-1]]) * 2
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    bounds = np.arange(len(sizes) + 1).astype("<i8").tobytes()
    index = header + np.array(sizes, "<i4").tobytes() + pointers.astype("<i8").tobytes() + bounds
    path.with_suffix(".idx").write_bytes(index)


def write_datatrove(
    path: Path, documents: list[list[int]], dtype: str = "<u2", metadata: bool = True
) -> None:
    """A .ds with its index, and what describes it, as datatrove 0.10.1 writes them."""
    width = np.dtype(dtype).itemsize
    path.write_bytes(b"".join(np.array(d, dtype).tobytes() for d in documents))
    ends = np.cumsum([len(document) for document in documents])
    Path(f"{path}.index").write_bytes(ends.astype("<u8").tobytes())
    if metadata:
        count = sum(map(len, documents))
        Path(f"{path}.metadata").write_text(f"a tokenizer|{width}\n{count}\n{count} T")
