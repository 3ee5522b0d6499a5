"""The type of ids in a file: as a header states it, as the data shows it, or as the user says."""

from __future__ import annotations

import csv
import gzip
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from messages import refused
from preparing import TOKENIZER, ids_of, prepared, write_megatron

from titanlite.config.schema import DataConfig, SourceConfig
from titanlite.data.prepared_manifest import read_manifest
from titanlite.tools.cli.prepare_command import run
from titanlite.tools.prepare.cache import prepare
from titanlite.tools.prepare.token_layout import token_layout

RANDOM = np.random.default_rng(45)
LARGE = SimpleNamespace(size=151_936, path="qwen")  # more ids than 16 bits can be
MEDIUM = SimpleNamespace(size=50_257, path="gpt2")
TYPES = ("<u2", "<u4", "<i8")


def words(count: int, size: int) -> np.ndarray:
    """Ids as frequent as words: a few are most of a text."""
    return (RANDOM.zipf(1.2, count) - 1) % size


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (TOKENIZER, words(20_000, 4000)),
        (TOKENIZER, RANDOM.integers(0, 65, 1000)),  # characters: lower halves are small too
        (TOKENIZER, RANDOM.integers(0, 2, 1000)),
        (TOKENIZER, np.concatenate([words(99, 4000), np.zeros(200_000, int), words(99, 4000)])),
        (TOKENIZER, np.arange(286)),
        (TOKENIZER, RANDOM.integers(0, 4000, 45)),
        (MEDIUM, RANDOM.integers(0, 50_257, 3000)),
        (LARGE, words(20_000, 151_936)),
        (LARGE, RANDOM.integers(0, 151_936, 3000)),
    ],
)
def test_the_data_shows_the_type(tmp_path, tokenizer, ids, dtype):
    path = tmp_path / "ids.bin"
    ids.astype(dtype).tofile(path)
    if tokenizer is LARGE and dtype == "<u2":
        with refused(str(path), "16 bits", "151936", "--ids"):
            token_layout(str(path), path.stat().st_size, tokenizer)
        return
    layout = token_layout(str(path), path.stat().st_size, tokenizer)
    assert layout[:3] == (np.dtype(dtype), 0, len(ids))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(">u2", "big-endian"), (">u4", "big-endian"), (">i8", "big-endian"), ("u1", "8 bits")],
)
@pytest.mark.parametrize("count", [65, 120])
def test_ids_that_are_neither_wide_nor_little_endian_are_refused(tmp_path, dtype, expected, count):
    path = tmp_path / "ids.bin"
    RANDOM.integers(0, count, 3000).astype(dtype).tofile(path)
    with refused(str(path), expected, "--ids"):
        token_layout(str(path), path.stat().st_size, MEDIUM)


def test_64_bits_are_read_as_as_many_ids(tmp_path):
    ids = words(3000, 4000).tolist()
    torch.tensor(ids).numpy().tofile(tmp_path / "ids.bin")
    assert ids_of(prepared(tmp_path / "made", tmp_path / "ids.bin")) == ids


@pytest.mark.parametrize("dtype", TYPES[1:])
def test_an_id_beyond_the_vocabulary_does_not_change_the_type(tmp_path, dtype):
    ids = words(3000, 4000)
    ids[7] = 200_000
    ids.astype(dtype).tofile(tmp_path / "ids.bin")
    place = 7 * np.dtype(dtype).itemsize
    with refused(str(tmp_path / "ids.bin"), f"id 200000 at byte {place}"):
        run([str(tmp_path / "ids.bin"), "--out", str(tmp_path / "made")])


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [0] * 1000])
def test_a_file_that_can_be_of_two_types_needs_the_option(tmp_path, ids):
    path = tmp_path / "ids.bin"
    np.array(ids, "<u4").tofile(path)
    with refused(str(path), "--ids: one of uint16, uint32, int64"):
        run([str(path), "--out", str(tmp_path / "made")])
    section = DataConfig(path=str(path), cache=str(tmp_path / "cache"))
    with refused(str(path), "data.ids"):
        prepare(section, TOKENIZER, lambda text: None)
    section = DataConfig(sources=(SourceConfig(str(path), "mine"),), cache=str(tmp_path / "cache"))
    with refused(str(path), "data.sources: mine: ids"):
        prepare(section, TOKENIZER, lambda text: None)
    assert ids_of(prepared(tmp_path / "made", path, "--ids=uint32")) == ids
    halves = [half for i in ids for half in (i, 0)]
    made = {}
    for name, expected in {"uint32": ids, "uint16": halves}.items():
        named = DataConfig(path=str(path), ids=name, cache=str(tmp_path / "cache"))
        made[name] = prepare(named, TOKENIZER, lambda text: None)
        assert ids_of(made[name]) == expected
    assert made["uint32"] != made["uint16"]


def test_an_option_without_effect_or_against_the_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text\n" * 99)
    with refused("--ids", "no effect", "a.txt"):
        run([str(tmp_path / "a.txt"), "--ids=uint16", "--out", str(tmp_path / "made")])
    np.save(tmp_path / "ids.npy", np.arange(999))
    with refused("ids.npy", "int64", "--ids says uint16"):
        run([str(tmp_path / "ids.npy"), "--ids=uint16", "--out", str(tmp_path / "b")])


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", "<u4", "<i8", "u1"])
def test_arrays_of_numpy_are_read_by_their_header(tmp_path, dtype):
    ids = RANDOM.integers(0, 120, 999)
    np.save(tmp_path / "ids.npy", ids.astype(dtype))
    assert ids_of(prepared(tmp_path / "made", tmp_path / "ids.npy")) == ids.tolist()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((4, 8), "<u2"), "(4, 8)"),
        (np.zeros(9), "<f8"),
        (np.array([{}, {}]), "'|O'"),
        (np.int64(3), "()"),
    ],
)
def test_arrays_that_are_no_ids_are_refused(tmp_path, array, expected):
    np.save(tmp_path / "a.npy", array)
    with refused(str(tmp_path / "a.npy"), expected, "reshape(-1)"):
        token_layout(str(tmp_path / "a.npy"), (tmp_path / "a.npy").stat().st_size, TOKENIZER)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [(lambda data: data[:-2], "99 ids, but 98 follow"), (lambda data: data[:40], "header")],
)
def test_a_damaged_array_is_named(tmp_path, damage, expected):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(99, dtype="<u2"))
    path.write_bytes(damage(path.read_bytes()))
    with refused(str(path), expected):
        token_layout(str(path), path.stat().st_size, TOKENIZER)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_memory_maps_of_dolma_are_read(tmp_path, dtype):
    """As its MemmapWriter leaves them: ids without a header, and where each document is."""
    ids = np.array([*words(500, 4000), TOKENIZER.eos] * 3)
    (tmp_path / "set").mkdir()
    path = tmp_path / "set/part-0-00000.npy"
    mapped = np.memmap(path, dtype, "w+", shape=(len(ids),))
    mapped[:] = ids
    mapped.flush()
    with gzip.open(tmp_path / "set/part-0-00000.csv.gz", "wt") as file:
        csv.writer(file).writerows([[501 * i, 501 * (i + 1), i, "a.jsonl", i] for i in range(3)])
    made = prepared(tmp_path / "made", tmp_path / "set")
    assert sorted(ids_of(made)) == sorted(ids.tolist())
    assert sum(s["documents"] for s in read_manifest(made)["splits"].values()) == 3


@pytest.mark.parametrize(
    "name", ["my_text_document", "c4_text_sentence", "document-00000-of-00020"]
)
def test_a_file_of_megatron_without_its_index_is_refused(tmp_path, name):
    documents = [RANDOM.integers(0, 4000, 30).tolist() for _ in range(20)]
    write_megatron(tmp_path / name, documents)
    (tmp_path / f"{name}.idx").unlink()
    with refused(f"{name}.bin", f"{name}.idx", "--ids"):
        run([str(tmp_path / f"{name}.bin"), "--out", str(tmp_path / "made")])
    made = prepared(tmp_path / "made", tmp_path / f"{name}.bin", "--ids=uint16")
    assert ids_of(made) == sum(documents, [])


def test_a_file_without_documents_is_announced(tmp_path, capsys):
    RANDOM.integers(0, 4000, 600).astype("<i4").tofile(tmp_path / "ids.bin")
    prepared(tmp_path / "made", tmp_path / "ids.bin")
    assert "ids.bin: neither bos nor eos is among" in capsys.readouterr().err
