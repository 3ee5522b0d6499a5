"""A part is a function of the job and its number, its shards complete or absent; equal documents are
removed, and what fails leaves no file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from messages import refused
from preparing import TOKENIZER, documents_of, prepared, write_datatrove
from row_jobs import job_of as job_of_rows

from titanlite.data.prepared_manifest import token_dtype
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.duplicates import (
    KEPT,
    RECORD,
    decide_duplicates,
    first_of_equal,
    hash_document,
    hashes_path,
    kept_documents,
)
from titanlite.tools.prepare.job import File, Job
from titanlite.tools.prepare.part import record_path, tokenise_part
from titanlite.tools.prepare.shard_writer import ShardWriter


def job_of(path: Path, kind: str, split: str, **settings: object) -> Job:
    file = File(str(path), path.name, path.stat().st_size, "", kind, "", split)
    return Job("x", ("/",), (file,), "text", "", "", TOKENIZER.sha256, 1, **settings)


def record(job: Job, work: Path) -> dict:
    work.mkdir(exist_ok=True)
    tokenise_part(job, work, TOKENIZER, 0)
    return json.loads(record_path(work, 0).read_text())


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


def test_equal_answers_to_different_prompts_all_stay(tmp_path):
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


def test_the_fingerprint_is_that_of_the_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    found = record(job_of(path, "text", "train"), tmp_path / "work")
    expected = hashlib.sha256(TOKENIZER.sha256.encode() + b"a.txt train 8\none\ntwo\n").hexdigest()
    assert found["fingerprint"] == expected  # checkpoints contain it
    path.write_text("one\nTwo\n")
    assert record(job_of(path, "text", "train"), tmp_path / "work")["fingerprint"] != expected


def test_what_fails_leaves_nothing(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\x05\x00" * 100 + b"\xff\xff")
    with refused("id 65535 at byte 200"):
        record(job_of(path, "tokens", "hash"), tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())


def test_another_tokenizer_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    job = dataclasses.replace(job_of(path, "text", "train"), tokenizer_sha256="0" * 64)
    with refused("SHA-256", "00000000"):
        record(job, tmp_path / "work")


@pytest.mark.parametrize("hashed", [[], ["one", "two"]])
def test_another_number_of_rows_in_the_second_pass_is_an_error(tmp_path, hashed):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}) + "\n")
    job = job_of(path, "jsonl", "hash", drop_duplicates=True)
    work = tmp_path / "work"
    work.mkdir()
    records = b"".join(hash_document(text) + b"\0" for text in hashed)
    hashes_path(work, 0).write_bytes(records)
    decide_duplicates(job, work, lambda text: None)
    with refused(str(path), "another number of documents"):
        record(job, work)
    assert {file.name for file in work.iterdir()} == {hashes_path(work, 0).name, KEPT}


def test_ids_of_datatrove_are_enclosed_once(tmp_path):
    documents = [[5, 6], [TOKENIZER.bos, 7, TOKENIZER.eos], [8, TOKENIZER.eos], [TOKENIZER.eos]]
    write_datatrove(tmp_path / "a.ds", documents)
    record(job_of(tmp_path / "a.ds", "datatrove", "train"), tmp_path / "work")
    ids = np.fromfile(tmp_path / "work/train-00000.bin", "<u2").tolist()
    starts = np.fromfile(tmp_path / "work/train-00000.starts.bin", "<u8").tolist()
    bos, eos = TOKENIZER.bos, TOKENIZER.eos
    assert ids == [bos, 5, 6, eos, bos, 7, eos, bos, 8, eos]
    assert starts == [0, 4, 7]


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
    tokenise_part(job_of(path, "tokens", "train"), tmp_path / "work", tokenizer, 0)
    found = json.loads(record_path(tmp_path / "work", 0).read_text())
    assert found["shards"]["train"]["documents"] == 30
    assert found["text_bytes"]["train"] == sum(
        len(f"document {document}") for document in range(30)
    )
    assert tokenizer.reads == 1


def test_the_entry_describes_the_files(tmp_path):
    writer = ShardWriter(tmp_path, "train", 3, token_dtype(100), masked=True)
    for count in (3, 10):
        writer.begin_document()
        writer.write([1], targets=False)
        writer.write(list(range(count)))
    assert not list(tmp_path.glob("*.bin"))
    entry = writer.finish()
    assert (entry["tokens"], entry["documents"]) == (15, 2)
    for part in (entry, entry["starts"], entry["mask"]):
        assert part["sha256"] == hashlib.sha256((tmp_path / part["file"]).read_bytes()).hexdigest()
    assert np.fromfile(tmp_path / "train-00003.starts.bin", "<u8").tolist() == [0, 4]
    mask = np.unpackbits(np.fromfile(tmp_path / "train-00003.mask.bin", np.uint8), count=15)
    assert mask.tolist() == [0, 1, 1, 1, 0] + [1] * 10


def test_what_is_discarded_leaves_nothing(tmp_path):
    writer = ShardWriter(tmp_path, "train", 0, token_dtype(100), masked=True)
    writer.write([1, 2, 3])
    writer.discard()
    assert not list(tmp_path.iterdir())


def records(texts: list[str], held_out: set[int] = frozenset()) -> np.ndarray:
    data = b"".join(hash_document(text) + bytes([i in held_out]) for i, text in enumerate(texts))
    return np.frombuffer(data, RECORD)


def test_the_first_of_equal_documents_stays():
    texts = ["b", "a", "b", "c", "a ", "b\r\n", "d"]
    assert first_of_equal(records(texts)).tolist() == [True, True, False, True, False, False, True]
    assert first_of_equal(records([])).tolist() == []


def test_a_document_of_the_validation_source_stays_before_others():
    texts = ["a", "b", "a", "a", "b"]
    assert first_of_equal(records(texts, {2, 3})).tolist() == [False, True, True, False, False]


def test_what_counts_as_equal():
    assert hash_document("caf\u00e9\r\nx ") == hash_document(" cafe\u0301\nx")
    assert hash_document("a b") != hash_document("a  b")
    assert hash_document("A") != hash_document("a")
    assert hash_document("yes", "is it?") != hash_document("yes")
    assert hash_document("es", "is it?y") != hash_document("yes", "is it?")


@pytest.fixture
def job(tmp_path) -> Job:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    job = dataclasses.replace(
        job_of_rows(tmp_path / "a.jsonl", "jsonl"), parts=3, drop_duplicates=True
    )
    (tmp_path / "work").mkdir()
    for part, texts in enumerate((["a", "b"], [], ["b", "c", "a"])):
        hashes_path(tmp_path / "work", part).write_bytes(records(texts).tobytes())
    return job


def test_documents_of_all_parts_are_compared(tmp_path, job):
    log = []
    decide_duplicates(job, tmp_path / "work", log.append)
    stays = [kept_documents(job, tmp_path / "work", part).tolist() for part in range(3)]
    assert stays == [[True, True], [], [False, True, False]]
    assert log == ["duplicates: 2 of 5 documents"]


@pytest.mark.parametrize("name", ["hashes-00002.bin", KEPT])
def test_a_damaged_file_is_refused(tmp_path, job, name):
    work: Path = tmp_path / "work"
    decide_duplicates(job, work, lambda text: None)
    (work / name).write_bytes((work / name).read_bytes()[:-1])
    with refused(str(work / name), "delete the folder"):
        kept_documents(job, work, 2)
