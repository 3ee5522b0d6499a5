"""What is recorded of divergences and rollbacks, and when a command is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from text_in_memory import Documents, Ranks, only_source

from titanlite.checkpoint.divergence import MAX_ATTEMPTS, apply_record, react, read_record
from titanlite.checkpoint.manifest import CorruptCheckpoint, FileEntry
from titanlite.checkpoint.resume import EXCLUDED, exclude_samples, read_excluded
from titanlite.checkpoint.storage import RECORD
from titanlite.config.schema import TrainingConfig
from titanlite.data.stream import TrainStream, Windows
from titanlite.runtime.errors import ConfigError

ROLLBACK = {"step": 5, "first": 32, "end": 40}


def make_run(folder: Path, steps: list[int], resumed: int = 0, **config) -> SimpleNamespace:
    """What the functions use of a Checkpointer, with empty checkpoints."""
    for step in steps:
        (folder / f"checkpoints/step-{step}").mkdir(parents=True)
    return SimpleNamespace(
        run_folder=folder,
        folder=folder / "checkpoints",
        resumed=resumed,
        config=SimpleNamespace(load_step=0),
        facts=SimpleNamespace(config={"optimizer": {"lr": 1e-3}, **config}),
        guard=None,
        extra_files={},
        close=lambda: None,
        states={
            "data": TrainStream(
                only_source(Windows(Documents([1001]), 10, "text")),
                TrainingConfig(seq_len=10),
                Ranks(),
                document_mask=False,
            )
        },
    )


def test_a_command_is_refused_after_so_many_divergences(tmp_path):
    run = make_run(tmp_path, [4])
    for attempt in range(1, MAX_ATTEMPTS + 1):
        apply_record(run)
        message = react(run, 5, "step 5: the gradient norm is nan", None)
        assert message.startswith(
            "step 5: the gradient norm is nan: training has diverged; the same command resumes"
        )
        assert ("the same command will be refused" in message) == (attempt == MAX_ATTEMPTS)
    with pytest.raises(
        ConfigError,
        match=r"diverged 5 times.*step 4, the last time at step 5: the gradient norm is nan",
    ):
        apply_record(run)


def write_excluded(folder: Path, content: bytes) -> SimpleNamespace:
    (folder / EXCLUDED).write_bytes(content)
    return SimpleNamespace(
        files={EXCLUDED: FileEntry(len(content), hashlib.sha256(content).hexdigest())}
    )


@pytest.mark.parametrize("change", ["a setting", "a newer checkpoint", "no record"])
def test_a_change_allows_more_attempts(tmp_path, change):
    run = make_run(tmp_path, [4])
    for _ in range(MAX_ATTEMPTS):
        react(run, 5, "step 5", None)
    if change == "a setting":
        run.facts.config["optimizer"] = {"lr": 1e-4}
    elif change == "a newer checkpoint":
        (tmp_path / "checkpoints/step-6").mkdir()
    else:
        (tmp_path / RECORD).unlink()
    apply_record(run)
    react(run, 7, "step 7", None)
    assert read_record(tmp_path).attempts == 1
    apply_record(run)


def test_a_checkpoint_that_is_renamed_is_no_progress(tmp_path):
    """Each attempt ends in the step after a resumed one, which is renamed: the newest checkpoint
    becomes older.
    """
    run = make_run(tmp_path, [1, 2, 3, 4, 5])
    for resumed, attempts in ((0, 1), (5, 2), (4, 3), (3, 4)):
        run.resumed = resumed
        react(run, 6, "step 6", None)
        record = read_record(tmp_path)
        assert (record.attempts, record.newest) == (attempts, 5)
    assert not (tmp_path / "checkpoints/step-3").exists()


@pytest.mark.parametrize("older", [{}, {"resumed": 4}])
def test_excluded_samples_are_read_from_the_record(tmp_path, older):
    run = make_run(tmp_path, [])
    apply_record(run)
    assert run.states["data"].order.number(32) == 32
    (tmp_path / RECORD).write_text(json.dumps({"rollbacks": [ROLLBACK | older]}))
    run.guard = SimpleNamespace(rollbacks=0)
    apply_record(run)
    assert run.states["data"].order.number(32) == 40
    assert run.guard.rollbacks == 1


def test_samples_of_the_record_and_of_a_checkpoint_are_excluded(tmp_path):
    run = make_run(tmp_path, [])
    exclude_samples(run, [(8, 12)])
    exclude_samples(run, [[32, 40], [10, 16]])
    exclude_samples(run, [])
    assert run.states["data"].order.excluded == [(8, 16), (32, 40)]
    manifest = write_excluded(tmp_path, run.extra_files[EXCLUDED])
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
    run = make_run(tmp_path, [4])
    (tmp_path / RECORD).write_text("{")
    assert "training has diverged" in react(run, 5, "step 5: the gradient norm is nan", None)
