"""The reader of Parquet: small files that stand for gigabytes end at a limit, others are read
whatever their rows.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz_samples import Reader, read_source
from messages import refused
from preparing import TOKENIZER

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare import compressed, parquet_reader
from titanlite.tools.prepare.documents import BadRow, Document
from titanlite.tools.prepare.job import File, Job, Piece, write_job
from titanlite.tools.prepare.parquet_reader import UnreadableParquet, describe, read_rows, stop_idle
from titanlite.tools.prepare.plan_job import plan_job
from titanlite.tools.prepare.rows import row_documents
from titanlite.tools.prepare.sources import Source, find
from titanlite.tools.prepare.workers import run_parts

MB = 1 << 20
PLAIN = {"store_schema": False, "write_statistics": False}


@pytest.fixture(autouse=True)
def new_children():
    """Each test starts its own: a limit of CPU time is for a child's whole life."""
    stop_idle()
    yield
    stop_idle()


def dictionary(path: Path, value: str, count: int) -> Path:
    """A column with one value so many times, which is stored once."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))
    table = pa.table({"text": column})
    pq.write_table(
        table,
        path,
        compression="zstd",
        dictionary_pagesize_limit=1 << 30,
        row_group_size=count,
        **PLAIN,
    )
    return path


def documents(path: Path, prompt: str = "") -> list:
    file = File(str(path), path.name, path.stat().st_size, 0, "parquet", "", "hash")
    job = Job("x", ("/",), (file,), "text", prompt, "", "", 1)
    return list(row_documents(job, Piece(file, 0, file.size)))


@pytest.mark.slow
def test_few_bytes_that_are_two_gigabytes_of_rows(tmp_path):
    path = dictionary(tmp_path / "a.parquet", "x" * 8 * MB, 256)
    assert path.stat().st_size < 1000
    with refused(f"{path}: row 17: ", "expands to more than", "write Parquet as JSON lines"):
        documents(path)


@pytest.mark.slow
def test_few_bytes_that_are_millions_of_empty_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "FREE", 100_000 * compressed.ROW)
    path = dictionary(tmp_path / "a.parquet", "", 4_000_000)
    assert path.stat().st_size < 10_000
    with refused(str(path), "expands to more than"):
        documents(path)


@pytest.mark.slow
def test_a_page_that_does_not_fit_into_the_memory_allowed(tmp_path, monkeypatch):
    """Also of a row too long to be a document: it is never decoded whole."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": ["x" * 100 * MB]}),
        path,
        compression="zstd",
        use_dictionary=False,
        **PLAIN,
    )
    (found,) = documents(path)
    assert isinstance(found, BadRow)
    assert f"a text of {100 * MB} bytes" in found.problem
    monkeypatch.setattr(parquet_reader, "MEMORY", 80 * MB)
    with refused(f"{path}: row 1: ", "its size allows"):
        documents(path)


@pytest.mark.slow
def test_rows_that_fit_into_the_memory_one_at_a_time_are_all_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_reader, "MEMORY", 100 * MB)
    path = tmp_path / "a.parquet"
    values = ["short"] * 300 + ["x" * 8 * MB] * 30
    pq.write_table(
        pa.table({"text": values}), path, compression="zstd", use_dictionary=["text"], **PLAIN
    )
    assert path.stat().st_size < MB
    found = [values[0].decode() for values in read_rows(str(path), ["text"], [0], 1 << 26)]
    assert found == values


@pytest.mark.slow
def test_the_cpu_time_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_reader, "SECONDS", 0)
    path = dictionary(tmp_path / "a.parquet", "", 8_000_000)
    with pytest.raises(UnreadableParquet, match="more CPU time than its size allows"):
        for _ in read_rows(str(path), ["text"], [0], 1 << 26):
            pass


@pytest.mark.slow
def test_changed_bytes(tmp_path):
    """Each gives rows or one error, and no memory is allocated because of it."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"row {i}" for i in range(50)] + ["x" * 100] * 50}),
        path,
        compression="zstd",
    )
    data, rng = path.read_bytes(), random.Random(0)
    outcomes = set()
    for _ in range(20):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        path.write_bytes(changed)
        try:
            documents(path)
            outcomes.add("rows")
        except ConfigError as error:
            outcomes.add("error" if str(error).startswith(f"{path}:") else str(error))
    assert outcomes == {"rows", "error"}


def test_types_that_are_no_text_are_bad_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([["a"], None], pa.list_(pa.string()))}), path)
    first, second = documents(path)
    assert "of type list<" in first.problem
    assert "NoneType" in second.problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]
)
def test_all_kinds_of_text(tmp_path, kind):
    path = tmp_path / "a.parquet"
    values = ["one", "둘", "one", "three" * 1000]
    pq.write_table(
        pa.table({"text": pa.array(values).cast(kind), "prompt": ["p", None, "", "q"]}), path
    )
    found = documents(path, prompt="prompt")
    assert [(row.prompt, *row.blocks) for row in found if isinstance(row, Document)] == [
        ("p", "one"),
        ("", "둘"),
        ("", "one"),
        ("q", "three" * 1000),
    ]


@pytest.mark.slow
def test_two_files_are_read_at_a_time_and_children_are_used_again(tmp_path):
    paths = [tmp_path / f"{i}.parquet" for i in range(2)]
    for path in paths:
        pq.write_table(pa.table({"text": [f"{path.name} {i}" for i in range(600)]}), path)
    for _ in range(2):
        both = zip(*(read_rows(str(path), ["text"], [0], 100) for path in paths), strict=True)
        for i, found in enumerate(both):
            assert list(found) == [[f"{path.name} {i}".encode()] for path in paths]
            assert describe(str(paths[0]), []).rows == [600]
    assert len(parquet_reader.idle_children) == 3


def test_the_child_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one"]}), path)
    for name in ("json", "pyarrow", "numpy", "resource", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert describe(str(path), ["text"]).types == {"text": "string"}
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_the_limits_hold_for_each_worker(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "work").mkdir()
    # Longer than a document may be
    first = dictionary(tmp_path / "data/0.parquet", "x" * 65 * MB, 3)
    shutil.copy(first, tmp_path / "data/1.parquet")
    source = Source(str(tmp_path / "data"))
    job = dataclasses.replace(plan_job([(source, find(source))], TOKENIZER), parts=2)
    write_job(job, tmp_path / "work")
    with refused(".parquet: row 2: ", "expands to more than"):
        list(run_parts(job, tmp_path / "work", TOKENIZER, [0, 1], 2))


def parquet_files(folder: Path) -> list[bytes]:
    """Plain, dictionary-encoded and compressed columns; several row groups, and another column."""
    texts = [f"row {i % 7} é" for i in range(40)]
    table = pa.table({"text": texts, "other": list(range(40))})
    samples = []
    for options in ({"compression": "none"}, {"compression": "none", "use_dictionary": False}, {}):
        buffer = io.BytesIO()
        pq.write_table(table, buffer, row_group_size=20, **options)
        samples.append(buffer.getvalue())
    return samples


FUZZED = {
    "Parquet": Reader("bytes", parquet_files, functools.partial(read_source, "rows.parquet")),
}
