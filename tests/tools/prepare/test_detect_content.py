"""What a file contains is found in its bytes; its name is a hint at most."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch
import zstandard
from messages import refused

from titanlite.tools.prepare.detect_content import detect
from titanlite.tools.prepare.sources import Source

ROWS = b'{"text": "one"}\n{"text": "two"}\n'
CODE = b"def f():\n    return {}\n"
IDS = np.arange(3000, dtype="<u2").tobytes()
SOURCE = Source("x")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", CODE, "text"),
        ("a.bin", CODE, "text"),
        ("a.txt", ROWS, "jsonl"),
        ("a", ROWS + b'{"text": "three', "jsonl"),
        ("a", b'{"text": "' + b"long " * 2000 + b'"}\n' + ROWS, "jsonl"),
        ("a", b'{"text": "one line"}', "jsonl"),
        ("a", b'\xef\xbb\xbf{"text": "' + b"long " * 2000 + b'"}\n' + ROWS, "jsonl"),
        ("a.jsonl", b"\n{broken\n" + ROWS, "jsonl"),
        ("c4-train.json", b"{broken\n" + ROWS + b"[1]\n", "jsonl"),
        ("examples.txt", b"Two rows:\n" + ROWS + b"and\nthree\nlines.\n", "text"),
        ("package.json", json.dumps({"name": "x", "list": [1]}, indent=1).encode(), "text"),
        ("config.json", b'{"name":"x"}', "text"),
        ("a.txt", b"[section]\nkey = 1\n", "text"),
        ("README.md", b'[![CI](https://x)](y)\n\n```json\n{"text": "one"}\n```\n', "text"),
        ("config.toml", b'[data]\nfield = "text"\n[[data.phases]]\nweights = { en = 1 }\n', "text"),
        ("a.txt", ("é" * 3000).encode(), "text"),
        ("train.bin", IDS, "tokens"),
        ("a.npk", np.array([20240520, 1, 3], "<i4").tobytes() + bytes(1012) + b"123456", "tokens"),
        ("ids.npy", IDS, "tokens"),
        ("a.npy", b"\x93NUMPY...", "tokens"),
        ("a", b"PAR1....", "parquet"),
    ],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_contents_decide(tmp_path, name, content, expected, compress):
    path = tmp_path / name
    path.write_bytes(compress(content))
    if expected == "parquet" and compress is not bytes:
        with refused(str(path), "Parquet"):
            detect(path, SOURCE)
        return
    kind, compression = detect(path, SOURCE)
    assert kind == expected
    assert (compression == "") == (compress is bytes)


@pytest.mark.parametrize("name", ["train.bin", "part-0.npy"])
@pytest.mark.parametrize("first", [640, 1152, 35615, 65534, 65279, int.from_bytes(b"BZ", "little")])
def test_a_file_of_ids_may_begin_with_any_id(tmp_path, name, first):
    """The bytes of these ids begin files of other formats: pickle, gzip, UTF-16, bzip2."""
    path = tmp_path / name
    path.write_bytes(
        np.array([first, int.from_bytes(b"h\0", "little"), *range(3000)], "<u2").tobytes()
    )
    assert detect(path, SOURCE) == ("tokens", "")


def test_a_chunk_of_litdata_is_not_read_with_its_header(tmp_path):
    path = tmp_path / "chunk-0-1.bin"
    path.write_bytes(IDS)
    with refused(str(path), "litdata", "numpy.save", "data.ids"):
        detect(path, SOURCE)
    assert detect(path, Source("x", ids="uint16")) == ("tokens", "")


def test_an_arrow_stream_is_not_an_id_of_minus_one(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": ["a", "b"]})
    with arrow.ipc.new_stream(tmp_path / "a.bin", table.schema) as stream:
        stream.write_table(table)
    with refused(str(tmp_path / "a.bin"), "Arrow stream", "hf:FOLDER"):
        detect(tmp_path / "a.bin", SOURCE)
    np.array([-1, *range(3000)], "<i4").tofile(tmp_path / "a.bin")
    assert detect(tmp_path / "a.bin", SOURCE) == ("tokens", "")


def test_a_tensor_that_torch_saved_is_named(tmp_path):
    torch.save(torch.arange(99), tmp_path / "ids.bin")
    with refused(str(tmp_path / "ids.bin"), "torch.save", "numpy.save"):
        detect(tmp_path / "ids.bin", SOURCE)


def test_megatron_files_belong_together(tmp_path):
    (tmp_path / "a.bin").write_bytes(IDS)
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + bytes(25))
    assert detect(tmp_path / "a.bin", SOURCE) == ("megatron", "")
    assert detect(tmp_path / "a.idx", SOURCE) == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"abc\0def", "NUL"),
        ("a.txt", b"caf\xe9 au lait", "UTF-8"),
        ("a.txt", "text".encode("utf-16"), "UTF-16"),
        ("a.zip", b"PK\x03\x04...", "zip"),
        ("a.bin", b"PK\x03\x04...", "zip"),
        ("a.bin", b"LITPKDS" + bytes(30), "tail -c +25"),
        ("a.bin", b"GGUF\x03\0\0\0", "GGUF"),
        ("a.bin", np.array([20240326, 3, 1024, *[0] * 300], "<i4").tobytes(), "weights of llm.c"),
        ("a.pkl", b"\x80\x04...", "pickle"),
        ("a.arrow", b"ARROW1..", "hf:FOLDER"),
        ("a.json", b'[{"text": "one"}, {"text": "two"}]', "JSON array"),
        ("a.json", b'[\n {"text": "one"},\n {"text": "two"}\n]\n', "JSON array"),
        ("a.jsonl", b"one\ntwo\n", "none of its first 2 lines"),
        ("a.jsonl", b'{"content": "one"}\n', "it has content"),
        ("a.jsonl", b'{"texts": "one"}\n', "did you mean texts"),
        ("a.gz", gzip.compress(ROWS * 99, mtime=0)[:20], "damaged"),
        ("a.zst", zstandard.ZstdCompressor().compress(ROWS * 99)[:20], "damaged"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with refused(str(tmp_path / name), expected):
        detect(tmp_path / name, SOURCE)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.ds", "datatrove"),
        ("a.ds.index", ""),
        ("a.ds.metadata", ""),
        ("a.ds.loss", ""),
        ("a.index", "text"),
    ],
)
def test_files_of_datatrove_are_known_by_their_names(tmp_path, name, kind):
    (tmp_path / name).write_bytes(CODE)
    assert detect(tmp_path / name, SOURCE) == (kind, "")
