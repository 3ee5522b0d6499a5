"""What is recorded of rollbacks, and which checkpoint is renamed after a divergence."""

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
    Suspect,
    begin_rollback,
    excluded_before,
    read_record,
    step_back,
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
NOBODY = Suspect(0, chosen=False)
NAN = float("nan")
VERDICT = Verdict(5, 32, 40, NOT_FINITE, NAN, NAN, NAN, NAN, 1, 1)


def make_steps(folder: Path, *steps: int) -> None:
    """Empty checkpoints."""
    for step in steps:
        (folder / f"checkpoints/step-{step}").mkdir(parents=True)


def test_one_checkpoint_in_a_row_is_renamed(tmp_path):
    """Each start diverges in the step after the one from which it resumed."""
    make_steps(tmp_path, 1, 2, 3, 4, 5)
    assert step_back(tmp_path, NOBODY).startswith("the same command resumes from step 5")
    assert "resumes from step 4" in step_back(tmp_path, Suspect(5, chosen=False))
    assert "one was renamed already" in step_back(tmp_path, Suspect(4, chosen=False))
    assert list_steps(tmp_path / "checkpoints") == [1, 2, 3, 4]
    assert (tmp_path / "checkpoints/step-5.diverged").is_dir()
    make_steps(tmp_path, 5, 6)
    assert "resumes from step 5" in step_back(tmp_path, Suspect(6, chosen=False))


def test_a_rollback_is_recorded_before_anything_else(tmp_path):
    make_steps(tmp_path, 4)
    assert begin_rollback(tmp_path, VERDICT, 2, NOBODY) == ([(32, 40)], "")
    assert json.loads((tmp_path / RECORD).read_text()) == {"rollbacks": [ROLLBACK]}
    assert begin_rollback(tmp_path, VERDICT, 2, NOBODY) == ([(32, 40), (32, 40)], "")
    excluded, problem = begin_rollback(tmp_path, VERDICT, 2, NOBODY)
    assert "2 rollbacks were done already" in problem
    assert excluded == []
    assert excluded_before(tmp_path) == [(32, 40), (32, 40)]


@pytest.mark.parametrize(("chosen", "left"), [(False, [2]), (True, [2, 4])])
def test_a_rollback_renames_a_suspected_checkpoint_unless_it_was_chosen(tmp_path, chosen, left):
    make_steps(tmp_path, 2, 4)
    assert not begin_rollback(tmp_path, VERDICT, 3, Suspect(4, chosen)).problem
    assert list_steps(tmp_path / "checkpoints") == left


def test_excluded_samples_are_read_from_the_record(tmp_path):
    assert excluded_before(tmp_path) == []
    (tmp_path / RECORD).write_text(json.dumps({"rollbacks": [ROLLBACK]}))
    assert excluded_before(tmp_path) == [(32, 40)]


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
    assert read_excluded(tmp_path, SimpleNamespace(files={})) == []


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
        "{}",
        '{"rollbacks": [], "other": 1}',
        '{"rollbacks": "3"}',
        '{"rollbacks": [3]}',
        '{"rollbacks": [{"first": 1, "end": 2}]}',
        json.dumps({"rollbacks": [ROLLBACK | {"first": 40}]}),
        json.dumps({"rollbacks": [ROLLBACK | {"end": 40.5}]}),
        json.dumps({"rollbacks": [ROLLBACK | {"first": True}]}),
        "[" * 100_000,
    ],
)
def test_a_damaged_record_is_refused(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(ConfigError, match=r"stability.json: damaged; expected"):
        read_record(tmp_path)


def read_diverged(folder: Path, data: bytes) -> None:
    (folder / RECORD).write_bytes(data)
    record = read_record(folder)
    assert all(0 <= bad.first < bad.end for bad in record.rollbacks)


ROLLED_BACK = {"rollbacks": [ROLLBACK, {"step": 9, "first": 72, "end": 80}]}
FUZZED = {RECORD: Reader("text", given(json.dumps(ROLLED_BACK).encode()), read_diverged)}
