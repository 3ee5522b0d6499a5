"""Removal of equal documents: what counts as equal, what stays, and damaged files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from messages import refused
from row_jobs import job_of

from titanlite.tools.prepare.duplicates import (
    KEPT,
    RECORD,
    decide_duplicates,
    first_of_equal,
    hash_document,
    hashes_path,
    kept_documents,
)
from titanlite.tools.prepare.job import Job


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
    job = dataclasses.replace(job_of(tmp_path / "a.jsonl", "jsonl"), parts=3, drop_duplicates=True)
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
