"""The decisions before the work: kinds, held-out documents, and files that fit no reader."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from messages import refused
from preparing import TOKENIZER, write_megatron

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare import plan_job as plan
from titanlite.tools.prepare.filters import FilterConfig
from titanlite.tools.prepare.job import differences
from titanlite.tools.prepare.plan_job import Settings, plan_job
from titanlite.tools.prepare.sources import Source, find


def job_of(path: Path, begun=None, settings: Settings = Settings(), **source: str):  # noqa: B008
    where = Source(str(path), **source)
    return plan_job([(where, find(where))], TOKENIZER, settings, begun)


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
        plan_job([(where, find(where))] * 2, TOKENIZER, Settings())
    with refused("validation = ", "00.txt", "data.path"):
        job_of(mixed, pattern="*.txt", validation=str(mixed / "00.txt"))
    with refused("validation = 'absent'", "no such file"):
        job_of(mixed, validation="absent")


def test_an_index_without_its_ids_is_named(tmp_path):
    write_megatron(tmp_path / "ids", [[1, 2], [3]])
    with refused("ids.idx", "give", str(tmp_path / "ids.bin")):
        job_of(tmp_path / "ids.idx")
    (tmp_path / "ids.bin").unlink()
    with refused("ids.idx", "without its .bin"):
        job_of(tmp_path / "ids.idx")


def test_files_that_have_not_changed_are_not_looked_into_again(mixed, monkeypatch):
    begun, opened = job_of(mixed), []
    monkeypatch.setattr(
        plan, "detect", lambda path, source: opened.append(path.name) or ("text", "")
    )
    assert job_of(mixed, begun) == begun
    (mixed / "03.txt").write_text("other text\n")
    assert job_of(mixed, begun) != begun
    assert opened == ["03.txt"]


def test_an_index_beside_unchanged_ids_is_noticed(tmp_path):
    write_megatron(tmp_path / "ids", [[1, 2, 3], [4]])
    index, begun = tmp_path / "ids.idx", job_of(tmp_path / "ids.bin")
    assert [file.kind for file in begun.files] == ["megatron"]
    assert job_of(tmp_path / "ids.bin", begun) == begun
    os.utime(index, ns=(5, 5))
    assert differences(begun, job_of(tmp_path / "ids.bin", begun)) == f"files: {index} has changed"
    index.unlink()
    without = job_of(tmp_path / "ids.bin", begun)
    assert [file.kind for file in without.files] == ["tokens"]
    write_megatron(tmp_path / "ids", [[1, 2, 3], [4]])
    os.utime(tmp_path / "ids.bin", ns=(begun.files[0].mtime_ns,) * 2)
    assert [file.kind for file in job_of(tmp_path / "ids.bin", without).files] == ["megatron"]


def test_all_problems_are_reported_up_to_ten(mixed):
    for i in range(12):
        (mixed / f"{i}.zip").write_bytes(b"PK\x03\x04")
    with refused("0.zip", "11.zip", "and 2 more"):
        job_of(mixed)


def test_what_a_file_does_not_have_is_named(mixed):
    with refused("00.txt", "'question'"):
        job_of(mixed / "00.txt", prompt_field="question")
    with refused("ids.bin", "filtered"):
        job_of(mixed, settings=Settings(filters=FilterConfig(min_chars=3)))
    assert dataclasses.replace(job_of(mixed), parts=9).parts == 9


def test_the_tokenizer_is_named_by_an_absolute_path(mixed, monkeypatch):
    (mixed / "ranks").write_bytes(TOKENIZER.path.read_bytes())
    monkeypatch.chdir(mixed)
    where = Source(str(mixed / "00.txt"))
    jobs = [plan_job([(where, find(where))], Tokenizer(path), Settings()) for path in ("", "ranks")]
    assert [job.tokenizer for job in jobs] == ["", str(mixed / "ranks")]
