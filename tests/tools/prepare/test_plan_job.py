"""The decisions before the work: kinds, held-out documents, and files that fit no reader."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from messages import refused
from preparing import TOKENIZER, write_datatrove, write_megatron

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare import plan_job as plan
from titanlite.tools.prepare.job import Job
from titanlite.tools.prepare.plan_job import check_unchanged, plan_job
from titanlite.tools.prepare.sources import Source, find


def job_of(path: Path, drop_duplicates: bool = False, **source: str):
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
    files = {file.relative: file for file in job_of(mixed).files}
    assert files["rows.jsonl"][4:7] == ("jsonl", "", "hash")
    assert files["ids.bin"][4:7] == ("tokens", "", "tail")
    splits = [files[f"{i:02}.txt"].split for i in range(40)]
    assert set(splits) == {"train", "validation"}
    (single,) = job_of(mixed / "00.txt").files
    assert single.split == "tail"


def test_validation_documents_of_their_own(mixed):
    files = job_of(mixed, pattern="*.txt", validation=str(mixed / "rows.jsonl")).files
    assert [file.split for file in files] == ["train"] * 40 + ["validation"]


def test_an_empty_file_is_no_validation_set(tmp_path):
    names = [f"{i}.txt" for i in range(99) if plan.is_held_out(f"{i}.txt")][:2]
    for name, text in [("a.txt", "text"), (names[0], "")]:
        (tmp_path / name).write_text(text)
    assert not plan.is_held_out("a.txt")
    assert {file.split for file in job_of(tmp_path).files} == {"tail"}
    (tmp_path / names[1]).write_text("text")
    assert {file.relative: file.split for file in job_of(tmp_path).files} == {
        "a.txt": "train",
        **dict.fromkeys(names, "validation"),
    }


def test_a_file_is_given_once(mixed):
    where = Source(str(mixed / "00.txt"))
    with refused("data.path", "00.txt", "twice"):
        plan_job([(where, find(where))] * 2, TOKENIZER)
    with refused("validation = ", "00.txt", "data.path"):
        job_of(mixed, pattern="*.txt", validation=str(mixed / "00.txt"))
    with refused("validation = 'absent'", "no such file"):
        job_of(mixed, validation="absent")


def test_an_index_without_its_ids_is_named(tmp_path):
    write_megatron(tmp_path / "ids", [[1, 2], [3]])
    write_datatrove(tmp_path / "a.ds", [[1, 2], [3]])
    for name in ("ids.idx", "a.ds.index", "a.ds.metadata"):
        with refused(name, "give their file"):
            job_of(tmp_path / name)


def test_a_folder_of_datatrove_is_its_token_files(tmp_path):
    for name in ("000_merged.ds", "001_merged.ds"):
        write_datatrove(tmp_path / name, [[1, 2], [3]])
    (tmp_path / "merged.ds.metadata").write_text("gpt2|2\n6\n6 T")  # of all files together
    files = job_of(tmp_path).files
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
    return job_of(tmp_path / "in")


def change_time(path: Path) -> None:
    os.utime(path, ns=(3, 3))


CHANGES = [change_time, Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b"x")]


@pytest.mark.parametrize("name", ["a.txt", "ids.bin", "ids.idx", "b.ds", "b.ds.index"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(tmp_path, inputs, name, change):
    check_unchanged(inputs.files)
    change(tmp_path / "in" / name)
    with refused(str(tmp_path / "in" / name.partition(".")[0]), "since the preparation began"):
        check_unchanged(inputs.files)


def test_all_problems_are_reported_up_to_ten(mixed):
    for i in range(12):
        (mixed / f"{i}.zip").write_bytes(b"PK\x03\x04")
    with refused("0.zip", "11.zip", "and 2 more"):
        job_of(mixed)


def test_what_a_file_does_not_have_is_named(mixed):
    with refused("00.txt", "'question'"):
        job_of(mixed / "00.txt", prompt_field="question")
    with refused("ids.bin", "--drop-duplicates"):
        job_of(mixed, drop_duplicates=True)


def test_the_tokenizer_is_named_by_an_absolute_path(mixed, monkeypatch):
    (mixed / "ranks").write_bytes(TOKENIZER.path.read_bytes())
    monkeypatch.chdir(mixed)
    where = Source(str(mixed / "00.txt"))
    jobs = [plan_job([(where, find(where))], Tokenizer(path)) for path in ("", "ranks")]
    assert [job.tokenizer for job in jobs] == ["", str(mixed / "ranks")]
