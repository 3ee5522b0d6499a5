"""The reader that follows metrics.jsonl while it grows."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz_samples import Reader, given, json_lines

from titanlite.observe.metrics_file import RowReader, truncate_after
from titanlite.sinks.metric_names import scalars


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
