"""Data sets of the package `datasets`: their versions and sizes, and columns that are missing."""

from __future__ import annotations

import pytest
from messages import refused
from preparing import TOKENIZER, documents_of, prepared

from titanlite.tools.cli.prepare_command import run
from titanlite.tools.prepare.job import File, Job, job_hash
from titanlite.tools.prepare.plan_job import check_unchanged, plan_job
from titanlite.tools.prepare.sources import Source, find


def job_of(path: str, field: str = "text") -> Job:
    source = Source(path, field=field)
    return plan_job([(source, find(source))], TOKENIZER)


@pytest.fixture
def sizes(tmp_path, monkeypatch) -> list[int]:
    """The sizes of the three files of the data set `set` in the current folder."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    for i in range(3):
        (tmp_path / f"set/train-{i}.jsonl").write_text('{"text": "row"}\n' * (i + 5))
    return [path.stat().st_size for path in sorted((tmp_path / "set").iterdir())]


def test_a_change_of_a_local_data_set_is_named(tmp_path, sizes):
    begun = job_of("hf:set")
    assert [file.path for file in begun.files] == [f"hf:{tmp_path}/set#{i}" for i in range(3)]
    assert sum(begun.size(part) for part in range(begun.parts)) == sum(sizes)
    check_unchanged(begun.files)
    (tmp_path / "set/train-1.jsonl").write_text('{"text": "new"}\n' * 6)  # as long as it was
    with refused(f"hf:{tmp_path}/set: has changed since"):
        check_unchanged(begun.files)
    assert job_hash(begun) != job_hash(job_of("hf:set"))


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_a_saved_data_set_is_read_as_hf(tmp_path, monkeypatch, several):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [f"row {i} says {'x' * (i % 7)}" for i in range(60)]
    data = datasets.Dataset.from_dict({"text": rows})
    if several:
        data = datasets.DatasetDict({"train": data, "test": data.select(range(3))})
    folder = tmp_path / "saved"
    data.save_to_disk(str(folder))
    with refused(str(folder), "hf:FOLDER"):
        run([str(folder), "--out", str(tmp_path / "refused")])
    assert sorted(documents_of(prepared(tmp_path / "made", f"hf:{folder}"))) == sorted(rows)


def test_a_column_that_is_missing_is_named(sizes):
    with refused("hf:set", "data.field = 'txt'", "did you mean text"):
        job_of("hf:set", "txt")


def test_a_data_set_on_the_hub_has_neither_version_nor_size():
    shards = tuple(File(f"hf:owner/name#{i}", "", 1 << 26, "", "hf", "", "hash") for i in range(2))
    check_unchanged(shards)
    assert not Job("name", ("hf:owner/name",), shards, "text", "", "", "", 2).has_known_size
