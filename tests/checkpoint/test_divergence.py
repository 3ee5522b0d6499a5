"""What is recorded of divergences and rollbacks, and when a command is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fuzz_samples import Reader, given
from text_in_memory import Documents, Ranks, only_source

from titanlite.checkpoint.divergence import (
    MAX_ATTEMPTS,
    Suspect,
    begin_rollback,
    end_command,
    excluded_before,
    read_record,
)
from titanlite.checkpoint.folders import RECORD, list_steps
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CorruptCheckpoint, FileEntry
from titanlite.checkpoint.resume import EXCLUDED, read_excluded
from titanlite.config.schema import CheckpointConfig, TrainingConfig
from titanlite.data.rows import Windows
from titanlite.data.stream import TrainStream
from titanlite.optim.stability import NOT_FINITE, Verdict
from titanlite.runtime.errors import ConfigError

ROLLBACK = {"step": 5, "first": 32, "end": 40}
SETTINGS = {"optimizer": {"lr": 1e-3}}
NOBODY = Suspect(0, chosen=False)
NAN = float("nan")
VERDICT = Verdict(5, 32, 40, NOT_FINITE, NAN, NAN, NAN, NAN, 1, 1)


def make_steps(folder: Path, *steps: int) -> None:
    """Empty checkpoints."""
    for step in steps:
        (folder / f"checkpoints/step-{step}").mkdir(parents=True)


def test_a_command_is_refused_after_so_many_divergences(tmp_path):
    make_steps(tmp_path, 4)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        excluded_before(tmp_path, SETTINGS)
        advice = end_command(tmp_path, SETTINGS, "step 5: the gradient norm is nan", NOBODY)
        assert advice.startswith("the same command resumes from step 4")
        assert ("the same command will be refused" in advice) == (attempt == MAX_ATTEMPTS)
    with pytest.raises(
        ConfigError,
        match=r"diverged 5 times.*step 4, the last time at step 5: the gradient norm is nan",
    ):
        excluded_before(tmp_path, SETTINGS)


@pytest.mark.parametrize("change", ["a setting", "a newer checkpoint", "no record"])
def test_a_change_allows_more_attempts(tmp_path, change):
    make_steps(tmp_path, 4)
    settings = SETTINGS
    for _ in range(MAX_ATTEMPTS):
        end_command(tmp_path, settings, "step 5", NOBODY)
    if change == "a setting":
        settings = {"optimizer": {"lr": 1e-4}}
    elif change == "a newer checkpoint":
        make_steps(tmp_path, 6)
    else:
        (tmp_path / RECORD).unlink()
    excluded_before(tmp_path, settings)
    end_command(tmp_path, settings, "step 7", NOBODY)
    assert read_record(tmp_path).attempts == 1
    excluded_before(tmp_path, settings)


def test_a_checkpoint_that_is_renamed_is_no_progress(tmp_path):
    """Each attempt ends in the step after a resumed one, which is renamed: the newest checkpoint
    becomes older.
    """
    make_steps(tmp_path, 1, 2, 3, 4, 5)
    for resumed, attempts in ((0, 1), (5, 2), (4, 3), (3, 4)):
        end_command(tmp_path, SETTINGS, "step 6", Suspect(resumed, chosen=False))
        record = read_record(tmp_path)
        assert (record.attempts, record.newest) == (attempts, 5)
    assert not (tmp_path / "checkpoints/step-3").exists()


def test_a_rollback_is_recorded_before_anything_else(tmp_path):
    make_steps(tmp_path, 4)
    assert begin_rollback(tmp_path, VERDICT, 2, NOBODY) == ([(32, 40)], "")
    assert read_record(tmp_path).rollbacks == [ROLLBACK]
    assert begin_rollback(tmp_path, VERDICT, 2, NOBODY) == ([(32, 40), (32, 40)], "")
    excluded, problem = begin_rollback(tmp_path, VERDICT, 2, NOBODY)
    assert "2 rollbacks were done already" in problem
    assert excluded == []
    assert excluded_before(tmp_path, SETTINGS) == [(32, 40), (32, 40)]


@pytest.mark.parametrize(("chosen", "left"), [(False, [2]), (True, [2, 4])])
def test_a_rollback_renames_a_suspected_checkpoint_unless_it_was_chosen(tmp_path, chosen, left):
    make_steps(tmp_path, 2, 4)
    assert not begin_rollback(tmp_path, VERDICT, 3, Suspect(4, chosen)).problem
    assert list_steps(tmp_path / "checkpoints") == left


@pytest.mark.parametrize("older", [{}, {"resumed": 4}])
def test_excluded_samples_are_read_from_the_record(tmp_path, older):
    assert excluded_before(tmp_path, SETTINGS) == []
    (tmp_path / RECORD).write_text(json.dumps({"rollbacks": [ROLLBACK | older]}))
    assert excluded_before(tmp_path, SETTINGS) == [(32, 40)]


def write_excluded(folder: Path, content: bytes) -> SimpleNamespace:
    (folder / EXCLUDED).write_bytes(content)
    return SimpleNamespace(
        files={EXCLUDED: FileEntry(len(content), hashlib.sha256(content).hexdigest())}
    )


def test_samples_of_the_record_and_of_a_checkpoint_are_excluded(tmp_path):
    windows = Windows(Documents([1001]), 10, "text")
    stream = TrainStream(only_source(windows), TrainingConfig(seq_len=10), Ranks(), False)
    checkpointer = Checkpointer(
        CheckpointConfig(),
        tmp_path,
        {"data": stream},
        SimpleNamespace(files={"model.json": b"{}"}),
        torch.device("cpu"),
        None,
    )
    checkpointer.exclude_samples([])
    assert checkpointer.files().keys() == {"model.json"}
    checkpointer.exclude_samples([(8, 12)])
    checkpointer.exclude_samples([(32, 40), (10, 16)])
    checkpointer.exclude_samples([])
    assert stream.order.number(8) == 16
    assert stream.order.excluded == [(8, 16), (32, 40)]
    manifest = write_excluded(tmp_path, checkpointer.files()[EXCLUDED])
    assert read_excluded(tmp_path, manifest) == [(8, 16), (32, 40)]
    assert read_excluded(tmp_path, SimpleNamespace(files={})) == []  # of an older version


@pytest.mark.parametrize(
    "content", ["", "3", "[3]", "[[1]]", "[[3, 3]]", "[[-1, 3]]", "[[1, 2.5]]", "[" * 100_000]
)
def test_excluded_samples_that_are_invalid_are_a_damaged_checkpoint(tmp_path, content):
    with pytest.raises(CorruptCheckpoint, match=r"excluded.json: expected pairs"):
        read_excluded(tmp_path, write_excluded(tmp_path, content.encode()))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        "null",
        '{"attempts": "3"}',
        '{"attempts": true}',
        '{"other": 1}',
        '{"rollbacks": [3]}',
        '{"rollbacks": [{"first": 1, "end": 2}]}',
        json.dumps({"rollbacks": [ROLLBACK | {"first": 40}]}),
        json.dumps({"rollbacks": [ROLLBACK | {"end": 40.5}]}),
        "[" * 100_000,
    ],
)
def test_a_damaged_record_is_refused(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(ConfigError, match=r"stability.json: damaged; expected"):
        read_record(tmp_path)


def test_a_damaged_record_does_not_hide_a_divergence(tmp_path):
    make_steps(tmp_path, 4)
    (tmp_path / RECORD).write_text("{")
    advice = end_command(tmp_path, SETTINGS, "step 5: the gradient norm is nan", NOBODY)
    assert advice.startswith("the same command resumes from step 4")


def read_diverged(folder: Path, data: bytes) -> None:
    (folder / RECORD).write_bytes(data)
    record = read_record(folder)
    assert all(0 <= entry["first"] < entry["end"] for entry in record.rollbacks)
    assert type(record.attempts) is type(record.newest) is int


ROLLED_BACK = {
    "attempts": 2,
    "newest": 4,
    "config": "ab",
    "last": "step 5",
    "rollbacks": [
        {"step": 5, "resumed": 4, "first": 32, "end": 40},
        {"step": 9, "first": 72, "end": 80},
    ],
}
FUZZED = {RECORD: Reader("text", given(json.dumps(ROLLED_BACK).encode(), b"{}"), read_diverged)}
