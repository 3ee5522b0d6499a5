"""Traces of the profiler: by the schedule, on request, of chosen ranks, and what is beside them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from runs import curve, train_run

from titanlite.data.stream import TrainStream
from titanlite.distributed import signals
from titanlite.observe.profile import parse_ranks
from titanlite.runtime.errors import ConfigError

STEPS = ["--profiling.warmup_steps=1", "--profiling.active_steps=1"]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "traces").iterdir())


@pytest.mark.slow
def test_a_recording_may_begin_with_the_first_step(pool, arguments, tmp_path):
    scheduled = ["--profiling.enabled", "--profiling.freq=2", *STEPS, "--training.steps=4"]
    assert pool.run(1, train_run, [*arguments, *scheduled]) == [0]
    traces = [name for name in files(tmp_path / "debug") if name.endswith("0.json.gz")]
    assert traces == ["step-2-rank-0.json.gz", "step-4-rank-0.json.gz"]


@pytest.mark.slow
def test_traces_are_written_for_each_rank(pool, arguments, tmp_path):
    scheduled = ["--profiling.enabled", "--profiling.freq=3", *STEPS]
    assert pool.run(2, train_run, [*arguments, *scheduled]) == [0, 0]
    stems = [f"step-{step}-rank-{rank}" for step in (3, 6) for rank in (0, 1)]
    assert files(tmp_path / "debug") == [
        f"{stem}{end}" for stem in stems for end in (".collectives.json", ".json.gz", ".txt")
    ]
    with gzip.open(tmp_path / "debug/traces/step-3-rank-0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names
    assert "aten::mm" in (tmp_path / "debug/traces/step-3-rank-0.txt").read_text()


def run_and_ask(arguments: list[str], folder: Path, step: int) -> int:
    """A run in which the file PROFILE appears during a step."""
    original, steps = TrainStream.next_step, iter(range(1, 1000))

    def next_step(stream):
        if next(steps) == step and dist.get_rank() == 0:
            (folder / "PROFILE").touch()
        return original(stream)

    TrainStream.next_step = next_step
    signals.LOOK_EVERY = 0.0  # these steps take milliseconds
    try:
        return train_run(arguments)
    finally:
        TrainStream.next_step = original


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["all", pytest.param("1", marks=pytest.mark.slow)])
def test_a_file_requests_a_profile_which_changes_no_loss(pool, arguments, tmp_path, ranks):
    assert pool.run(2, train_run, [*arguments, "--run.name=whole"]) == [0, 0]
    asked = [*arguments, *STEPS, f"--profiling.ranks={ranks}"]
    assert pool.run(2, run_and_ask, asked, tmp_path / "debug", 2) == [0, 0]
    recorded = [0, 1] if ranks == "all" else [1]
    assert {name.partition(".")[0] for name in files(tmp_path / "debug")} == {
        f"step-4-rank-{n}" for n in recorded
    }
    assert not (tmp_path / "debug/PROFILE").exists()
    assert curve(tmp_path / "debug") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_a_recording_that_the_end_of_the_run_cuts_short_is_written(pool, arguments, tmp_path):
    assert pool.run(
        1, run_and_ask, [*arguments, "--profiling.active_steps=50"], tmp_path / "debug", 2
    ) == [0]
    assert "step-6-rank-0.txt" in files(tmp_path / "debug")


def run_and_ask_again(arguments: list[str], folder: Path) -> int:
    """PROFILE appears in step 2 and, while that is recorded, in step 4."""
    original = TrainStream.next_step

    def next_step(stream):
        if stream.samples == 3 * stream.training.global_batch_size and dist.get_rank() == 0:
            (folder / "PROFILE").touch()
        return original(stream)

    TrainStream.next_step = next_step
    try:
        return run_and_ask(arguments, folder, 2)
    finally:
        TrainStream.next_step = original


@pytest.mark.slow
def test_a_second_request_gets_an_answer(pool, arguments, tmp_path):
    """The recording wants four steps after its warmup; the run has three."""
    asked = [
        *arguments,
        "--profiling.warmup_steps=1",
        "--profiling.active_steps=4",
        "--profiling.ranks=0",
        "--validation.freq=0",
    ]
    assert pool.run(2, run_and_ask_again, asked, tmp_path / "debug") == [0, 0]
    text = (tmp_path / "debug/log.txt").read_text()
    assert text.count("recording steps 4 to 7 on ranks 0") == 1
    assert text.count("a recording is in progress") == 1
    assert "aten::mm" in (tmp_path / "debug/traces/step-6-rank-0.txt").read_text()


def test_ranks():
    assert parse_ranks("all", 3) == {0, 1, 2}
    assert parse_ranks("0, 2", 3) == {0, 2}
    for wrong in ("", "3", "-1", "0,", "both", "0 1"):
        with pytest.raises(ConfigError, match=r"profiling.ranks = .*all, or ranks from 0 to 2"):
            parse_ranks(wrong, 3)


def test_a_wrong_rank_is_reported_before_the_first_step(pool, arguments, tmp_path):
    with pytest.raises(
        AssertionError, match=r"profiling.ranks = '2': expected all, or ranks from 0 to 1"
    ):
        pool.run(2, train_run, [*arguments, "--profiling.ranks=2"])
    assert not (tmp_path / "debug/metrics.jsonl").exists()
