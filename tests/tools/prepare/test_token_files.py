"""Token ids of other programs: their documents, each once, and damage with file and offset."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from fuzz_samples import Reader, build_data, of_source
from messages import refused
from preparing import TOKENIZER, write_megatron

from titanlite.tools.prepare import token_files
from titanlite.tools.prepare.job import File
from titanlite.tools.prepare.sources import Source
from titanlite.tools.prepare.token_files import has_documents, token_documents
from titanlite.tools.prepare.token_layout import token_layout

BOS, EOS = TOKENIZER.bos, TOKENIZER.eos
RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(0, 4000, size).tolist() for size in RANDOM.integers(1, 60, 300)]


def file_of(path: Path, kind: str = "tokens", split: str = "hash") -> File:
    return File(str(path), path.name, path.stat().st_size, "", kind, "", split)


def read(file: File, ids: str = "auto") -> list[list[int]]:
    documents = token_documents(file, TOKENIZER, ids)
    return [np.concatenate(list(document.ids)).tolist() for document in documents]


def ends_with_eos(path: Path, dtype: str) -> list[list[int]]:
    expected = [[*document, EOS] for document in DOCUMENTS]
    path.write_bytes(np.concatenate(expected).astype(dtype).tobytes())
    return expected


def begins_with_bos(path: Path, dtype: str) -> list[list[int]]:
    expected = [[BOS, *document] for document in DOCUMENTS]
    path.write_bytes(np.concatenate(expected).astype(dtype).tobytes())
    return expected


def with_header(path: Path, dtype: str) -> list[list[int]]:
    expected = begins_with_bos(path, dtype)
    magic, version = (20240520, 1) if dtype == "<u2" else (20240801, 7)
    header = struct.pack("<3i", magic, version, sum(map(len, expected)))
    path.write_bytes(header + bytes(1012) + path.read_bytes())
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("write", [ends_with_eos, begins_with_bos, with_header])
def test_documents_are_between_delimiters(tmp_path, monkeypatch, write, dtype):
    monkeypatch.setattr(token_files, "BLOCK", 37)
    expected = write(tmp_path / "a.bin", dtype)
    file = file_of(tmp_path / "a.bin")
    named = "auto" if write is with_header else np.dtype(dtype).name
    # In its first 37 ids
    layout = token_layout(file.path, file.size, TOKENIZER, named)
    assert has_documents(file, layout, TOKENIZER) or dtype == "<u4" or write is ends_with_eos
    assert read(file, named) == expected


def test_documents_of_megatron(tmp_path):
    write_megatron(tmp_path / "a", DOCUMENTS)
    file = file_of(tmp_path / "a.bin", "megatron")
    assert read(file) == DOCUMENTS


def write_sequences(path: Path, sizes: np.ndarray, bounds: np.ndarray) -> None:
    """A .bin of uint16 zeros and its .idx, with any number of sequences in a document."""
    ends = np.cumsum(sizes, dtype="<i8")
    path.with_suffix(".bin").write_bytes(bytes(2 * int(ends[-1])))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sizes), len(bounds))
    arrays = sizes.astype("<i4"), ((ends - sizes) * 2).astype("<i8"), bounds.astype("<i8")
    path.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))


def test_documents_of_several_sequences_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "BLOCK", 7)
    monkeypatch.setattr(token_files, "DOCUMENTS", 5)
    sizes = RANDOM.integers(0, 4, 200)
    bounds = np.concatenate([[0], np.sort(RANDOM.integers(0, 201, 90)), [200]])
    write_sequences(tmp_path / "a", sizes, bounds)
    places = np.concatenate([[0], np.cumsum(sizes)])[bounds]
    expected = [[0] * int(size) for size in np.diff(places) if size]
    file = file_of(tmp_path / "a.bin", "megatron")
    assert read(file) == expected


def test_an_index_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "DOCUMENTS", 100)
    count = 30_000
    write_sequences(tmp_path / "a", np.ones(count, int), np.arange(count + 1))
    size, file = (tmp_path / "a.idx").stat().st_size, file_of(tmp_path / "a.bin", "megatron")
    tracemalloc.start()
    try:
        layout = token_layout(file.path, file.size, TOKENIZER)
        documents = token_files.indexed_documents(file, layout)
        assert [next(documents) for _ in range(3)] == [(0, 1), (1, 2), (2, 3)]
        assert sum(1 for _ in documents) == count - 3
        assert tracemalloc.get_traced_memory()[1] < size / 5
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_damaged_index_is_found(tmp_path):
    write_megatron(tmp_path / "a", DOCUMENTS)
    path = tmp_path / "a.idx"
    good, found = path.read_bytes(), 0
    file = file_of(tmp_path / "a.bin", "megatron")
    for _ in range(60):
        place = int(RANDOM.integers(34, len(good)))
        other = good[place] ^ int(RANDOM.integers(1, 256))
        path.write_bytes(with_value(good, place, "<B", other))
        with refused("a.idx"):
            read(file)
        found += 1
    assert found == 60


def test_a_file_without_documents_is_cut_at_its_last_twentieth(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(1000, dtype="<u2").tobytes())
    file = file_of(tmp_path / "a.bin", split="tail")
    assert not has_documents(file, token_layout(file.path, file.size, TOKENIZER), TOKENIZER)
    found = list(token_documents(file, TOKENIZER))
    assert [document.split for document in found] == ["train", "validation"]
    assert [document.length for document in found] == [950, 50]


def with_value(data: bytes, offset: int, layout: str, *values: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(layout, changed, offset, *values)
    return bytes(changed)


# name -> (file of a.bin and a.idx, what becomes of its bytes, words of the message)
DAMAGED = {
    "an id beyond the vocabulary": (
        "a.bin",
        lambda data: with_value(data, 40, "<H", 5000),
        "id 5000 at byte 40",
    ),
    "half an id": ("a.bin", lambda data: data[:-1], "not a whole number"),
    "too few ids": ("a.bin", lambda data: data[:-20], "sequence 299"),
    "too many ids": (
        "a.bin",
        lambda data: data + bytes(20),
        f"{2 * sum(map(len, DOCUMENTS)) + 20} bytes, but a.idx ends at byte",
    ),
    "no documents and no sequences": (
        "a.idx",
        lambda data: b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 0),
        "but a.idx ends at byte 0; one of the two files is of another",
    ),
    "an index that is cut": ("a.idx", lambda data: data[:-3], "truncated"),
    "an index with more": ("a.idx", lambda data: data + bytes(8), "something was added to it"),
    "a header that is cut": ("a.idx", lambda data: data[:20], "not a Megatron index"),
    "another version": (
        "a.idx",
        lambda data: with_value(data, 9, "<Q", 2),
        "not a Megatron index of version 1",
    ),
    "a type that is not an integer": (
        "a.idx",
        lambda data: with_value(data, 17, "<B", 7),
        "type 7 at byte 17",
    ),
    "a negative size": ("a.idx", lambda data: with_value(data, 34, "<i", -5), "sequence 0"),
    "another place": (
        "a.idx",
        lambda data: with_value(data, 34 + 1200, "<q", 8),
        "sequence 0, at byte 1234",
    ),
    "documents out of order": (
        "a.idx",
        lambda data: with_value(data, 34 + 3600 + 8, "<q", 7),
        "not in order",
    ),
    "too many sequences": (
        "a.idx",
        lambda data: with_value(data, 18, "<Q", 2**61),
        "truncated",
    ),
}


@pytest.mark.parametrize(("name", "change", "problem"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_named_with_its_offset(tmp_path, name, change, problem):
    write_megatron(tmp_path / "a", DOCUMENTS)
    path = tmp_path / name
    path.write_bytes(change(path.read_bytes()))
    with refused(str(tmp_path / "a."), problem):
        read(file_of(tmp_path / "a.bin", "megatron"))


@pytest.mark.parametrize(
    ("dtype", "change", "problem"),
    [
        ("<u2", lambda data: data[:-2], "9746 follow; it is truncated"),
        (
            "<u2",
            lambda data: data + bytes(2),
            "9748 follow; something was added",
        ),
        ("<u2", lambda data: with_value(data, 8, "<i", -1), "says 4294967295 ids at byte 8"),
        ("<u2", lambda data: with_value(data, 4, "<i", 7), "version 7 at byte 4; expected 1"),
        ("<u4", lambda data: with_value(data, 4, "<i", 1), "version 1 at byte 4; expected 7"),
    ],
)
def test_a_header_that_does_not_fit_is_named(tmp_path, dtype, change, problem):
    path = tmp_path / "a.bin"
    with_header(path, dtype)
    path.write_bytes(change(path.read_bytes()))
    with refused(str(path), problem):
        read(file_of(path))


def megatron_index(folder: Path) -> list[bytes]:
    write_megatron(folder / "ids", [[1, 2, 3], [4, 5], [6] * 20])
    return [(folder / "ids.idx").read_bytes()]


def read_with_index(folder: Path, data: bytes) -> None:
    (folder / "ids.idx").write_bytes(data)
    build_data(Source(str(folder / "ids.bin")), folder / "made")


LLMC_HEADER = np.array([20240520, 1, 286, *[0] * 253], "<i4").tobytes()
IDS = np.arange(286, dtype="<u2").tobytes()
NUMPY_HEADER = b"{'descr': '<u2', 'fortran_order': False, 'shape': (286,), }"
NUMPY_IDS = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(NUMPY_HEADER)) + NUMPY_HEADER + IDS


FUZZED = {
    "token ids with a header": of_source("bytes", "ids.bin", LLMC_HEADER + IDS),
    "token ids": of_source("bytes", "ids.bin", IDS),
    "NumPy ids": of_source("bytes", "ids.npy", NUMPY_IDS),
    "Megatron index": Reader("bytes", megatron_index, read_with_index),
}
