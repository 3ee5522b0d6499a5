"""A run's folder as numbers, also if files are absent, damaged or hostile."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import pytest
from fuzz_samples import TOML, Reader, given, json_lines
from report_runs import EVENTS, event, write_lines, write_run

from titanlite.tools.report import run_data as read
from titanlite.tools.report.page import contents, page
from titanlite.tools.report.run_data import read_run, read_runs
from titanlite.tools.report.text_report import text_report


def test_a_whole_run(tmp_path):
    run = read_run(write_run(tmp_path / "a"))
    assert (run.name, run.last_step, run.notes) == ("a", 3000, [])
    assert len(run.columns["loss"].steps) == 301
    assert run.columns["validation/text/loss"].steps.tolist() == [1000, 2000, 3000]
    assert run.config["schedule.warmup_steps"] == 100
    assert [sample.step for sample in run.samples] == [0, 1000, 2000, 3000]


def test_a_process_that_was_lost_is_a_restart_and_a_signal_gets_the_step_of_its_save(tmp_path):
    events = read_run(write_run(tmp_path / "a")).events
    names = [entry.name for entry in events]
    assert names == [
        "start", "save", "restart", "resume", "start", "spike", "signal", "save", "end",
        "resume", "start", "save", "end",
    ]  # fmt: skip
    assert [entry.step for entry in events if entry.name in ("restart", "signal")] == [1000, 2000]
    assert len(names) == len(EVENTS) + 1


def test_a_run_that_has_diverged_has_ended(tmp_path):
    entries = [event("start", 0, 0), event("diverged", 7, 1), event("start", 5, 2)]
    write_lines(tmp_path / "events.jsonl", entries)
    assert [entry.name for entry in read_run(tmp_path).events] == ["start", "diverged", "start"]


def test_an_empty_folder(tmp_path):
    run = read_run(tmp_path)
    assert run.columns == {}
    assert run.last_step == 0
    assert run.notes == ["no metrics.jsonl: nothing has been logged yet"]


def test_damaged_lines_are_skipped_and_counted(tmp_path):
    good = '{"step": 1, "loss": 2.5, "lr": "x", "tokens": true, "mfu": null}\n'
    bad = [
        '{"step": 2, "loss": 1e999}\n',
        "5\n",
        "[" * 100_000 + "\n",
        '{"step": -1, "loss": 1}\n',
        '{"step": 1e3}\n',
    ]
    nan = '{"step": 3, "loss": null, "tps": 10000000000000000000000000000}\n'
    (tmp_path / "metrics.jsonl").write_text("".join([*bad, good, nan, '{"step": 4, "lo']))
    run = read_run(tmp_path)
    assert {name: column.values.tolist() for name, column in run.columns.items()} == {
        "loss": [2.5],
        "tps": [1e28],
    }
    assert run.broken == [3]
    # The last line may still be written
    assert run.notes == ["metrics.jsonl: 2 damaged lines were skipped"]


def test_steps_are_in_order_and_each_is_there_once(tmp_path):
    steps = [5, 1, 3, 3, 2]
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": step, "loss": i} for i, step in enumerate(steps)]
    )
    column = read_run(tmp_path).columns["loss"]
    assert column.steps.tolist() == [1, 2, 3, 5]
    assert column.values.tolist() == [1, 4, 3, 0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "samples.jsonl", "config.toml"])
def test_pipes_folders_and_devices_are_not_waited_for(tmp_path, name):
    (tmp_path / "metrics.jsonl").write_text("")
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        assert any(note.startswith(f"{name}: ") for note in read_run(tmp_path).notes)
        if (tmp_path / name).is_dir():
            (tmp_path / name).rmdir()


def test_only_so_much_is_read(tmp_path, monkeypatch):
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"step": i, **{f"c{n}": 1.0 for n in range(10)}} for i in range(1, 100)],
    )
    monkeypatch.setattr(read, "MOST_BYTES", 2000)
    monkeypatch.setattr(read, "MOST_COLUMNS", 4)
    run = read_run(tmp_path)
    assert len(run.columns) == 4
    assert 1 < len(run.columns["c0"].steps) < 30
    assert run.last_step == 99
    assert run.notes == ["metrics.jsonl: only its last 0.0 GB were read"]


def test_the_newest_events_and_samples_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MOST_EVENTS", 3)
    monkeypatch.setattr(read, "MOST_SAMPLES", 2)
    write_lines(tmp_path / "events.jsonl", [event("save", i, i) for i in range(9)])
    write_lines(
        tmp_path / "samples.jsonl", [{"step": i, "prompt": "a", "text": "b"} for i in range(9)]
    )
    run = read_run(tmp_path)
    assert [entry.step for entry in run.events] == [6, 7, 8]
    assert [sample.step for sample in run.samples] == [7, 8]


def test_a_signal_before_a_kill_has_the_largest_step_before(tmp_path):
    entries = [
        event("start", 0, 0),
        event("save", 50, 1),
        event("signal", None, 2),
        event("resume", 50, 3),
    ]
    write_lines(tmp_path / "events.jsonl", [*entries, event("save", 90, 4)])
    assert [entry.step for entry in read_run(tmp_path).events if entry.name == "signal"] == [50]
    write_lines(tmp_path / "events.jsonl", [*entries[:3], event("end", 60, 3)])
    assert [entry.step for entry in read_run(tmp_path).events if entry.name == "signal"] == [60]


def test_folders_of_the_same_name_are_told_apart(tmp_path):
    folders = [tmp_path / name for name in ("x/a/run", "y/a/run", "y/b/run", "other")]
    assert [run.name for run in read_runs(folders)] == ["x/a/run", "y/a/run", "b/run", "other"]


def test_a_name_that_cannot_be_encoded_or_printed(tmp_path):
    folder = tmp_path / os.fsdecode(b"a\xff\n\x1b")
    assert read_run(folder).name == "a\\udcff\\n\\x1b"


@pytest.mark.parametrize("text", ["x = [", f"[a]\nb = {1 << 63}", "a.b = 0x" + "f" * 6000])
def test_a_config_that_is_not_toml_is_a_note(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    run = read_run(tmp_path)
    assert run.config == {}
    assert any(note.startswith("config.toml: ") for note in run.notes)


def test_columns_are_arrays(tmp_path):
    column = read_run(write_run(tmp_path / "a")).columns["loss"]
    assert (np.diff(column.steps) > 0).all()
    assert column.values.dtype == np.float64


def read_for_report(name: str, folder: Path, data: bytes) -> None:
    """Makes a page and a text of the run: what is read must fit into JSON and into a table."""
    (folder / name).write_bytes(data)
    run = read_run(folder)
    page(contents([run])).encode()
    text_report([run]).encode()


def file_of_a_run(name: str, *samples: bytes) -> Reader:
    return Reader("text", given(*samples), functools.partial(read_for_report, name))


SHORT = [{"step": i, "loss": 2.5, "mfu": None} for i in range(6)]
LOGGED = [
    {"step": i, "loss": 9 / i, "tokens": 8 * i, "seconds": 0.5 * i, "time/data": 0.1}
    for i in range(1, 50)
]
START = {"parameters": 5080, "device": "CPU", "layout": "one process"}
HAPPENED = [
    {"time": 1e9, "step": 0, "event": "start", "text": "start", "about": START},
    {"time": 1e9, "step": 1, "event": "save", "text": "save"},
    {"time": 1e9, "step": 2, "event": "end", "text": "end"},
]
DRAWN = [{"step": i, "prompt": "def", "text": f" f({i})"} for i in range(3)]
EVALUATED = [
    {"step": 2, "weights": "ema", "evaluate/a/loss": 0.5, "evaluate/a/tokens": 8},
    {"step": 4, "weights": "", "evaluate/a/loss": 0.5, "evaluate/a/tokens": 8},
]
FUZZED = {
    "report, metrics": file_of_a_run("metrics.jsonl", json_lines(SHORT), json_lines(LOGGED)),
    "report, evaluations": file_of_a_run("evaluations.jsonl", json_lines(EVALUATED)),
    "report, events": file_of_a_run("events.jsonl", json_lines(HAPPENED)),
    "report, samples": file_of_a_run("samples.jsonl", json_lines(DRAWN)),
    "report, config": file_of_a_run("config.toml", TOML),
}
