"""A job is cut into parts that cover its files once, whatever their number."""

from __future__ import annotations

import dataclasses
import json

import pytest
from messages import refused

from titanlite.tools.prepare import job as module
from titanlite.tools.prepare.job import (
    ChatConfig,
    File,
    Job,
    Piece,
    begin_job,
    differences,
    number_of_parts,
    read_job,
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
    begin_job(job, tmp_path)
    assert read_job(tmp_path) == job
    begin_job(job, tmp_path)
    with refused(str(tmp_path), "parts", "3", "4"):
        begin_job(dataclasses.replace(job, parts=4), tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"files": 5}', '{"files": [[1]]}', '{"unknown": 1}', "[" * 99999],
)
def test_a_damaged_job_is_refused(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    with refused(str(tmp_path), "damaged"):
        read_job(tmp_path)


def test_a_file_that_changed_is_named(tmp_path):
    job = job_of(2)
    begin_job(job, tmp_path)
    fields = json.loads((tmp_path / "job.json").read_text())
    fields["files"][1][2] += 1
    (tmp_path / "job.json").write_text(json.dumps(fields))
    with refused(str(tmp_path), "files"):
        begin_job(job, tmp_path)


def test_a_part_looks_only_at_its_own_files(monkeypatch):
    files = tuple(File(f"/{i}", str(i), 10, "", "text", "", "hash") for i in range(1000))
    job, looked = dataclasses.replace(job_of(100), files=files), []
    monkeypatch.setattr(Job, "_can_be_cut", lambda self, file: bool(looked.append(file)))
    assert sum(len(list(job.pieces(part))) for part in range(100)) == 1000
    assert len(looked) < 1200


def test_the_place_of_the_tokenizer_may_change(tmp_path):
    begin_job(dataclasses.replace(job_of(2), tokenizer="/one/file"), tmp_path)
    begin_job(dataclasses.replace(job_of(2), tokenizer="/two/file"), tmp_path)
    assert read_job(tmp_path).tokenizer == "/two/file"
    with refused("tokenizer_sha256"):
        begin_job(dataclasses.replace(job_of(2), tokenizer_sha256="0"), tmp_path)


def test_differences_are_named_as_the_command_line_names_them():
    job = job_of(2)
    changed = (
        *job.files[1:5],
        job.files[5]._replace(version="7"),
        job.files[5]._replace(path="/new"),
    )
    other = dataclasses.replace(job, drop_duplicates=True, files=changed)
    assert differences(job, job) == ""
    assert differences(job, other).split("; ") == [
        "files: /a is gone, /new is new, /f has changed",
        "--drop-duplicates: False, now True",
    ]
    assert (
        differences(job, dataclasses.replace(job, files=job.files[::-1]))
        == "files: in another order"
    )
    assert (
        differences(job, dataclasses.replace(job, prompt_field="q"))
        == "--prompt-field: '', now 'q'"
    )
    assert "--chat" in differences(job, dataclasses.replace(job, chat=ChatConfig("x")))
