"""Flavors: exact parameter counts, and shapes that are refused."""

from __future__ import annotations

import pytest
import torch
from messages import assert_mentions

from titanlite.config.schema import ModelConfig
from titanlite.model.flavors import resolve_flavor
from titanlite.model.llama import Llama
from titanlite.runtime.errors import ConfigError


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
