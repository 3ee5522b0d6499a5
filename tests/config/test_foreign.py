"""Keys and values of other trainers, typed into a config of ours."""

from __future__ import annotations

import re

import pytest
from messages import assert_mentions

from titanlite.config.foreign import FULL_NAMES, KEYS, VALUES, foreign_key, foreign_value
from titanlite.config.keys import all_keys, schema_keys
from titanlite.config.load import load_config
from titanlite.config.values import convert
from titanlite.runtime.errors import ConfigError


def problem(*options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["debug", *options])
    (only,) = caught.value.problems
    return only


def test_the_table_of_keys_names_keys_that_exist_and_none_of_ours_as_foreign():
    names = [name for words in KEYS.values() for name in words.split()]
    assert len(set(names)) == len(names), "one meaning for each name"
    assert all(name == name.lower() and "-" not in name for name in names)
    own = {name.partition(".")[2] for name in all_keys()}
    assert not own & set(names)
    for here in KEYS:
        mentioned = re.findall(r"\b[a-z]\w*\.[a-z]\w+", here)
        assert set(mentioned) <= set(all_keys())
        assert mentioned or "torchrun" in here


def test_the_table_of_values_has_allowed_values_and_refused_words():
    for name, values in VALUES.items():
        key = schema_keys()[name]
        words = [word for line in values.values() for word in line.split()]
        assert len(set(words)) == len(words)
        for ours in values:
            assert convert(ours, key).expected == ""
        if key.choices:
            assert not set(words) & set(key.choices)


@pytest.mark.parametrize(
    ("typed", "here"),
    [
        ("max_steps", "training.steps"),
        ("training.max_steps", "training.steps"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("per_device_train_batch_size", "training.local_batch_size"),
        ("gradient_accumulation_steps", "training.global_batch_size"),
        ("tensor_parallel_degree", "parallel.tp"),
        ("tensor-model-parallel-size", "parallel.tp"),
        ("zero_stage", "parallel.reshard_after_forward"),
        ("bf16", 'training.compute_dtype = "bfloat16"'),
        ("fp16", 'training.compute_dtype = "float16"'),
        ("warmup_ratio", "schedule.warmup_ratio"),
        ("training.warmup_ratio", "schedule.warmup_ratio"),
        ("save_total_limit", "checkpoint.keep"),
        ("report_to", "metrics.sinks"),
        ("gradient_checkpointing", "recompute.mode"),
    ],
)
def test_a_foreign_key_is_answered_with_ours(typed, here):
    assert_mentions(problem(f"--{typed}=1"), f"unknown key {typed}", here)


@pytest.mark.parametrize("typed", ["model.name", "model.Model-Type", "model.size"])
def test_a_name_whose_last_word_is_ours_counts_with_its_section(typed):
    assert_mentions(problem(f"--{typed}=llama3"), f"unknown key {typed}", "model.flavor")
    assert foreign_key(typed.partition(".")[2]) == foreign_key("optimizer.name") == ""
    names = [name for words in FULL_NAMES.values() for name in words.split()]
    assert not set(names) & set(all_keys())


@pytest.mark.parametrize(
    ("key", "value", "here"),
    [
        ("model.flavor", "8B", "did you mean llama3_8b or qwen3_8b?"),
        ("model.flavor", "405b", "did you mean llama3_405b?"),
        ("optimizer.name", "AdamW", "did you mean adamw"),
        ("optimizer.name", "FusedAdam", "here that is adamw"),
        ("schedule.name", "WarmupDecayLR", "here that is linear"),
        ("training.compute_dtype", "bf16", "here that is bfloat16"),
        ("parallel.pp_schedule", "1f1b", "did you mean 1F1B"),
    ],
)
def test_a_foreign_value_is_answered_with_ours(key, value, here):
    assert_mentions(problem(f"--{key}={value}"), f'{key} = "{value}"', here)


def test_foreign_tables_and_keys_of_a_file_are_answered_with_their_line(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("max_steps = 3\n[zero_optimization]\nstage = 2\n[recompute]\nmode = true\n")
    with pytest.raises(ConfigError) as caught:
        load_config([str(path)])
    steps, zero, mode = caught.value.problems
    assert_mentions(steps, "a.toml", "unknown key max_steps", "training.steps")
    assert_mentions(zero, "a.toml:2", "[zero_optimization]", '"never" for ZeRO-2')
    assert_mentions(mode, "a.toml:5", "here that is full")


def test_other_names_are_not_in_the_tables():
    assert foreign_key("training.stepz") == foreign_key("") == ""
    assert foreign_value("optimizer.name", "lion") == foreign_value("a.b", "adam") == ""
