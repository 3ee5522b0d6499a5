"""Step folders, read without their run, and the shape of the model in them."""

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
from titanlite.model.flavors import FLAVORS, LlamaConfig, RopeScaling
from titanlite.tools.formats.shape_file import MOST_POSITIONS, from_json, sequence_length
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
    assert full.about.layout == "dp_shard=2"
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


IMPOSSIBLE = ["x", 0, -1, None, 10**400, float("inf"), float("nan"), [], {}, True, 1e308]

# 0 is the width that dim and num_heads give, and the factor that YaRN's authors propose
VALID = [
    ("explicit_head_dim", 0),
    ("qkv_bias", True),
    ("qk_norm", True),
    ("attention_factor", 0),
    ("sliding_window", 0),
    ("num_experts", 0),
    ("experts_per_token", 0),
    ("expert_ffn_dim", 0),
]


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(LlamaConfig) if f.name != "tied_embeddings"]
)
@pytest.mark.parametrize("value", IMPOSSIBLE, ids=lambda value: f"{value!r:.12}")
def test_what_no_model_can_have_is_refused(field, value):
    if field == "rope_scaling" and not value:
        return  # none
    if (field, value) in VALID:
        return
    fields = json.loads(FLAVORS["llama3_1b"].to_json()) | {field: value}
    with pytest.raises((ValueError, TypeError)):
        from_json(json.dumps(fields))


@pytest.mark.parametrize("field", ["num_experts", "experts_per_token", "expert_ffn_dim"])
@pytest.mark.parametrize("value", [*IMPOSSIBLE, 9], ids=lambda value: f"{value!r:.12}")
def test_impossible_experts_are_refused(field, value):
    fields = json.loads(FLAVORS["debug_moe"].to_json()) | {"vocab_size": 4112}
    assert from_json(json.dumps(fields)).experts_per_token == 2
    if (field, value) in (("num_experts", 0), ("num_experts", 9), ("expert_ffn_dim", 9)):
        return
    with pytest.raises((ValueError, TypeError)):
        from_json(json.dumps(fields | {field: value}))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(RopeScaling)])
@pytest.mark.parametrize("value", IMPOSSIBLE, ids=lambda value: f"{value!r:.12}")
def test_impossible_scaling_is_refused(field, value):
    if (field, value) in VALID:
        return
    fields = json.loads(FLAVORS["llama3_1b"].to_json())
    fields["rope_scaling"][field] = value
    with pytest.raises(ValueError, match=field):
        from_json(json.dumps(fields))


def test_a_config_is_read_back():
    for config in FLAVORS.values():
        if config.vocab_size:
            assert from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="num_layers"):
        from_json(dataclasses.replace(FLAVORS["llama3_1b"], num_layers=2**20).to_json())


def test_windows():
    """Written in one way, and of older files none."""
    config = dataclasses.replace(FLAVORS["llama3_1b"], sliding_window=64, window_layers="1, 2-5")
    assert from_json(config.to_json()) == dataclasses.replace(config, window_layers="1-5")
    none = dataclasses.replace(config, window_layers="")
    assert from_json(none.to_json()) == FLAVORS["llama3_1b"]
    fields = json.loads(FLAVORS["llama3_1b"].to_json())
    del fields["sliding_window"]
    del fields["window_layers"]
    assert from_json(json.dumps(fields)) == FLAVORS["llama3_1b"]
    with pytest.raises(ValueError, match="from 0 to 15"):
        from_json(dataclasses.replace(config, window_layers="3-16").to_json())


@pytest.mark.parametrize("value", [*IMPOSSIBLE, MOST_POSITIONS + 1, 1 << 62])
def test_a_length_of_which_no_table_can_be_made_is_none(value):
    assert sequence_length(value) == 0
    assert sequence_length(MOST_POSITIONS) == MOST_POSITIONS
