"""Rows of JSON lines, Parquet and data sets: each once, however a file is cut; bad ones with their
line.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fuzz_samples import json_lines, of_source
from messages import refused
from row_jobs import job_of, read

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare import compressed, rows
from titanlite.tools.prepare.documents import BadRow
from titanlite.tools.prepare.job import Piece
from titanlite.tools.prepare.rows import row_documents
from titanlite.tools.prepare.sources import HUB

TEXTS = [f"row {i} 한국어 {'x' * (i % 40)}" for i in range(200)]


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS))
    )
    return path


@pytest.mark.parametrize("ending", ["\n", ""])
def test_each_line_is_in_one_piece(lines, ending):
    lines.write_text(lines.read_text().removesuffix("\n") + ending)
    size = lines.stat().st_size
    expected = list(enumerate(TEXTS, 1))
    length = len(lines.read_bytes().splitlines(keepends=True)[0])
    for cuts in (
        [],
        [1],
        [length],
        [length - 1, length, length + 1],
        [size * i // 9 for i in range(1, 9)],
        [size - 1],
    ):
        assert read(job_of(lines, "jsonl"), cuts) == expected


def test_a_byte_order_mark_is_removed_at_the_start_only(lines):
    mark = "\ufeff"
    lines.write_text(
        f'{mark}{{"text": "{mark}one"}}\n{mark}{{"text": "two"}}\n{{"text": "three"}}\n'
    )
    for cuts in ([], [1], [30], [40]):
        first, second, third = read(job_of(lines, "jsonl"), cuts)
        assert (first, third) == ((1, f"{mark}one"), (3, "three"))
        assert "not JSON" in second[1]
    lines.write_bytes(gzip.compress(lines.read_bytes()))
    assert [
        line for line, text in read(job_of(lines, "jsonl", "gzip"), []) if "not JSON" in text
    ] == [2]


@pytest.mark.slow
@pytest.mark.parametrize("group", [7, 1000])
def test_each_row_group_is_in_one_piece(tmp_path, group):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(200), "text": TEXTS}), path, row_group_size=group)
    size = path.stat().st_size
    for cuts in ([], [1], [size // 2], [size * i // 9 for i in range(1, 9)]):
        assert read(job_of(path, "parquet"), cuts) == list(enumerate(TEXTS, 1))


def test_compressed_lines(lines):
    lines.write_bytes(gzip.compress(lines.read_bytes()))
    assert [text for _, text in read(job_of(lines, "jsonl", "gzip"), [])] == TEXTS
    lines.write_bytes(lines.read_bytes()[:-20])
    with refused(str(lines), "damaged gzip data"):
        read(job_of(lines, "jsonl", "gzip"), [])


COMPRESS = {"gzip": gzip.compress, "zstd": lambda data: zstandard.ZstdCompressor().compress(data)}


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(
    ("line", "number"), [(b"x" * (1 << 25) + b"\n", r"3"), (b"\n", r"\d{5,6}")]
)
def test_lines_that_expand_too_far_end_with_their_number(
    tmp_path, monkeypatch, compression, line, number
):
    """A line of any length, and lines without end."""
    monkeypatch.setattr(compressed, "FREE", 1 << 22)
    monkeypatch.setattr(rows, "MAX_DOCUMENT", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        COMPRESS[compression](b'{"text": "good"}\n' * 2 + line * ((1 << 26) // len(line)))
    )
    with pytest.raises(ConfigError, match=rf"{path}:{number}: expands to more than"):
        list(row_documents(job_of(path, "jsonl", compression), whole(path, compression)))


def test_many_short_lines_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "FREE", 1 << 19)
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"text": "yes"}\n' * 10_000))
    assert len(list(row_documents(job_of(path, "jsonl", "gzip"), whole(path, "gzip")))) == 10_000


@pytest.mark.parametrize("name", ["text", "meta.text"])
def test_the_pieces_of_a_large_row_group_do_not_matter(tmp_path, monkeypatch, name):
    """The group is charged with its own bytes, not with those of the piece in which it begins."""
    monkeypatch.setattr(compressed, "FREE", 1000)
    path = tmp_path / "a.parquet"
    texts = [f"{i * i * 7919} " * 20 for i in range(2000)]
    pq.write_table(pa.table({name: texts}), path, row_group_size=1000, compression="zstd")
    job = dataclasses.replace(job_of(path, "parquet"), field=name)
    size = path.stat().st_size
    for cuts in ([], [size * i // 300 for i in range(1, 300)]):
        assert read(job, cuts) == list(enumerate(texts, 1))


def whole(path: Path, compression: str) -> Piece:
    file = job_of(path, "jsonl", compression).files[0]
    return Piece(file, 0, file.size)


BAD = [
    ('{"text": "cut', "not JSON"),
    ("[1, 2]", "found list"),
    ('{"other": 1}', "no field 'text'"),
    ('{"text": 5}', "type int"),
    ('{"text": null}', "type NoneType"),
    ('{"text": "a\\u0000b"}', "NUL"),
    ('{"text": "\\ud800"}', "surrogates"),
    ("[" * 100_000, "not JSON"),
    ('{"n": ' + "9" * 5000 + "}", "no field 'text'"),
    ("\udcff", "not UTF-8"),
    ("x" * 3000, "more than 2000 bytes"),
]


@pytest.mark.parametrize(("bad", "problem"), BAD, ids=[problem for _, problem in BAD])
def test_bad_rows_have_their_line(tmp_path, monkeypatch, bad, problem):
    monkeypatch.setattr(rows, "MAX_DOCUMENT", 2000 if bad[0] == "x" else 1 << 20)
    path = tmp_path / "a.jsonl"
    good = '{"text": "good"}\n'
    path.write_bytes(f"{good}\n{good}{bad}\n{good}".encode("utf-8", "surrogateescape"))
    job = job_of(path, "jsonl")
    for cuts in ([], [20, 40]):
        found = read(job, cuts)
        assert [line for line, _ in found] == [1, 3, 4, 5]  # the second is blank
        assert [text for line, text in found if line != 4] == ["good"] * 3
        assert problem in found[2][1]


def test_the_row_after_a_line_of_the_largest_size_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    first, second = '{"text": "one"}', '{"text": "two"}'
    path.write_text(f"{first}\n{second}\n")
    job = job_of(path, "jsonl")
    monkeypatch.setattr(rows, "MAX_DOCUMENT", len(first))
    assert read(job, []) == [(1, "one"), (2, "two")]
    monkeypatch.setattr(rows, "MAX_DOCUMENT", len(first) - 1)
    assert [line for line, problem in read(job, []) if "a line of more than" in problem] == [1, 2]


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_a_row_of_any_kind_has_a_largest_size(tmp_path, monkeypatch, kind):
    """Text and prompt together, in bytes."""
    monkeypatch.setattr(rows, "MAX_DOCUMENT", 9)
    table = {"text": ["x" * 8, "x" * 8, "가나다", "가나다"], "prompt": ["p", "pp", "", "p"]}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(table), path)
    job = job_of(path, kind, prompt="prompt")
    piece = Piece(job.files[0], 0, job.files[0].size)
    if kind == "hf":
        data = pa.table(table).to_pylist()
        monkeypatch.setattr(rows, "open_hub", lambda spec: Shards(data))
        piece = Piece(job.files[0]._replace(path=f"{HUB}name#0"), 0, 1)
    found = list(row_documents(job, piece))
    assert [isinstance(row, BadRow) for row in found] == [False, True, False, True]
    assert all("10 bytes" in row.problem for row in found if isinstance(row, BadRow))


class Shards(list):
    """The rows of a data set, as the package `datasets` yields them."""

    num_shards = 1


def test_prompts(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "4", "prompt": "2 + 2 ="}\n{"text": "x", "prompt": null}\n{"text": '
        '"y"}\n{"text": "", "prompt": ""}\n'
    )
    job = job_of(path, "jsonl", prompt="prompt")
    first, second, third = row_documents(job, Piece(job.files[0], 0, job.files[0].size))
    assert (first.prompt, second.prompt) == ("2 + 2 =", "")
    assert "'prompt'" in third.problem


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"texts": ["a"]}, "did you mean texts"),
        ({"text": [1]}, "type int64"),
        ({"id": [1]}, "it has id"),
    ],
)
def test_columns_are_checked(tmp_path, table, problem):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with refused("a.parquet", "'text'", problem):
        read(job_of(tmp_path / "a.parquet", "parquet"), [])


DAMAGED = {
    "cut": lambda data: data[:-9],
    "a column's name that is not UTF-8": lambda data: data.replace(b"other", b"oth\xffr"),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS, "other": TEXTS}), path, store_schema=False)
    path.write_bytes(damage(path.read_bytes()))
    with refused(str(path), "Parquet"):
        read(job_of(path, "parquet"), [])


def test_null_and_bad_utf8_in_parquet(tmp_path):
    column = pa.Array.from_buffers(
        pa.string(),
        3,
        [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")],
    )
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.chunked_array([column, [None]])}), path)
    found = read(job_of(path, "parquet"), [])
    assert [line for line, _ in found] == [1, 2, 3, 4]
    assert [found[0][1], found[2][1]] == ["a", "b"]
    assert "UTF-8" in found[1][1]
    assert "NoneType" in found[3][1]


FUZZED = {
    "JSON lines": of_source(
        "text", "rows.jsonl", json_lines([{"text": f"row {i} é"} for i in range(30)])
    ),
}
