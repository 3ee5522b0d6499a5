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


def layout_of(path, ids, tokenizer=TOKENIZER):
    ids.tofile(path)
    return token_layout(str(path), path.stat().st_size, tokenizer)


SMALL_IDS = [
    words(20_000, 4000),
    RANDOM.integers(0, 65, 1000),  # characters: lower halves are small too
    RANDOM.integers(0, 2, 1000),
    np.concatenate([words(99, 4000), np.zeros(200_000, int), words(99, 4000)]),
    np.arange(286),
    RANDOM.integers(0, 4000, 45),
    RANDOM.integers(0, 50_257, 3000),
]
LARGE_IDS = [words(20_000, 151_936), RANDOM.integers(0, 151_936, 3000)]


@pytest.mark.parametrize(
    ("tokenizer", "dtype", "ids"),
    [
        *((MEDIUM, "<u2", ids) for ids in SMALL_IDS),
        *((LARGE, "<u4", ids) for ids in LARGE_IDS),
        (MEDIUM, "<u2", np.array([7])),
    ],
)
def test_a_type_is_taken_if_the_bytes_can_be_of_no_other(tmp_path, tokenizer, dtype, ids):
    layout = layout_of(tmp_path / "ids.bin", ids.astype(dtype), tokenizer)
    assert layout[:3] == (np.dtype(dtype), 0, len(ids))


@pytest.mark.parametrize("dtype", TYPES[1:])
@pytest.mark.parametrize("ids", [*SMALL_IDS, np.array([7]), np.array([1, 200_000, 3, 4])])
def test_wide_ids_can_be_narrow_ones_with_a_0_after_each(tmp_path, dtype, ids):
    with refused("ids.bin", f"{np.dtype(dtype).name} ({len(ids):,} ids", "uint16 (", "--ids"):
        layout_of(tmp_path / "ids.bin", ids.astype(dtype), MEDIUM)


@pytest.mark.parametrize("ids", LARGE_IDS)
def test_a_large_vocabulary_excludes_16_bits(tmp_path, ids):
    with refused("ids.bin", f"uint32 ({2 * len(ids):,} ids", f"int64 ({len(ids):,} ids", "--ids"):
        layout_of(tmp_path / "ids.bin", ids.astype("<i8"), LARGE)
    with refused("ids.bin", "16 bits", "151936", "--ids"):
        layout_of(tmp_path / "ids.bin", ids.astype("<u2"), LARGE)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (">u2", "big-endian"),
        (">u4", "big-endian"),
        (">i8", "big-endian"),
        ("u1", "8 bits"),
        ("<f2", "float16"),
        ("<f4", "float32"),
        (">f4", "float32"),
        ("<f8", "float64"),
    ],
)
@pytest.mark.parametrize("count", [65, 120])
def test_numbers_that_are_no_ids_of_the_usual_order_are_named(tmp_path, dtype, expected, count):
    with refused("ids.bin", expected, "--ids"):
        layout_of(tmp_path / "ids.bin", RANDOM.integers(0, count, 3000).astype(dtype), MEDIUM)


def test_bytes_of_a_text_are_ids_of_8_bits(tmp_path):
    """Also those beyond 127, two of which are an id of GPT-2's vocabulary."""
    text = "\0".join(["Übermäßig große Wörter hören für gewöhnlich früher auf."] * 2000)
    with refused("ids.bin", "8 bits", "uint8"):
        layout_of(tmp_path / "ids.bin", np.frombuffer(text.encode(), "u1"), MEDIUM)
    ids = RANDOM.integers(0, 256, 3000)
    ids.astype("u1").tofile(tmp_path / "bytes.bin")
    assert (
        ids_of(prepared(tmp_path / "made", tmp_path / "bytes.bin", "--ids=uint8")) == ids.tolist()
    )


def test_64_bits_are_read_as_as_many_ids(tmp_path):
    ids = words(3000, 4000).tolist()
    torch.tensor(ids).numpy().tofile(tmp_path / "ids.bin")
    assert ids_of(prepared(tmp_path / "made", tmp_path / "ids.bin", "--ids=int64")) == ids


@pytest.mark.parametrize(("dtype", "named"), [("<u4", "uint16"), ("<i8", "uint32")])
def test_a_type_by_which_each_second_id_is_0_is_announced(tmp_path, capsys, dtype, named):
    words(3000, 4000).astype(dtype).tofile(tmp_path / "ids.bin")
    prepared(tmp_path / "made", tmp_path / "ids.bin", f"--ids={named}")
    assert f"as {named} each second id is 0, as in a file of" in capsys.readouterr().err
    words(3000, 4000).astype(named).tofile(tmp_path / "ids.bin")
    prepared(tmp_path / "right", tmp_path / "ids.bin", f"--ids={named}")
    assert "each second id" not in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "named"), [("<i4", "uint32"), ("<i8", "int64")])
@pytest.mark.parametrize("mark", [-1, -100])
@pytest.mark.parametrize("first", [0, 7])
def test_a_negative_number_is_named(tmp_path, dtype, named, mark, first):
    ids = words(3000, 4000)
    ids[first::10] = mark
    ids.astype(dtype).tofile(tmp_path / "ids.bin")
    place = first * np.dtype(dtype).itemsize
    with refused(str(mark), f"at byte {place}", "negative", "padding"):
        run([str(tmp_path / "ids.bin"), f"--ids={named}", "--out", str(tmp_path / "made")])


@pytest.mark.parametrize(
    ("ids", "named"),
    [([1, 2, 3, 4], "uint32"), ([0] * 1000, "uint32"), ([5, 0, 7, 0] * 99, "uint16")],
)
def test_a_file_that_can_be_of_two_types_needs_the_option(tmp_path, ids, named):
    path = tmp_path / "ids.bin"
    np.array(ids, named).tofile(path)
    with refused(str(path), "uint16 (", "uint32 (", "by --ids"):
        run([str(path), "--out", str(tmp_path / "made")])
    section = DataConfig(path=str(path), cache=str(tmp_path / "cache"))
    with refused(str(path), "data.ids"):
        prepare(section, TOKENIZER, lambda text: None)
    section = DataConfig(sources=(SourceConfig(str(path), "mine"),), cache=str(tmp_path / "cache"))
    with refused(str(path), "data.sources: mine: ids"):
        prepare(section, TOKENIZER, lambda text: None)
    assert ids_of(prepared(tmp_path / "made", path, f"--ids={named}")) == ids
    made = {}
    for name in ("uint32", "uint16"):
        section = DataConfig(path=str(path), ids=name, cache=str(tmp_path / "cache"))
        made[name] = prepare(section, TOKENIZER, lambda text: None)
        assert ids_of(made[name]) == np.array(ids, named).view(name).tolist()
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
    made = prepared(tmp_path / "made", tmp_path / "set", f"--ids={np.dtype(dtype).name}")
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
    RANDOM.integers(0, 4000, 600).astype("<u2").tofile(tmp_path / "ids.bin")
    prepared(tmp_path / "made", tmp_path / "ids.bin")
    assert "ids.bin: neither bos nor eos is among" in capsys.readouterr().err
