"""A job is cut into parts that cover its files once, whatever their number."""

from __future__ import annotations

import dataclasses

import pytest
from messages import refused

from titanlite.tools.prepare import job as module
from titanlite.tools.prepare.job import (
    ChatConfig,
    File,
    Job,
    Piece,
    job_hash,
    number_of_parts,
    read_job,
    write_job,
)

SIZES = {"a": 0, "b": 10, "c": 1000, "d": 3, "e": 999, "f": 50}


def job_of(parts: int, **settings: object) -> Job:
    kinds = {"c": "jsonl", "e": "text"}
    files = [
        File(f"/{n}", n, size, "", kinds.get(n, "parquet"), "", "hash") for n, size in SIZES.items()
    ]
    return Job("x", ("/",), tuple(files), "text", "", "", "", parts, **settings)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64, 5000])
def test_parts_cover_every_byte_once(monkeypatch, parts):
    monkeypatch.setattr(module, "CUT", 100)
    job, seen = job_of(parts), {name: [] for name in SIZES}
    for part in range(parts):
        for piece in job.pieces(part):
            seen[piece.file.relative].append((piece.begin, piece.end))
    for name, size in SIZES.items():
        ends = [0, *(end for _, end in seen[name])]
        assert [begin for begin, _ in seen[name]] == ends[:-1]
        assert ends[-1] == size
        assert len(seen[name]) <= 1 or size >= 100
    if parts == 7:
        assert len(seen["c"]) > 2


def test_documents_that_must_be_whole_are_not_cut(monkeypatch):
    monkeypatch.setattr(module, "CUT", 100)
    job = job_of(64, drop_duplicates=True)
    pieces = [piece for part in range(64) for piece in job.pieces(part)]
    assert sum(piece.file.relative == "e" for piece in pieces) == 1
    assert sum(piece.file.relative == "c" for piece in pieces) > 1


def test_ids_are_not_cut(monkeypatch):
    monkeypatch.setattr(module, "CUT", 100)
    files = tuple(File(f"/{kind}", kind, 1000, "", kind, "", "hash") for kind in module.IDS)
    job = dataclasses.replace(job_of(64), files=files)
    assert [piece for part in range(64) for piece in job.pieces(part)] == [
        Piece(file, 0, 1000) for file in files
    ]


def test_the_number_of_parts_depends_on_the_size():
    assert [number_of_parts(size) for size in (0, 1, 1 << 26, (1 << 26) + 1, 1 << 33, 1 << 50)] == [
        1,
        1,
        1,
        2,
        128,
        256,
    ]


def test_a_job_is_read_as_it_was_written(tmp_path):
    job = job_of(3, drop_duplicates=True)
    write_job(job, tmp_path)
    assert read_job(tmp_path) == job
    assert job_hash(read_job(tmp_path)) == job_hash(job)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"files": 5}', '{"files": [[1]]}', '{"unknown": 1}', "[" * 99999],
)
def test_a_damaged_job_is_refused(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    with refused(str(tmp_path), "damaged"):
        read_job(tmp_path)


def test_a_part_looks_only_at_its_own_files(monkeypatch):
    files = tuple(File(f"/{i}", str(i), 10, "", "text", "", "hash") for i in range(1000))
    job, looked = dataclasses.replace(job_of(100), files=files), []
    monkeypatch.setattr(Job, "_can_be_cut", lambda self, file: bool(looked.append(file)))
    assert sum(len(list(job.pieces(part))) for part in range(100)) == 1000
    assert len(looked) < 1200


def other(value: object) -> object:
    """Another value of the same type."""
    if isinstance(value, ChatConfig):
        return ChatConfig("x")
    return value + 1 if isinstance(value, int) else value + type(value)("x")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Job)])
def test_the_hash_of_a_job_depends_on_all_but_the_place_of_the_tokenizer(field):
    job = job_of(2)
    changed = dataclasses.replace(job, **{field: other(getattr(job, field))})
    assert (job_hash(changed) == job_hash(job)) == (field == "tokenizer")


@pytest.mark.parametrize("field", File._fields)
def test_the_hash_of_a_job_depends_on_all_of_a_file(field):
    job = job_of(2)
    file = job.files[3]._replace(**{field: other(getattr(job.files[3], field))})
    changed = dataclasses.replace(job, files=(*job.files[:3], file, *job.files[4:]))
    assert job_hash(changed) != job_hash(job)
