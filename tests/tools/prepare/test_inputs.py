"""A job's input files have versions, and a change of any of them is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from messages import refused
from preparing import TOKENIZER, write_megatron

from titanlite.tools.prepare.inputs import check_inputs
from titanlite.tools.prepare.job import File, Job, differences
from titanlite.tools.prepare.plan_job import Settings, plan_job
from titanlite.tools.prepare.sources import Source, find


def job_of(path: Path | str) -> Job:
    source = Source(str(path))
    return plan_job([(source, find(source))], TOKENIZER, Settings())


@pytest.fixture
def job(tmp_path) -> Job:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("text")
    write_megatron(tmp_path / "in/ids", [[1, 2], [3]])
    return job_of(tmp_path / "in")


def test_a_change_of_a_local_data_set_is_named(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    sizes = []
    for i in range(3):
        rows = tmp_path / f"set/train-{i}.jsonl"
        rows.write_text('{"text": "row"}\n' * (i + 5))
        sizes.append(rows.stat().st_size)
    monkeypatch.chdir(tmp_path)
    begun = job_of("hf:set")
    assert [file.path for file in begun.files] == [f"hf:{tmp_path}/set#{i}" for i in range(3)]
    assert begun.size(range(begun.parts)) == sum(sizes)
    check_inputs(begun.files, tmp_path / "work")
    (tmp_path / "set/train-1.jsonl").write_text('{"text": "new"}\n' * 6)  # as long as it was
    with refused(f"hf:{tmp_path}/set: has changed since"):
        check_inputs(begun.files, tmp_path / "work")
    assert differences(begun, job_of("hf:set")) == f"files: hf:{tmp_path}/set has changed"


def test_a_data_set_on_the_hub_has_neither_version_nor_size():
    shards = tuple(File(f"hf:owner/name#{i}", "", 1 << 26, 0, "hf", "", "hash") for i in range(2))
    check_inputs(shards, Path("work"))
    job = Job("name", ("hf:owner/name",), shards, "text", "", "", "", 2)
    assert (job.size([0, 1]), job.has_known_size) == (None, False)


def change_time(path: Path) -> None:
    os.utime(path, ns=(3, 3))


@pytest.mark.parametrize("name", ["a.txt", "ids.bin", "ids.idx"])
@pytest.mark.parametrize(
    "change", [change_time, Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b"x")]
)
def test_a_change_is_named(tmp_path, job, name, change):
    check_inputs(job.files, tmp_path / "work")
    change(tmp_path / "in" / name)
    with refused(str(tmp_path / "in" / name), "since the preparation began"):
        check_inputs(job.files, tmp_path / "work")
