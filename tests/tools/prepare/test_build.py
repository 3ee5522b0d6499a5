"""A job from sources to a folder: the same bytes on any number of processes, in parts, and after
interruptions.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from messages import refused
from preparing import TOKENIZER, content, documents_of, prepared, text_of, write_megatron

from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.shards import Tokens
from titanlite.tools.prepare import build as build_module
from titanlite.tools.prepare import job
from titanlite.tools.prepare.build import working_folder
from titanlite.tools.prepare.locks import hold

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
def test_the_bytes_depend_neither_on_workers_nor_on_parts_elsewhere(tmp_path, source):
    whole = content(prepared(tmp_path / "one", source, "--workers", 1))
    assert content(prepared(tmp_path / "two", source, "--workers", 2)) == whole
    parts = json.loads(whole["manifest.json"])["parts"]
    order = list(range(1, parts + 1))
    random.Random(0).shuffle(order)
    from titanlite.tools.cli.main import main

    for part in order:
        assert (
            main(
                [
                    "prepare",
                    str(source),
                    "--out",
                    str(tmp_path / "three"),
                    "--part",
                    f"{part}/{parts}",
                ]
            )
            == 0
        )
    assert main(["prepare", "--merge", str(tmp_path / "three")]) == 0
    assert content(tmp_path / "three") == whole
    assert main(["prepare", "--merge", str(tmp_path / "three")]) == 0  # repeated


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


def test_filters_and_duplicates_drop_documents(tmp_path, capfd):
    texts = sentences(120, 1)
    rows = [*texts, *texts[:7], "short"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    options = ["--min-chars", 10, "--drop-duplicates", "exact"]
    folder = prepared(tmp_path / "out", tmp_path / "a.jsonl", *options, "--workers", 1)
    assert sorted(documents_of(folder)) == sorted(texts)
    report = read_manifest(folder)["filters"]
    assert {rule: entry["documents"] for rule, entry in report["rules"].items()} == {
        "min_chars": 1,
        "duplicate": 7,
    }
    assert f"a.jsonl:{len(rows)}: short" in capfd.readouterr().err
    for part in [*range(1, 4)] * 2 + ["merge"] + [*range(1, 4)] + ["merge"]:
        from titanlite.tools.cli.main import main

        step = ["--merge", str(tmp_path / "parts")] if part == "merge" else None
        command = [
            str(tmp_path / "a.jsonl"),
            "--out",
            str(tmp_path / "parts"),
            "--part",
            f"{part}/3",
        ]
        assert main(["prepare", *(step or [*command, *map(str, options)])]) == 0
    assert sorted(documents_of(tmp_path / "parts")) == sorted(texts)


@pytest.mark.slow
def test_a_validation_source(tmp_path, source):
    (tmp_path / "held.txt").write_text("held out\n")
    folder = prepared(tmp_path / "out", source, "--validation", tmp_path / "held.txt")
    assert text_of(folder, "validation") == "<|begin_of_text|>held out\n<|end_of_text|>"
    assert read_manifest(folder)["splits"]["train"]["documents"] == 640


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


def test_a_finished_part_is_not_made_again(tmp_path, source, monkeypatch):
    whole = content(prepared(tmp_path / "whole", source, "--workers", 1))
    from titanlite.tools.prepare import workers

    original, made = workers.run_part, []

    def stop(job, work, tokenizer, part, progress):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(part)
        original(job, work, tokenizer, part, progress)

    monkeypatch.setattr(workers, "run_part", stop)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", "--workers", "1")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(workers, "run_part", lambda *a: made.append(a[3]) or original(*a))
    run(source, tmp_path / "out", "--workers", "1")
    assert sorted(made) == list(range(json.loads(whole["manifest.json"])["parts"]))
    assert content(tmp_path / "out") == whole


def test_the_speed_is_that_of_the_parts_that_were_made(tmp_path, source, monkeypatch, capfd):
    clock = itertools.count()
    monkeypatch.setattr(build_module, "time", SimpleNamespace(monotonic=lambda: next(clock) / 1000))
    prepared(tmp_path / "whole", source, "--workers", 1)
    size = sum(path.stat().st_size for path in source.iterdir())
    assert f"in 0.0 s ({size / 1000:.1f} MB/s)" in capfd.readouterr().err
    work = working_folder(tmp_path / "out")
    parts = json.loads((tmp_path / "whole/manifest.json").read_text())["parts"]
    for part in range(1, parts + 1):
        run(source, tmp_path / "out", "--part", f"{part}/{parts}")
    first = job.read_job(work).size([0])
    assert size > 2 * first
    for part, expected in ((0, f"in 0.0 s ({first / 1000:.1f} MB/s)"), (None, "in 0.0 s: ")):
        copy = tmp_path / f"copy{part}"
        shutil.copytree(work, working_folder(copy))
        if part is not None:
            (working_folder(copy) / f"part-{part:05d}.json").unlink()
        prepared(copy, source, "--workers", 1)
        assert expected in capfd.readouterr().err


def test_another_job_in_the_same_folder_is_refused(tmp_path, source):
    run(source, tmp_path / "out", "--part", "1/4")
    with refused("parts", "4", "5", str(working_folder(tmp_path / "out"))):
        run(source, tmp_path / "out", "--part", "1/5")
    with refused("name", "source", "now a"):
        run(source / "a.jsonl", tmp_path / "out", "--part", "1/4")
    prepared(tmp_path / "done", source)
    prepared(tmp_path / "done", source)
    with refused(str(tmp_path / "done"), "--field: text, now other"):
        run(source, tmp_path / "done", "--field", "other")
    with refused("2 of 4 parts", "2/4", "4/4"):
        run(source, tmp_path / "out", "--part", "3/4")
        from titanlite.tools.cli.prepare_command import run as command

        command(["--merge", str(tmp_path / "out")])


def test_a_file_that_changes_meanwhile_is_named(tmp_path, source):
    run(source, tmp_path / "out", "--part", "1/2")
    run(source, tmp_path / "out", "--part", "2/2")
    (source / "3.txt").write_text("other")
    from titanlite.tools.cli.prepare_command import run as command

    with refused(str(source / "3.txt"), "has changed"):
        command(["--merge", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--drop-duplicates", "exact"]])
def test_repaired_rows_are_read_again_by_the_same_command(tmp_path, capfd, monkeypatch, options):
    monkeypatch.setattr(job, "PART", 5_000)
    rows = [json.dumps({"text": text}) for text in sentences(200, 2)]
    (tmp_path / "source").mkdir()
    path, whole = tmp_path / "source/a.jsonl", tmp_path / "source/b.jsonl"
    path.write_text("\n".join([*rows[:150], rows[150][:-2], *rows[151:]]))
    whole.write_text("\n".join(rows[:90]))
    command = [tmp_path / "source", "--workers", "1", *options]
    with refused("1 of 290 documents", "a.jsonl:151: not JSON"):
        run(command[0], tmp_path / "out", *command[1:], "--max-bad-rows", "0")
    path.write_text("\n".join(rows))
    capfd.readouterr()
    prepared(tmp_path / "out", *command, "--max-bad-rows", 0)
    assert (
        f"not that of the earlier attempt (files: {path} has changed); " in capfd.readouterr().err
    )
    prepared(tmp_path / "other", *command)
    assert content(tmp_path / "out") == content(tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--drop-duplicates", "exact"]])
def test_only_what_depends_on_a_changed_file_is_made_again(tmp_path, source, monkeypatch, options):
    """The last file in the order of the source, of the same size: the other parts stay."""
    from titanlite.tools.prepare import part as module

    made, tokenise, read = [], module.tokenise_part, module.read_part
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_module, "merge", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        run(source, tmp_path / "out", "--workers", "1", *options)
    parts = job.read_job(working_folder(tmp_path / "out")).parts
    text = (source / "a.jsonl").read_text()
    (source / "a.jsonl").write_text(text.replace("token", "other"))
    monkeypatch.setattr(module, "read_part", lambda *a: made.append(("read", a[3])) or read(*a))
    monkeypatch.setattr(
        module, "tokenise_part", lambda *a: made.append(("tokenise", a[3])) or tokenise(*a)
    )
    run(source, tmp_path / "out", "--workers", "1", *options)
    again = [part for step, part in made if step == ("read" if options else "tokenise")]
    assert 0 < len(again) < parts
    assert len([part for step, part in made if step == "tokenise"]) == (
        parts if options else len(again)
    )
    prepared(tmp_path / "other", source, *options)
    assert content(tmp_path / "out") == content(tmp_path / "other")


@pytest.mark.slow
def test_a_file_that_was_added_or_removed_is_no_other_command(tmp_path, source):
    begun = (source, tmp_path / "out", "--workers", "1")
    for change in (
        lambda: (source / "x.txt").write_text("new"),
        lambda: (source / "a.jsonl").unlink(),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(
                build_module, "merge", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            run(*begun)
        change()
    run(*begun)
    prepared(tmp_path / "other", source)
    assert content(tmp_path / "out") == content(tmp_path / "other")


def test_parts_on_other_machines_are_not_removed(tmp_path, source):
    run(source, tmp_path / "out", "--part", "1/4")
    (source / "3.txt").write_text("other")
    work = working_folder(tmp_path / "out")
    for options in (["--part", "2/4"], []):
        with refused(f"files: {source / '3.txt'} has changed", f"start afresh after: rm -r {work}"):
            run(source, tmp_path / "out", *options)
    assert (work / "part-00000.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--part", "1/4"]])
def test_two_processes_do_not_work_in_one_folder(tmp_path, source, options):
    with hold(tmp_path / "out"), refused(str(tmp_path / "out"), "another process"):
        run(source, tmp_path / "out", *options)
    prepared(tmp_path / "out", source)


def test_a_part_keeps_out_the_merge_but_no_other_part(tmp_path, source):
    from titanlite.tools.cli.prepare_command import run as command

    with hold(tmp_path / "out", shared=True):
        run(source, tmp_path / "out", "--part", "1/2")
        run(source, tmp_path / "out", "--part", "2/2")
        with refused("another process"):
            command(["--merge", str(tmp_path / "out")])
        with refused("another process"):
            run(source, tmp_path / "out")
    assert command(["--merge", str(tmp_path / "out")]) == 0


def test_finished_parts_stay_when_the_folder_appears_meanwhile(tmp_path, source, monkeypatch):
    out, original = tmp_path / "out", build_module.merge

    def appear(*arguments):
        out.mkdir()
        (out / "other").touch()
        return original(*arguments)

    monkeypatch.setattr(build_module, "merge", appear)
    with refused(str(out), "exists"):
        run(source, out, "--workers", "1")
    monkeypatch.setattr(build_module, "merge", original)
    (out / "other").unlink()
    out.rmdir()
    monkeypatch.setattr(build_module, "_run", lambda job, work, *rest, **more: missing(job, work))
    prepared(out, source)


def missing(job, work) -> None:
    assert not build_module.missing_parts(job, work)


def test_a_merge_that_cannot_remove_records_keeps_the_shards(tmp_path, source, monkeypatch):
    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == "part-00001.json":
            raise OSError(16, "Device or resource busy", str(path))
        unlink(path, missing_ok)

    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", busy)
    with refused("busy"):
        run(source, tmp_path / "out", "--workers", "1")
    monkeypatch.setattr(Path, "unlink", unlink)
    assert list(working_folder(tmp_path / "out").glob("train-*.bin"))
    prepared(tmp_path / "out", source)


def test_a_refused_job_leaves_the_other_job(tmp_path, source):
    run(source, tmp_path / "out", "--part", "1/4")
    record, work = (
        working_folder(tmp_path / "out") / "part-00000.json",
        working_folder(tmp_path / "out"),
    )
    record.unlink()
    with refused("parts"):
        run(source, tmp_path / "out")
    assert (work / "job.json").exists()


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
        "exact",
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


@pytest.mark.slow
def test_parts_run_on_ray(tmp_path, source):
    pytest.importorskip("ray")
    whole = content(prepared(tmp_path / "one", source, "--workers", 1))
    assert content(prepared(tmp_path / "ray", source, "--engine", "ray")) == whole
