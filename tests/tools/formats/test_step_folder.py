"""Step folders, read without their run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from checkpoints import write_step
from messages import refused
from model_builder import SMALL, assert_equal_bits, small_model

from titanlite.checkpoint.manifest import RunMetadata
from titanlite.tools.formats.step_folder import is_step_folder, model_of, open_step

TRAINING = {"norm.weight.exp_avg": torch.arange(4.0)}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with steps 3 and 7."""
    files = {"model.json": SMALL.to_json().encode()}
    facts = RunMetadata({"dp_shard": 2, "tp": 1}, {"training": {"seq_len": 16}}, "f" * 64)
    for step in (3, 7):
        state = {"model": small_model(config=SMALL, seed=step).state_dict(), "optimizer": TRAINING}
        write_step(tmp_path / "run/checkpoints", step, state, files, facts)
    return tmp_path / "run"


def test_a_run_means_its_newest_step_and_step_another_one(run):
    newest = open_step(run, None)
    assert newest.path == run / "checkpoints/step-7"
    assert_equal_bits(small_model(config=SMALL, seed=7).state_dict(), newest)
    older = open_step(run, 3)
    assert (older.about.step, older.about.seq_len, older.model) == (3, 16, SMALL)
    assert_equal_bits(small_model(config=SMALL, seed=3).state_dict(), older)
    with refused("--step 4: not in", "allowed: 3, 7"):
        open_step(run, 4)


def test_training_state_and_description_are_beside_the_weights(run):
    full = open_step(run / "checkpoints/step-3", None)
    assert list(full.others) == ["optimizer.norm.weight.exp_avg"]
    assert torch.equal(full.others["optimizer.norm.weight.exp_avg"].read(), torch.arange(4.0))
    assert full.about.layout == "dp_shard 2"
    assert full.about.files["model.json"] == SMALL.to_json().encode()
    assert full.about.tokenizer is None


def test_what_is_a_step_folder(run, tmp_path):
    paths = (run, run / "checkpoints", run / "checkpoints/step-3")
    assert all(map(is_step_folder, paths))
    (tmp_path / "other/step-3.tmp-0").mkdir(parents=True)  # of a save that was killed
    assert not is_step_folder(tmp_path / "other")
    assert not is_step_folder(tmp_path / "absent")
    assert not is_step_folder(Path("x" * 5000))


def test_a_file_that_is_absent_is_named(run):
    (run / "checkpoints/step-7/model.json").unlink()
    with refused(str(run / "checkpoints/step-7/model.json")):
        open_step(run, None)


def test_a_description_must_be_a_model_s():
    assert model_of(Path("x"), None) is None
    assert model_of(Path("x"), SMALL.to_json().encode()) == SMALL
    fields = dataclasses.asdict(SMALL)
    del fields["dim"]
    for content in (b"", b"[]", json.dumps(fields).encode()):
        with refused("model.json", "not titanlite's description of a model"):
            model_of(Path("model.json"), content)
