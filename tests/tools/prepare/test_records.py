"""Records of parts, and the job: what was not written by a preparation is one error that names the
file.
"""

from __future__ import annotations

import json

import pytest
from messages import refused

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.build import begin, working_folder
from titanlite.tools.prepare.duplicates import DuplicateConfig
from titanlite.tools.prepare.filters import FilterConfig
from titanlite.tools.prepare.job import read_job
from titanlite.tools.prepare.merge import decide_duplicates, merge
from titanlite.tools.prepare.part import run_part, verdicts_path
from titanlite.tools.prepare.plan_job import Settings
from titanlite.tools.prepare.records import read_record, record_path
from titanlite.tools.prepare.sources import Source, find

TOKENIZER = Tokenizer()
SETTINGS = Settings(1, FilterConfig(min_chars=3), DuplicateConfig("exact"))


@pytest.fixture
def work(tmp_path):
    """The working folder of a preparation with one part, which is complete."""
    rows = [{"text": "one text"}, {"text": "one text"}, {"text": "x"}, {"text": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(str(tmp_path / "rows.jsonl"))
    job, work = (
        begin([(source, find(source))], TOKENIZER, tmp_path / "out", SETTINGS),
        working_folder(tmp_path / "out"),
    )
    run_part(job, work, TOKENIZER, 0, lambda count: None)
    decide_duplicates(job, work, lambda text: None)
    run_part(job, work, TOKENIZER, 0, lambda count: None)
    return work


def changed(path, *keys, to):
    """Puts another value at this place of a JSON file."""
    content = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    path.write_text(json.dumps(content))


def test_a_record_is_read_as_it_was_written(work):
    record = read_record(read_job(work), work, 0)
    assert (record.rows, record.bad, len(record.examples)) == (4, 1, 1)
    assert {rule: dropped.documents for rule, dropped in record.report.rules.items()} == {
        "min_chars": 1,
        "duplicate": 1,
    }
    assert read_record(read_job(work), work, 0, read=True).shards == {}


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["rows"], "4"),
        (["examples"], {}),
        (["examples", 0, "file"], "/other"),
        (["examples", 0, "begin"], 1 << 40),
        (["examples", 0, "row"], None),
        (["report"], []),
        (["report", "rules"], ["min_chars"]),
        (["report", "rules", "min_chars", "documents"], -1),
        (["report", "rules", "min_chars", "more"], 0),
        (["shards"], {}),
        (["shards", "train"], None),
        (["shards", "train", "file"], "train-00001.bin"),
        (["shards", "train", "starts", "file"], "../train-00000.starts.bin"),
        (["shards", "train", "tokens"], 10**30),
        (["shards", "train", "mask"], {"file": "train-00000.mask.bin"}),
        (["text_bytes", "validation"], 0.5),
        (["fingerprint"], "x"),
    ],
)
def test_another_record_is_refused(work, keys, value):
    path = record_path(work, 0)
    changed(path, *keys, to=value)
    with refused(str(path), "damaged", str(keys[0]), f"rm -r {work}"):
        merge(read_job(work), work, work.parent / "out", TOKENIZER, 1, lambda text: None)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["files", 0, 2], "large"),
        (["files", 0, 2], -1),
        (["files", 0, 0], 5),
        (["files", 0, 0], "/a\0b"),
        (["files", 0, 0], "rows.jsonl"),
        (["files", 0, 1], ""),
        (["files", 0, 4], "pickle"),
        (["files", 0, 4], "hf"),
        (["files", 0, 6], None),
        (["files", 0], {}),
        (["files"], None),
        (["parts"], 1 << 62),
        (["parts"], 0),
        (["name"], "\033[2J"),
        (["roots"], "/"),
        (["tokenizer"], None),
        (["filters", "min_chars"], "3"),
        (["duplicates", "threshold"], None),
        (["duplicates", "remove"], "all"),
        (["unknown"], 1),
    ],
)
def test_another_job_is_refused(work, keys, value):
    changed(work / "job.json", *keys, to=value)
    with refused(str(work / "job.json"), "damaged", keys[0], "start again"):
        read_job(work)


def test_a_third_split_in_the_manifest_is_refused(work):
    job, folder = read_job(work), work.parent / "out"
    merge(job, work, folder, TOKENIZER, 1, lambda text: None)
    folder.rename(work)
    changed(work / "manifest.json", "splits", "test", to="x")
    with refused(str(work / "manifest.json"), "invalid splits"):
        merge(job, work, folder, TOKENIZER, 1, lambda text: None)


def test_verdicts_that_do_not_fit_the_signatures_are_refused(work):
    verdicts_path(work, 0, final=True).unlink()
    verdicts_path(work, 0).write_bytes(b"\1" * 9)
    with refused(str(verdicts_path(work, 0)), "keeps 9 documents", "2 have a signature"):
        decide_duplicates(read_job(work), work, lambda text: None)
