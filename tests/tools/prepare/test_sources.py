"""The files of a source, in a fixed order, hidden ones left out; data sets of the package `datasets`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from messages import refused
from preparing import TOKENIZER, documents_of, prepared

from titanlite.tools.cli.prepare_command import run
from titanlite.tools.prepare.job import File, Job, job_hash
from titanlite.tools.prepare.plan_job import check_unchanged, plan_job
from titanlite.tools.prepare.sources import STDLIB, Keys, Source, find, require_apart


def test_default_corpus_is_the_standard_library():
    found = find(Source(STDLIB))
    names = {file.relative for file in found.files}
    assert found.name == "stdlib"
    assert {"json/decoder.py", "pydoc_data/topics.py"} <= names
    assert not any("test" in name.split("/") for name in names)
    assert 5e6 < sum(file.size for file in found.files) < 50e6


def test_a_folder_is_searched_by_pattern(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/d.md", ".hidden.txt"):
        (tmp_path / name).write_text("x")
    assert [file.relative for file in find(Source(str(tmp_path), "**/*.txt")).files] == [
        "a.txt",
        "b.txt",
        "deep/c.txt",
    ]


def test_a_name_is_a_file_name(tmp_path):
    (tmp_path / "my corpus.jsonl.gz").write_bytes(b"x")
    found = find(Source(str(tmp_path / "my corpus.jsonl.gz")))
    assert (found.name, found.root, found.files[0].relative) == (
        "my_corpus",
        str(tmp_path),
        "my corpus.jsonl.gz",
    )


def test_a_local_data_set_is_identified_by_its_files(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    before = find(Source(f"hf:{tmp_path}")).files
    (tmp_path / "rows.jsonl").write_text("{} ")
    assert before != find(Source(f"hf:{tmp_path}")).files
    assert find(Source("hf:some/name:en")).files == find(Source("hf:some/name:en")).files


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("absent", "no such file"),
        ("x" * 300, "name too long"),
        ("hf:", "no name"),
        ("hf::en", "no name"),
    ],
)
def test_messages_name_the_key(path, expected):
    with refused("SOURCE = ", path[:50], expected):
        find(Source(path, keys=Keys("SOURCE", "--pattern", "--field")))


def test_a_link_to_itself_is_named(tmp_path):
    (tmp_path / "text").symlink_to(tmp_path / "text")
    with refused("data.path = ", str(tmp_path / "text")):
        find(Source(str(tmp_path / "text")))


def test_prepared_data_below_a_source_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    inner = tmp_path / "deep" / "out"
    inner.mkdir(parents=True)
    for name in ("manifest.json", "train-00000.bin"):
        (inner / name).write_text("{}")
    with refused("data.path", str(inner), "data.pattern"):
        find(Source(str(tmp_path)))
    assert [file.relative for file in find(Source(str(tmp_path), "**/*.txt")).files] == ["a.txt"]


def test_a_shard_of_prepared_data_is_not_a_source(tmp_path):
    (tmp_path / "a.txt").write_text("x = 1\n" * 500)
    made = prepared(tmp_path / "made", tmp_path / "a.txt")
    for name in ("train-00000.bin", "train-00000.starts.bin"):
        with refused(str(made), "--data.path="):
            find(Source(str(made / name)))


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def denied(path="."):  # for the superuser, no mode of a folder denies it
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with refused("data.path", str(tmp_path / "closed"), "Permission denied"):
        find(Source(str(tmp_path)))
    assert len(find(Source(str(tmp_path), "*.txt")).files) == 1


def test_source_and_target_are_apart(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("text")
    for path, target, apart in [
        ("texts", "texts/out", False),
        ("texts", "texts", False),
        ("texts", ".", False),
        ("texts", "out", True),
        ("texts", "texts2", True),
        ("texts/a.txt", "texts/out", True),
        ("texts/a.txt", "texts", False),
        ("hf:texts", "texts/out", False),
    ]:
        kind, _, name = path.rpartition(":")
        source = Source(f"{kind}:{tmp_path / name}" if kind else str(tmp_path / name))
        if apart:
            require_apart(source, find(source), tmp_path / target)
        else:
            with refused("--out", str(tmp_path)):
                require_apart(source, find(source), tmp_path / target)


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
