"""A part is a function of the job and its number; what fails leaves no file behind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from messages import refused
from preparing import TOKENIZER, documents_of, prepared

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.prepare import text_files
from titanlite.tools.prepare.duplicates import DuplicateConfig
from titanlite.tools.prepare.job import File, Job, read_job, read_json
from titanlite.tools.prepare.part import record_path, run_part, tokenise_part, verdicts_path


def job_of(path: Path, kind: str, split: str, **settings: object) -> Job:
    file = File(str(path), path.name, path.stat().st_size, 0, kind, "", split)
    return Job("x", ("/",), (file,), "text", "", "", TOKENIZER.sha256, 1, **settings)


def record(job: Job, work: Path) -> dict:
    work.mkdir(exist_ok=True)
    tokenise_part(job, work, TOKENIZER, 0, lambda read: None)
    return read_json(record_path(work, 0))


def test_equal_rows_are_in_one_split(tmp_path):
    texts = [f"text {i % 50}" for i in range(500)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shards = record(job_of(path, "jsonl", "hash"), tmp_path / "work")["shards"]
    held_out = [
        i for i in range(50) if int(hashlib.sha256(f"text {i}".encode()).hexdigest(), 16) % 20 == 0
    ]
    assert shards["validation"]["documents"] == 10 * len(held_out) > 0
    assert shards["train"]["documents"] == 500 - 10 * len(held_out)


@pytest.mark.parametrize("remove", ["exact", "near"])
def test_equal_answers_to_different_prompts_all_stay(tmp_path, remove):
    rows = [
        ("Is 2 prime?", "Yes"),
        ("Is 3 prime?", "Yes"),
        ("Is 2 prime?", "Yes"),
        ("Is 2 prime?Y", "es"),
        ("", "Yes"),
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "text": t}) + "\n" for p, t in rows)
    )
    options = (
        "--prompt-field",
        "prompt",
        "--drop-duplicates",
        remove,
        "--validation",
        tmp_path / "b.jsonl",
    )
    (tmp_path / "b.jsonl").write_text('{"prompt": "Is 4 prime?", "text": "No"}\n')
    folder = prepared(tmp_path / "out", tmp_path / "a.jsonl", *options)
    assert documents_of(folder) == [
        "Is 2 prime?Yes",
        "Is 3 prime?Yes",
        "Is 2 prime?Yes",
        "Yes",
        "Is 4 prime?No",
    ]


def test_filters_measure_the_text_without_the_prompt(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "a long prompt", "text": "no"}\n{"prompt": "", "text": "enough"}\n'
    )
    folder = prepared(
        tmp_path / "out", tmp_path / "a.jsonl", "--prompt-field", "prompt", "--min-chars", 5
    )
    assert documents_of(folder) == ["enough"]


def test_the_fingerprint_is_that_of_the_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    found = record(job_of(path, "text", "train"), tmp_path / "work")
    expected = hashlib.sha256(TOKENIZER.sha256.encode() + b"a.txt train 8\none\ntwo\n").hexdigest()
    assert found["fingerprint"] == expected  # checkpoints of earlier versions contain it
    path.write_text("one\nTwo\n")
    assert record(job_of(path, "text", "train"), tmp_path / "work")["fingerprint"] != expected


def test_what_fails_leaves_nothing(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\x05\x00" * 100 + b"\xff\xff")
    with refused("id 65535 at byte 200"):
        record(job_of(path, "tokens", "hash"), tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("field", ["tokenizer_sha256"])
def test_another_tokenizer_is_refused(tmp_path, field):
    import dataclasses

    path = tmp_path / "a.txt"
    path.write_text("one\n")
    with refused("SHA-256", "00000000"):
        record(
            dataclasses.replace(job_of(path, "text", "train"), **{field: "0" * 64}),
            tmp_path / "work",
        )


@pytest.mark.parametrize("verdicts", [b"", b"\1\1"])
def test_another_number_of_rows_in_the_second_pass_is_an_error(tmp_path, verdicts):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}) + "\n")
    job = job_of(path, "jsonl", "hash", duplicates=DuplicateConfig("exact"))
    (tmp_path / "work").mkdir()
    verdicts_path(tmp_path / "work", 0, final=True).write_bytes(verdicts)
    with refused(str(path), "another number of documents"):
        record(job, tmp_path / "work")
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["kept-00000.bin"]


def test_a_part_begins_with_a_look_at_its_files(tmp_path):
    """Between the two passes, two rows change places: neither the number of documents nor the size
    differs.
    """
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(
            f'{{"text": "one {name}"}}\n{{"text": "two {name}"}}\n'
        )
    command = ["prepare", str(tmp_path), "--pattern=*.jsonl", "--drop-duplicates=exact"]
    target = ["--out", str(tmp_path.with_name("out"))]
    for step in ("--part=1/2", "--part=2/2"):
        assert main([*command, *target, step]) == 0
    assert main(["prepare", "--merge", target[1]]) == 0
    (tmp_path / "b.jsonl").write_text('{"text": "two b"}\n{"text": "one b"}\n')
    work = tmp_path.with_name(".out.parts")
    job = read_job(work)
    run_part(job, work, TOKENIZER, 0, lambda read: None)
    with refused(f"{tmp_path}/b.jsonl: has changed since the preparation began"):
        run_part(job, work, TOKENIZER, 1, lambda read: None)
    assert record_path(work, 0).exists()
    assert not record_path(work, 1).exists()


def test_the_sizes_of_tokens_are_looked_up_once_for_a_part(tmp_path):
    """Not for each document: with a vocabulary of 128,000 ids it would take most of the time."""

    class Counted(Tokenizer):
        reads = 0

        @property
        def token_bytes(self) -> list[int]:
            self.reads += 1
            return self._token_bytes

        @token_bytes.setter
        def token_bytes(self, values: list[int]) -> None:
            self._token_bytes = values

    tokenizer = Counted()
    ids = [
        i
        for document in range(30)
        for i in (*tokenizer.encode(f"document {document}"), tokenizer.eos)
    ]
    path = tmp_path / "a.bin"
    np.array(ids, "<u2").tofile(path)
    (tmp_path / "work").mkdir()
    tokenise_part(
        job_of(path, "tokens", "train"), tmp_path / "work", tokenizer, 0, lambda read: None
    )
    found = read_json(record_path(tmp_path / "work", 0))
    assert found["shards"]["train"]["documents"] == 30
    assert found["text_bytes"]["train"] == sum(
        len(f"document {document}") for document in range(30)
    )
    assert tokenizer.reads == 1


def test_the_progress_moves_within_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK", 1000)
    path = tmp_path / "a.txt"
    path.write_text("a line\n" * 2000)
    (tmp_path / "work").mkdir()
    reads: list[int] = []
    tokenise_part(job_of(path, "text", "tail"), tmp_path / "work", TOKENIZER, 0, reads.append)
    assert sum(reads) == 14_000
    assert 0 <= min(reads) <= max(reads) < 2000
