"""A job: the decisions before the work, and parts that cover its files once, whatever their number."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
from messages import refused
from preparing import TOKENIZER, write_datatrove, write_megatron

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare import job as module
from titanlite.tools.prepare import plan_job as plan
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
from titanlite.tools.prepare.plan_job import check_unchanged, plan_job
from titanlite.tools.prepare.sources import Source, find

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


def planned(path: Path, drop_duplicates: bool = False, **source: str):
    where = Source(str(path), **source)
    return plan_job([(where, find(where))], TOKENIZER, drop_duplicates)


@pytest.fixture
def mixed(tmp_path) -> Path:
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"text {i}\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "row"}) + "\n")
    (tmp_path / "ids.bin").write_bytes(bytes(range(200)))
    return tmp_path


def test_each_file_has_its_kind_and_split(mixed):
    files = {file.relative: file for file in planned(mixed).files}
    assert files["rows.jsonl"][4:7] == ("jsonl", "", "hash")
    assert files["ids.bin"][4:7] == ("tokens", "", "tail")
    splits = [files[f"{i:02}.txt"].split for i in range(40)]
    assert set(splits) == {"train", "validation"}
    (single,) = planned(mixed / "00.txt").files
    assert single.split == "tail"


def test_validation_documents_of_their_own(mixed):
    files = planned(mixed, pattern="*.txt", validation=str(mixed / "rows.jsonl")).files
    assert [file.split for file in files] == ["train"] * 40 + ["validation"]


def test_an_empty_file_is_no_validation_set(tmp_path):
    names = [f"{i}.txt" for i in range(99) if plan.is_held_out(f"{i}.txt")][:2]
    for name, text in [("a.txt", "text"), (names[0], "")]:
        (tmp_path / name).write_text(text)
    assert not plan.is_held_out("a.txt")
    assert {file.split for file in planned(tmp_path).files} == {"tail"}
    (tmp_path / names[1]).write_text("text")
    assert {file.relative: file.split for file in planned(tmp_path).files} == {
        "a.txt": "train",
        **dict.fromkeys(names, "validation"),
    }


def test_a_file_is_given_once(mixed):
    where = Source(str(mixed / "00.txt"))
    with refused("data.path", "00.txt", "twice"):
        plan_job([(where, find(where))] * 2, TOKENIZER)
    with refused("validation = ", "00.txt", "data.path"):
        planned(mixed, pattern="*.txt", validation=str(mixed / "00.txt"))
    with refused("validation = 'absent'", "no such file"):
        planned(mixed, validation="absent")


def test_an_index_without_its_ids_is_named(tmp_path):
    write_megatron(tmp_path / "ids", [[1, 2], [3]])
    write_datatrove(tmp_path / "a.ds", [[1, 2], [3]])
    for name in ("ids.idx", "a.ds.index", "a.ds.metadata"):
        with refused(name, "give their file"):
            planned(tmp_path / name)


def test_a_folder_of_datatrove_is_its_token_files(tmp_path):
    for name in ("000_merged.ds", "001_merged.ds"):
        write_datatrove(tmp_path / name, [[1, 2], [3]])
    (tmp_path / "merged.ds.metadata").write_text("gpt2|2\n6\n6 T")  # of all files together
    files = planned(tmp_path).files
    assert [(file.relative, file.kind, file.split) for file in files] == [
        ("000_merged.ds", "datatrove", "hash"),
        ("001_merged.ds", "datatrove", "hash"),
    ]


@pytest.fixture
def inputs(tmp_path) -> Job:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("text")
    write_megatron(tmp_path / "in/ids", [[1, 2], [3]])
    write_datatrove(tmp_path / "in/b.ds", [[1, 2], [3]])
    return planned(tmp_path / "in")


def change_time(path: Path) -> None:
    os.utime(path, ns=(3, 3))


CHANGES = [change_time, lambda path: path.write_bytes(path.read_bytes() + b"x")]


@pytest.mark.parametrize("name", ["a.txt", "ids.bin", "ids.idx", "b.ds", "b.ds.index"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(tmp_path, inputs, name, change):
    check_unchanged(inputs.files)
    change(tmp_path / "in" / name)
    with refused(str(tmp_path / "in" / name.partition(".")[0]), "since the preparation began"):
        check_unchanged(inputs.files)


@pytest.mark.parametrize("name", ["ids.idx", "b.ds.index"])
def test_an_index_that_is_gone_is_a_change(tmp_path, inputs, name):
    (tmp_path / "in" / name).unlink()
    with refused(str(tmp_path / "in" / name.partition(".")[0]), "since the preparation began"):
        check_unchanged(inputs.files)


@pytest.mark.parametrize("name", ["a.txt", "ids.bin", "b.ds"])
def test_a_file_that_is_gone_is_named(tmp_path, inputs, name):
    (tmp_path / "in" / name).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "in" / name))):
        check_unchanged(inputs.files)


def test_all_problems_are_reported_up_to_ten(mixed):
    for i in range(12):
        (mixed / f"{i}.zip").write_bytes(b"PK\x03\x04")
    with refused("0.zip", "11.zip", "and 2 more"):
        planned(mixed)


def test_what_a_file_does_not_have_is_named(mixed):
    with refused("00.txt", "'question'"):
        planned(mixed / "00.txt", prompt_field="question")
    with refused("ids.bin", "--drop-duplicates"):
        planned(mixed, drop_duplicates=True)


def test_the_tokenizer_is_named_by_an_absolute_path(mixed, monkeypatch):
    (mixed / "ranks").write_bytes(TOKENIZER.path.read_bytes())
    monkeypatch.chdir(mixed)
    where = Source(str(mixed / "00.txt"))
    jobs = [plan_job([(where, find(where))], Tokenizer(path)) for path in ("", "ranks")]
    assert [job.tokenizer for job in jobs] == ["", str(mixed / "ranks")]
