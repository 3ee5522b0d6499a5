"""The files of a run: lines that cannot be written wait; the reader follows metrics.jsonl while it grows."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from fuzz_samples import Reader, given, json_lines
from runs import curve, train_run

from titanlite.observe import line_file
from titanlite.observe.line_file import LineFile
from titanlite.observe.metrics_file import SAMPLES, RowReader, drop_later_lines, truncate_after
from titanlite.sinks.metric_names import scalars


def limit_file_size(size: int) -> None:
    """Makes writes beyond this size fail, after a part has been written, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    limit_file_size(size)
    try:
        yield
    finally:
        limit_file_size(resource.RLIM_INFINITY)


@pytest.fixture
def messages(monkeypatch):
    """What is logged."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(line_file.logger, "handlers", [handler])
    before = line_file.logger.level
    line_file.logger.setLevel(logging.INFO)
    yield records
    line_file.logger.setLevel(before)


def test_lines_wait_until_there_is_room(tmp_path, messages):
    file = LineFile(tmp_path / "lines")
    file.append("a" * 50)
    with full_disk(100):
        file.append("b" * 80)
        file.append("c")
        assert file.path.read_text() == "a" * 50 + "\n"
    file.append("d")
    assert file.path.read_text().split() == ["a" * 50, "b" * 80, "c", "d"]
    assert [record.levelname for record in messages] == ["WARNING", "INFO"]
    assert str(file.path) in messages[0].getMessage()


def test_a_pipe_is_not_waited_for(tmp_path, messages):
    file = LineFile(tmp_path / "lines")
    os.mkfifo(file.path)
    file.append("a")
    reader = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK)
    file.append("b" * 1_000_000)  # more than a pipe holds
    os.close(reader)
    file.path.unlink()
    file.append("c")
    assert file.path.read_text().split() == ["a", "b" * 1_000_000, "c"]
    assert [record.levelname for record in messages] == ["WARNING", "INFO"]


def test_only_so_many_lines_wait(tmp_path, messages, monkeypatch):
    monkeypatch.setattr(line_file, "MAX_WAITING", 3)
    file = LineFile(tmp_path / "absent/lines")
    for line in "abcde":
        file.append(line)
    file.path.parent.mkdir()
    file.append("f")
    assert file.path.read_text() == "d\ne\nf\n"


def train_on_a_full_disk(arguments: list[str]) -> int:
    """Nothing can be written from step 3 to step 5."""
    from titanlite.data.stream import TrainStream

    original, sizes = TrainStream.next_step, {3: 1, 5: resource.RLIM_INFINITY}
    steps = iter(range(1, 1_000_000))

    def next_step(stream):
        if (step := next(steps)) in sizes:
            limit_file_size(sizes[step])
        return original(stream)

    with mock.patch.object(TrainStream, "next_step", next_step):
        return train_run(arguments)


@pytest.mark.slow
def test_a_full_disk_ends_no_run_and_no_line_is_missing(pool, arguments, tmp_path):
    assert pool.run(1, train_on_a_full_disk, [*arguments, "--validation.freq=0"]) == [0]
    assert list(curve(tmp_path / "debug")) == [1, 2, 3, 4, 5, 6]
    log = (tmp_path / "debug/log.txt").read_text()
    for text in (
        "step 3/6",
        "step 4/6",
        "metrics.jsonl: File too large",
        "metrics.jsonl is written again",
    ):
        assert log.count(text) == 1, log


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "config.toml"])
def test_a_folder_in_the_place_of_a_file_is_one_error(pool, arguments, tmp_path, name):
    (tmp_path / "debug" / name).mkdir(parents=True)
    with pytest.raises(AssertionError, match=rf"ConfigError: .*{name}.*Is a directory"):
        pool.run(2, train_run, arguments)


def test_a_damaged_metrics_file_does_not_hinder_a_resume(pool, arguments, tmp_path):
    assert pool.run(1, train_run, [*arguments, "--training.steps=3"]) == [0]
    path = Path(tmp_path / "debug/metrics.jsonl")
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(
        b"\n".join([*lines[:-1], b'{"step": 2, "loss": "\xff"}', b"5", b"[" * 100_000, b""])
    )
    assert pool.run(1, train_run, arguments) == [0]
    assert list(curve(tmp_path / "debug")) == [1, 2, 3, 4, 5, 6]


def line(step: int, **more) -> str:
    return json.dumps({"step": step, **more}) + "\n"


def test_rows_are_read_once_they_are_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)
    assert reader.read() == []
    path.write_text(line(1) + '{"step": 2, "lo')
    assert reader.read() == [{"step": 1}]
    assert reader.read() == []
    with path.open("a") as file:
        file.write('ss": 0.5}\n' + line(3) + line(4))
    assert reader.read(most=2) == [{"step": 2, "loss": 0.5}, {"step": 3}]
    assert reader.read() == [{"step": 4}]


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("[1]\n" + line(1) + "{{\n" + '{"step": "x"}\n' + "[" * 100_000 + "\n" + line(2))
    assert RowReader(path).read() == [{"step": 1}, {"step": 2}]


def test_lines_that_were_removed_are_noticed(tmp_path):
    """Even if as many were written since; and if the file is shortened, replaced or deleted."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, time=1.5) + line(2, time=2.5))
    reader = RowReader(path)
    assert len(reader.read()) == 2
    path.write_text(line(1, time=1.5) + line(2, time=9.5))
    assert reader.read() is None
    reader = RowReader(path)
    assert len(reader.read()) == 2
    path.write_text(line(1, time=1.5))
    assert reader.read() is None
    path.unlink()
    assert reader.read() is None


def read_metrics(folder: Path, data: bytes) -> None:
    (folder / "metrics.jsonl").write_bytes(data)
    for row in RowReader(folder / "metrics.jsonl").read() or []:
        scalars(row)
    truncate_after(folder / "metrics.jsonl", 3)
    assert len((folder / "metrics.jsonl").read_bytes()) <= len(data) + 1


ROWS = [{"step": i, "loss": 2.5, "mfu": None} for i in range(6)]
FUZZED = {"metrics.jsonl": Reader("text", given(json_lines(ROWS)), read_metrics)}


def test_a_rollback_before_the_first_logged_step_drops_what_there_is(tmp_path):
    """A copied checkpoint may be resumed in a folder without metrics.jsonl."""
    lines = [f'{{"step": {step}}}\n' for step in (2, 4)]
    (tmp_path / SAMPLES).write_text("".join(lines))
    drop_later_lines(tmp_path, 3)
    assert (tmp_path / SAMPLES).read_text() == lines[0]
    assert [path.name for path in tmp_path.iterdir()] == [SAMPLES]
