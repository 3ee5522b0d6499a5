"""Flavors: exact parameter counts, and shapes that are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from messages import assert_mentions

from titanlite.config.schema import ConfigError, ModelConfig
from titanlite.model.flavors import FLAVORS, LlamaConfig, RopeScaling, resolve_flavor
from titanlite.model.llama import Llama


@pytest.mark.parametrize(
    ("flavor", "count"),
    [
        ("debug", 1_264_768),
        ("cpu_25m", 25_707_008),
        ("llama3_1b", 1_235_814_400),
        ("llama3_3b", 3_212_749_824),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_exact_parameter_counts(flavor, count):
    config = resolve_flavor(ModelConfig(flavor=flavor), 4112)
    assert config.num_parameters == count
    with torch.device("meta"):
        model = Llama(config, 16)
    assert sum(p.numel() for p in model.parameters()) == count


def test_impossible_shapes_are_named():
    section = ModelConfig(flavor="debug", dim=130, num_heads=4, num_kv_heads=3, vocab_size=10)
    with pytest.raises(ConfigError) as caught:
        resolve_flavor(section, 4112)
    text = str(caught.value)
    assert_mentions(text, "model.dim = 130", "model.num_heads = 4")
    assert_mentions(text, "model.num_kv_heads = 3", "model.num_heads = 4", "1, 2, 4")
    assert_mentions(text, "model.vocab_size = 10", "debug", "4112")


IMPOSSIBLE = ["x", 0, -1, None, 10**400, float("inf"), float("nan"), [], {}, True, 1e308]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LlamaConfig) if f.name != "tied_embeddings"])
@pytest.mark.parametrize("value", IMPOSSIBLE, ids=lambda value: f"{value!r:.12}")
def test_what_no_model_can_have_is_refused(field, value):
    if field == "rope_scaling" and not value:
        return  # none
    fields = json.loads(FLAVORS["llama3_1b"].to_json()) | {field: value}
    with pytest.raises((ValueError, TypeError)):
        LlamaConfig.from_json(json.dumps(fields))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(RopeScaling)])
@pytest.mark.parametrize("value", IMPOSSIBLE, ids=lambda value: f"{value!r:.12}")
def test_impossible_scaling_is_refused(field, value):
    fields = json.loads(FLAVORS["llama3_1b"].to_json())
    fields["rope_scaling"][field] = value
    with pytest.raises(ValueError, match=field):
        LlamaConfig.from_json(json.dumps(fields))


def test_a_config_is_read_back():
    for config in FLAVORS.values():
        if config.vocab_size:
            assert LlamaConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="num_layers"):
        LlamaConfig.from_json(dataclasses.replace(FLAVORS["llama3_1b"], num_layers=2**20).to_json())
