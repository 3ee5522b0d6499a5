"""A job from sources to a folder: the same bytes on any number of processes, and after
interruptions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz_samples import Reader, build_data, json_lines, read_data
from messages import refused
from preparing import TOKENIZER, content, documents_of, prepared, text_of, write_megatron

from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.shards import Tokens
from titanlite.tools.prepare import build as build_module
from titanlite.tools.prepare import job, workers
from titanlite.tools.prepare.build import hold, unfinished
from titanlite.tools.prepare.sources import Source

ROOT = Path(__file__).parents[3]
WORDS = [
    "def",
    "return",
    "import",
    "class",
    "token",
    "shard",
    "한국어",
    "日本語",
    "data",
    "stream",
    "batch",
]


def sentences(count: int, seed: int) -> list[str]:
    choose = random.Random(seed)
    return [
        " ".join(choose.choices(WORDS, k=choose.randint(5, 60))) + f" {seed} {i}."
        for i in range(count)
    ]


def fill(folder: Path, rows: int) -> list[str]:
    """Text, JSON lines, Parquet; returns their documents."""
    folder.mkdir()
    kinds = [sentences(rows, seed) for seed in range(3)]
    for i, text in enumerate(kinds[0][:40]):
        (folder / f"{i}.txt").write_text(text)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kinds[1]))
    pq.write_table(pa.table({"text": kinds[2]}), folder / "b.parquet", row_group_size=50)
    return [*kinds[0][:40], *kinds[1], *kinds[2]]


@pytest.fixture
def source(tmp_path) -> Path:
    fill(tmp_path / "source", 300)
    return tmp_path / "source"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(job, "PART", 20_000)
    monkeypatch.setattr(job, "CUT", 5_000)


def test_several_kinds_of_files_are_announced(tmp_path, capsys):
    """A README beside rows is a text like any other; the user sees that it is one."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/README.md").write_text("About the rows.\n")
    (tmp_path / "in/rows.jsonl").write_text('{"text": "one"}\n' * 30)
    prepared(tmp_path / "made", tmp_path / "in")
    assert "1 of text, 1 of jsonl" in capsys.readouterr().err


def test_every_document_is_there_once(tmp_path):
    expected = fill(tmp_path / "source", 300)
    folder = prepared(tmp_path / "out", tmp_path / "source", "--workers", 1)
    assert sorted(documents_of(folder)) == sorted(expected)
    manifest = read_manifest(folder)
    assert manifest["parts"] > 3
    assert len(manifest["splits"]["train"]["shards"]) > 3
    assert 10 < manifest["splits"]["validation"]["documents"] < 80
    for split in ("train", "validation"):
        tokens = Tokens(folder, manifest, split)
        starts = tokens.document_starts(0, len(tokens))
        ids = tokens.read(0, len(tokens))
        assert starts.tolist() == np.flatnonzero(ids == TOKENIZER.bos).tolist()
        assert manifest["splits"][split]["bytes"] == sum(
            TOKENIZER.token_bytes[i] for i in ids.tolist()
        )


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path, source):
    whole = content(prepared(tmp_path / "one", source, "--workers", 1))
    assert content(prepared(tmp_path / "two", source, "--workers", 2)) == whole
    assert content(prepared(tmp_path / "three", source, "--workers", 3)) == whole


def test_prompts_are_no_targets(tmp_path):
    rows = [{"text": f"answer {i}", "prompt": f"question {i}"} for i in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = prepared(tmp_path / "out", tmp_path / "a.jsonl", "--prompt-field", "prompt")
    tokens = Tokens(folder, read_manifest(folder), "train")
    ids, targets = tokens.read(0, len(tokens)), tokens.targets(0, len(tokens))
    assert TOKENIZER.decode(ids[targets].tolist()).startswith(
        "answer 0<|end_of_text|>answer 1<|end_of_text|>"
    )
    assert TOKENIZER.decode(ids[~targets].tolist()).startswith(
        "<|begin_of_text|>question 0<|begin_of_text|>question"
    )


def test_duplicates_are_dropped(tmp_path, capfd):
    texts = sentences(120, 1)
    rows = [*texts, *texts[:7]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    options = ["--drop-duplicates", "--workers", 1]
    folder = prepared(tmp_path / "out", tmp_path / "a.jsonl", *options)
    assert sorted(documents_of(folder)) == sorted(texts)
    assert read_manifest(folder)["duplicates"] == 7
    assert "duplicates: 7 of 127 documents" in capfd.readouterr().err
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": texts[3]}) + "\n")
    options += ["--validation", tmp_path / "b.jsonl"]
    folder = prepared(tmp_path / "other", tmp_path / "a.jsonl", *options)
    assert texts[3] not in text_of(folder, "train")
    assert texts[3] in text_of(folder, "validation")
    assert read_manifest(folder)["duplicates"] == 8


def test_tokens_of_others_are_kept(tmp_path):
    documents = [[1 + i % 200] * (i % 9 + 1) for i in range(200)]
    write_megatron(tmp_path / "a", documents)
    folder = prepared(tmp_path / "out", tmp_path / "a.bin")
    manifest, found = read_manifest(folder), []
    for split in ("train", "validation"):
        tokens = Tokens(folder, manifest, split)
        starts = tokens.document_starts(0, len(tokens)).tolist()
        ids = tokens.read(0, len(tokens)).tolist()
        found += [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    assert sorted(found) == sorted(documents)


@pytest.mark.slow
def test_bad_rows_are_left_out_up_to_a_limit(tmp_path, capfd):
    rows = [json.dumps({"text": text}) for text in sentences(400, 2)]
    rows[99:99] = ["{broken", '{"text": 5}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    folder = prepared(tmp_path / "out", tmp_path / "a.jsonl")
    assert len(documents_of(folder)) == 400
    assert read_manifest(folder)["rows"]["bad"] == 2
    shown = capfd.readouterr().err
    assert f"{tmp_path}/a.jsonl:100: not JSON" in shown
    assert "a.jsonl:101: field 'text' is of type int" in shown
    for limit in ("1", "0.004", "0"):
        with refused("2 of ", "--max-bad-rows", "a.jsonl:100"):
            run(tmp_path / "a.jsonl", tmp_path / "other", "--max-bad-rows", limit)
        assert not (tmp_path / "other").exists()
    prepared(tmp_path / "other", tmp_path / "a.jsonl", "--max-bad-rows", 2)


def run(source: Path, out: Path, *options: str) -> int:
    """The command; its ConfigError is raised."""
    from titanlite.tools.cli.prepare_command import run

    return run([str(source), "--out", str(out), *options])


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [[], ["--drop-duplicates"]])
def test_a_finished_part_is_not_made_again(tmp_path, source, monkeypatch, options):
    whole = content(prepared(tmp_path / "whole", source, "--workers", 1, *options))
    original, made = workers.run_part, []

    def stop(job, work, tokenizer, part):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(part)
        original(job, work, tokenizer, part)

    monkeypatch.setattr(workers, "run_part", stop)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", "--workers", "1", *options)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(workers, "run_part", lambda *a: made.append(a[3]) or original(*a))
    run(source, tmp_path / "out", "--workers", "1", *options)
    parts = list(range(json.loads(whole["manifest.json"])["parts"]))
    assert sorted(made) == sorted(parts * (1 + len(options)))
    assert content(tmp_path / "out") == whole


def test_each_job_has_its_own_parts(tmp_path, source, monkeypatch):
    """Another option, or a file that has changed, begins anew; a job that ends removes the others."""
    begun = (source, tmp_path / "out", "--workers", "1")
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "finish", interrupt)
        for options in ([], ["--drop-duplicates"]):
            with pytest.raises(KeyboardInterrupt):
                run(*begun, *options)
    assert len(unfinished(tmp_path / "out")) == 2
    text = (source / "3.txt").read_text()
    (source / "3.txt").write_text(text[::-1])
    whole = content(prepared(tmp_path / "whole", source))
    assert len(unfinished(tmp_path / "out")) == 2  # those of another folder
    run(*begun)
    assert content(tmp_path / "out") == whole
    assert not unfinished(tmp_path / "out")
    prepared(tmp_path / "out", source)
    with refused(str(tmp_path / "out"), "other files or options"):
        run(*begun, "--drop-duplicates")


def test_a_job_with_too_many_bad_rows_goes_on_with_another_limit(tmp_path):
    rows = [json.dumps({"text": text}) for text in sentences(30, 3)]
    rows += [json.dumps({"content": text}) for text in sentences(10, 4)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    with refused("10 of 40 documents cannot be read"):
        run(tmp_path / "a.jsonl", tmp_path / "out", "--drop-duplicates")
    with mock.patch.object(workers, "run_part", interrupt):  # none is made again
        options = ["--drop-duplicates", "--max-bad-rows", "10"]
        run(tmp_path / "a.jsonl", tmp_path / "out", "--workers", "1", *options)
    assert len(documents_of(tmp_path / "out")) == 30


@pytest.mark.parametrize("options", [[], ["--drop-duplicates"]])
def test_a_file_that_changes_meanwhile_is_named(tmp_path, source, monkeypatch, options):
    """Two rows change places, so that neither their number nor the size of the file differs."""
    original = build_module.run_parts

    def change(*arguments):
        yield from original(*arguments)
        lines = (source / "a.jsonl").read_text().splitlines(keepends=True)
        (source / "a.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))

    monkeypatch.setattr(build_module, "run_parts", change)
    with refused(str(source / "a.jsonl"), "has changed since the preparation began"):
        run(source, tmp_path / "out", "--workers", "1", *options)
    assert not (tmp_path / "out").exists()
    assert not unfinished(tmp_path / "out")


def test_parts_stay_where_a_file_is_gone_for_a_while(tmp_path, source, monkeypatch):
    original = build_module.run_parts

    def hide(*arguments):
        yield from original(*arguments)
        (source / "a.jsonl").rename(tmp_path / "away")

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "run_parts", hide)
        with refused(str(source / "a.jsonl"), "No such file"):
            run(source, tmp_path / "out", "--workers", "1")
    (tmp_path / "away").rename(source / "a.jsonl")
    with mock.patch.object(workers, "run_part", interrupt):  # none is made again
        run(source, tmp_path / "out", "--workers", "1")
    assert documents_of(tmp_path / "out")


def test_two_processes_do_not_work_in_one_folder(tmp_path, source):
    with hold(tmp_path / "out", wait=False), refused(str(tmp_path / "out"), "another process"):
        run(source, tmp_path / "out")
    prepared(tmp_path / "out", source)
    assert not (tmp_path / ".out.lock").exists()


def test_finished_parts_stay_when_the_folder_appears_meanwhile(tmp_path, source, monkeypatch):
    out, original = tmp_path / "out", build_module.finish

    def appear(*arguments):
        out.mkdir()
        (out / "other").touch()
        return original(*arguments)

    monkeypatch.setattr(build_module, "finish", appear)
    with refused(str(out), "exists"):
        run(source, out, "--workers", "1")
    monkeypatch.setattr(build_module, "finish", original)
    (out / "other").unlink()
    out.rmdir()
    monkeypatch.setattr(workers, "run_part", interrupt)  # none is made again
    prepared(out, source)


def test_an_end_that_cannot_remove_records_keeps_the_shards(tmp_path, source, monkeypatch):
    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == "part-00001.json":
            raise OSError(16, "Device or resource busy", str(path))
        unlink(path, missing_ok)

    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", busy)
    with refused("busy"):
        run(source, tmp_path / "out", "--workers", "1")
    monkeypatch.setattr(Path, "unlink", unlink)
    (work,) = unfinished(tmp_path / "out")
    assert list(work.glob("train-*.bin"))
    prepared(tmp_path / "out", source)


@pytest.fixture
def complete(tmp_path, source, monkeypatch) -> Path:
    """The working folder of a preparation whose parts are complete."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_module, "finish", interrupt)
        run(source, tmp_path / "out", "--workers", "1")
    (work,) = unfinished(tmp_path / "out")
    return work


@pytest.mark.parametrize(
    ("keys", "value", "problem"),
    [
        (["counts", "rows"], "4", "part-00000.json: damaged (counts.rows: "),
        (["counts", "rows"], -1, "part-00000.json: damaged (counts.rows: "),
        (["counts", "examples"], {}, "part-00000.json: damaged (counts.examples: "),
        (["counts", "examples"], [{"file": "/other"}], "damaged (counts.examples[0].begin: "),
        (["text_bytes", "validation"], 0.5, "part-00000.json: damaged (text_bytes.validation: "),
        (["fingerprint"], "x", "part-00000.json: damaged (fingerprint: "),
        (["unknown"], 1, "part-00000.json: damaged (unknown: "),
        (["shards"], {}, "part-00000.json: damaged (shards.train: "),
        (["shards", "train"], None, "part-00000.json: damaged (shards.train: "),
        (["shards", "train", "tokens"], "9", "part-00000.json: damaged (shards.train.tokens: "),
        (["shards", "train", "file"], "../a.bin", "invalid file name"),
        (["shards", "train", "file"], "train-00001.bin", "invalid file name, twice"),
        (["shards", "train", "tokens"], 1 << 40, "bytes, expected"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path, source, complete, keys, value, problem):
    record = complete / "part-00000.json"
    fields = inner = json.loads(record.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    record.write_text(json.dumps(fields))
    with refused(problem, "delete the folder"):
        run(source, tmp_path / "out", "--workers", "1")


SMALL = (
    "from titanlite.tools.prepare import job; job.PART, job.CUT = 30_000, 5_000; "
    "from titanlite.tools.cli.main import main; "
)


@pytest.mark.slow
def test_killed_twenty_times_gives_the_same_bytes(tmp_path):
    """SIGKILL at random moments, each time followed by the same command."""
    fill(tmp_path / "source", 4000)
    command = [
        "prepare",
        str(tmp_path / "source"),
        "--workers",
        "2",
        "--drop-duplicates",
        "--out",
    ]

    def start(out: str) -> subprocess.Popen:
        code = SMALL + f"main({[*command, str(tmp_path / out)]!r})"
        return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)

    began = time.monotonic()
    assert start("whole").wait(300) == 0
    duration, choose = time.monotonic() - began, random.Random(0)
    killed = 0
    while killed < 20:
        process = start("out")
        try:
            process.wait(choose.uniform(0.2, 0.6 * duration))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            assert not (tmp_path / "out").exists() or content(tmp_path / "out") == content(
                tmp_path / "whole"
            )
        else:  # it has finished: from the start again
            for path in (tmp_path / "out").iterdir():
                path.unlink()
            (tmp_path / "out").rmdir()
    assert start("out").wait(300) == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def prepare_interrupted(folder: Path, name: str, stage: str) -> list[bytes]:
    """Interrupts a preparation of two parts before `stage`, a function of build.py.

    It is left in `folder/interrupted`; returns its file `name`.
    """
    rows = [{"text": f"row {i % 20} \u00e9"} for i in range(30)] + [{"text": 1}]
    (folder / "rows.jsonl").write_bytes(json_lines(rows))
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with contextlib.suppress(KeyboardInterrupt), mock.patch.object(build_module, stage, interrupt):
        go_on(folder)
    (work,) = unfinished(folder / "made")
    kept = folder / "interrupted" / work.name
    shutil.move(work, kept)
    return [(kept / name).read_bytes()]


def go_on(folder: Path) -> None:
    """Prepares as the same command does it again. The parts have 500 bytes."""
    with mock.patch.multiple(job, PART=500, CUT=100):
        build_data(Source(str(folder / "rows.jsonl")), folder / "made", drop_duplicates=True)


def read_interrupted(name: str, folder: Path, data: bytes) -> None:
    """Continues the preparation with another content of one of its files."""
    for left in (folder / "made", *unfinished(folder / "made")):
        shutil.rmtree(left, ignore_errors=True)
    (kept,) = (folder / "interrupted").iterdir()
    work = shutil.copytree(kept, folder / kept.name)
    (work / name).write_bytes(data)
    go_on(folder)
    read_data(folder / "made")


def of_interrupted(name: str, stage: str = "finish") -> Reader:
    """The reader of a file of an interrupted preparation."""
    kind = "text" if name.endswith(".json") else "bytes"
    prepare = functools.partial(prepare_interrupted, name=name, stage=stage)
    read = functools.partial(read_interrupted, name)
    return Reader(kind, prepare, read)


def read_job_file(folder: Path, data: bytes) -> None:
    (folder / "job.json").write_bytes(data)
    job.read_job(folder)


FUZZED = {
    "job.json": Reader(
        "text",
        functools.partial(prepare_interrupted, name="job.json", stage="finish"),
        read_job_file,
    ),
    "record of a part": of_interrupted("part-00000.json"),
    "hashes": of_interrupted("hashes-00000.bin", "decide_duplicates"),
}
