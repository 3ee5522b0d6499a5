"""Chunks of litdata: the ids alone, of the type that index.json states."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from messages import refused
from preparing import ids_of, prepared

from titanlite.tools.cli.prepare_command import run

RANDOM = np.random.default_rng(45)
ITEMS = [RANDOM.integers(0, 4000, 140) for _ in range(100)]
FORMATS = {
    "<u2": "no_header_tensor:20",
    "<i4": "no_header_tensor:16",
    "<i8": "no_header_tensor:18",
    "<u4": "no_header_numpy:6",
}


def write_chunks(folder: Path, dtype: str, formats: list[str] | None = None) -> None:
    """Two chunks and their index, as litdata 0.2.76 writes them for TokensLoader."""
    folder.mkdir()
    chunks = []
    for number in range(2):
        items = [item.astype(dtype).tobytes() for item in ITEMS[50 * number : 50 * (number + 1)]]
        offsets = np.cumsum([4 * (len(items) + 2), *map(len, items)])
        data = np.array([len(items), *offsets], "<u4").tobytes() + b"".join(items)
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(data)
        chunks.append(
            {"chunk_bytes": len(data), "chunk_size": len(items), "dim": 7000, "filename": name}
        )
    config = {
        "compression": None,
        "data_format": formats or [FORMATS[dtype]],
        "item_loader": "TokensLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


def prepare(folder: Path, made: Path) -> None:
    run([str(folder), "--out", str(made)])


@pytest.mark.parametrize("dtype", FORMATS)
def test_chunks_are_their_ids(tmp_path, dtype):
    write_chunks(tmp_path / "set", dtype)
    made = prepared(tmp_path / "made", tmp_path / "set")
    # Each chunk is one document, whose last twentieth is held out
    first, second = np.concatenate(ITEMS[:50]), np.concatenate(ITEMS[50:])
    parts = [first[:6650], second[:6650], first[6650:], second[6650:]]
    assert ids_of(made) == np.concatenate(parts).tolist()


@pytest.mark.parametrize("made_of", ["tensors", "arrays"])
def test_chunks_that_litdata_wrote_are_their_ids(tmp_path, made_of):
    writer = pytest.importorskip("litdata.streaming.writer")
    torch = pytest.importorskip("torch")
    litdata = pytest.importorskip("litdata")
    loader = litdata.TokensLoader()
    cache = writer.BinaryWriter(str(tmp_path / "set"), chunk_size=7000, item_loader=loader)
    for number, item in enumerate(ITEMS):
        cache.add_item(number, torch.tensor(item) if made_of == "tensors" else item)
    cache.done()
    cache.merge()
    made = prepared(tmp_path / "made", tmp_path / "set")
    assert sorted(ids_of(made)) == sorted(np.concatenate(ITEMS).tolist())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: (folder / "index.json").unlink(), "put the index.json"),
        (lambda folder: (folder / "chunk-0-1.bin").write_bytes(b"\0\1" * 400), "encrypted"),
        (
            lambda folder: (folder / "chunk-0-1.bin").write_bytes(
                (folder / "chunk-0-1.bin").read_bytes()[:-2]
            ),
            "does not begin as one of litdata",
        ),
        (
            lambda folder: (folder / "index.json").write_text(
                (folder / "index.json").read_text().replace("7000", "7001")
            ),
            "holds 7000 ids of uint16, but",
        ),
    ],
)
def test_a_chunk_that_is_not_whole_is_refused(tmp_path, change, expected):
    write_chunks(tmp_path / "set", "<u2")
    change(tmp_path / "set")
    with refused(str(tmp_path / "set/chunk-0-"), expected):
        prepare(tmp_path / "set", tmp_path / "made")


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        (["str"], "{'text': row}"),
        (["str", "int"], "json.dumps(row)"),
        (["no_header_tensor:1"], "no_header_tensor:1"),
        (["no_header_tensor:x"], "no_header_tensor:x"),
    ],
)
def test_a_chunk_of_something_else_is_refused(tmp_path, formats, expected):
    write_chunks(tmp_path / "set", "<u2", formats)
    with refused(str(tmp_path / "set"), expected):
        prepare(tmp_path / "set", tmp_path / "made")


def test_an_index_alone_is_refused(tmp_path):
    write_chunks(tmp_path / "set", "<u2")
    with refused("index.json", "give their file"):
        prepare(tmp_path / "set/index.json", tmp_path / "made")
