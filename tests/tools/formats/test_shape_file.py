"""Shapes from files: read back as they were written, and refused if no model can have them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from titanlite.model.flavors import FLAVORS, LlamaConfig, RopeScaling
from titanlite.tools.formats.shape_file import MOST_POSITIONS, from_json, sequence_length

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
    if (field, value) in (("num_experts", 0), ("num_experts", 9)):
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
