"""A job is cut into parts that cover its files once, whatever their number."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from messages import assert_mentions, refused

from titanlite.tools.prepare import job as module
from titanlite.tools.prepare.duplicates import DuplicateConfig
from titanlite.tools.prepare.filters import FilterConfig
from titanlite.tools.prepare.job import File, Job, begin_job, differences, number_of_parts, read_job

SIZES = {"a": 0, "b": 10, "c": 1000, "d": 3, "e": 999, "f": 50}


def job_of(parts: int, **settings: object) -> Job:
    kinds = {"c": "jsonl", "e": "text"}
    files = [
        File(f"/{n}", n, size, 0, kinds.get(n, "parquet"), "", "hash") for n, size in SIZES.items()
    ]
    return Job("x", ("/",), tuple(files), "text", "", "", "", parts, **settings)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64, 5000])
def test_parts_cover_every_byte_once(monkeypatch, parts):
    monkeypatch.setattr(module, "CUT", 100)
    job, seen = job_of(parts), {name: [] for name in SIZES}
    for part in range(parts):
        for piece in job.pieces(part):
            seen[piece.file.relative].append((piece.begin, piece.end))
    for name, size in SIZES.items():
        ends = [0, *(end for _, end in seen[name])]
        assert [begin for begin, _ in seen[name]] == ends[:-1]
        assert ends[-1] == size
        assert len(seen[name]) <= 1 or size >= 100
    if parts == 7:
        assert len(seen["c"]) > 2


def test_documents_that_must_be_whole_are_not_cut(monkeypatch):
    monkeypatch.setattr(module, "CUT", 100)
    job = job_of(64, filters=FilterConfig(min_chars=5))
    pieces = [piece for part in range(64) for piece in job.pieces(part)]
    assert sum(piece.file.relative == "e" for piece in pieces) == 1
    assert sum(piece.file.relative == "c" for piece in pieces) > 1


def test_the_number_of_parts_depends_on_the_size():
    assert [number_of_parts(size) for size in (0, 1, 1 << 26, (1 << 26) + 1, 1 << 33, 1 << 50)] == [
        1,
        1,
        1,
        2,
        128,
        256,
    ]


def test_a_job_is_read_as_it_was_written(tmp_path):
    job = job_of(3, duplicates=DuplicateConfig("near", 0.7))
    begin_job(job, tmp_path)
    assert read_job(tmp_path) == job
    begin_job(job, tmp_path)
    with refused(str(tmp_path), "parts", "3", "4"):
        begin_job(dataclasses.replace(job, parts=4), tmp_path)


RACE = """
import sys, time
from pathlib import Path
from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.job import File, Job, begin_job

parts, root, count = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
start = float(sys.stdin.readline())
for i in range(count):
    job = Job("x", ("/",), (File("/a", "a", 5, 0, "text", "", "hash"),), "text", "", "", "", parts)
    while time.time() < start + i / 50:
        pass
    try:
        begin_job(job, root / str(i))
        print("began", flush=True)
    except ConfigError as error:
        print(error, flush=True)
"""


def test_of_two_processes_that_begin_at_once_one_is_refused(tmp_path):
    rounds = 40
    for i in range(rounds):
        (tmp_path / str(i)).mkdir()
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "cwd": Path(__file__).parents[3],
    }
    commands = [
        [sys.executable, "-c", RACE, parts, str(tmp_path), str(rounds)] for parts in ("2", "3")
    ]
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    start = time.time() + 0.2
    results = []
    for process in processes:
        process.stdin.write(f"{start}\n")
        process.stdin.flush()
    for process in processes:
        results.append(process.communicate(timeout=60)[0].splitlines())
        assert process.returncode == 0
    for i, said in enumerate(zip(*results, strict=True)):
        winner = said.index("began")
        was, now = (2, 3) if winner == 0 else (3, 2)
        assert_mentions(
            said[1 - winner],
            "was begun differently",
            f"number of parts: {was}, now {now}",
            "rm -r ",
        )
        assert read_job(tmp_path / str(i)).parts == was
        assert [path.name for path in (tmp_path / str(i)).iterdir()] == ["job.json"]


def test_a_job_is_created_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(module.os, "link", refuse)
    begin_job(job_of(2), tmp_path)
    assert read_job(tmp_path) == job_of(2)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as it was when this process looked
    with refused("number of parts: 2, now 3"):
        begin_job(job_of(3), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_a_job_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError(errno.ENOSPC, "No space left on device", paths[0], None, paths[1])

    monkeypatch.setattr(module.os, "link", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        begin_job(job_of(2), tmp_path)
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "job.json"), None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"files": 5}', '{"files": [[1]]}', "[" * 99999]
)
def test_a_damaged_job_is_refused(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    with refused(str(tmp_path), "damaged"):
        read_job(tmp_path)


def test_a_file_that_changed_is_named(tmp_path):
    job = job_of(2)
    begin_job(job, tmp_path)
    fields = json.loads((tmp_path / "job.json").read_text())
    fields["files"][1][2] += 1
    (tmp_path / "job.json").write_text(json.dumps(fields))
    with refused(str(tmp_path), "files"):
        begin_job(job, tmp_path)


def test_a_part_looks_only_at_its_own_files(monkeypatch):
    files = tuple(File(f"/{i}", str(i), 10, 0, "text", "", "hash") for i in range(1000))
    job, looked = dataclasses.replace(job_of(100), files=files), []
    monkeypatch.setattr(Job, "_can_be_cut", lambda self, file: bool(looked.append(file)))
    assert sum(len(list(job.pieces(part))) for part in range(100)) == 1000
    assert len(looked) < 1200


def test_the_place_of_the_tokenizer_may_change(tmp_path):
    begin_job(dataclasses.replace(job_of(2), tokenizer="/one/file"), tmp_path)
    begin_job(dataclasses.replace(job_of(2), tokenizer="/two/file"), tmp_path)
    assert read_job(tmp_path).tokenizer == "/two/file"
    with refused("--tokenizer, SHA-256"):
        begin_job(dataclasses.replace(job_of(2), tokenizer_sha256="0"), tmp_path)


def test_differences_are_named_as_the_command_line_names_them():
    job = job_of(2, filters=FilterConfig(min_chars=99999))
    changed = (
        *job.files[1:5],
        job.files[5]._replace(mtime_ns=7),
        job.files[5]._replace(path="/new"),
    )
    other = dataclasses.replace(
        job, filters=FilterConfig(), duplicates=DuplicateConfig("near"), files=changed
    )
    assert differences(job, job) == ""
    assert differences(job, other).split("; ") == [
        "files: /a is gone, /new is new, /f has changed",
        "--min-chars: 99999, now unset",
        "--drop-duplicates: none, now near",
    ]
    assert (
        differences(job, dataclasses.replace(job, files=job.files[::-1]))
        == "files: in another order"
    )
    assert (
        differences(job, dataclasses.replace(job, prompt_field="q"))
        == "--prompt-field: unset, now q"
    )
