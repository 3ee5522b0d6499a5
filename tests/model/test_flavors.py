"""Flavors: exact parameter counts, and shapes that are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from messages import assert_mentions, refused

from titanlite.config.schema import ModelConfig
from titanlite.model.flavors import (
    FLAVORS,
    RopeScaling,
    layer_numbers,
    layer_ranges,
    parameter_shapes,
    resolve_flavor,
)
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
        ("llama2_7b", 6_738_415_616),
        ("mistral_7b", 7_248_023_552),
        ("mistral_7b_v0.1", 7_241_732_096),
        ("smollm2_135m", 134_515_008),
        ("smollm2_360m", 361_821_120),
        ("smollm2_1.7b", 1_711_376_384),
        ("qwen2.5_0.5b", 494_032_768),
        ("qwen2.5_1.5b", 1_543_714_304),
        ("qwen2.5_7b", 7_615_616_512),
        ("qwen3_0.6b", 596_049_920),
        ("qwen3_1.7b", 1_720_574_976),
        ("qwen3_8b", 8_190_735_360),
    ],
)
def test_exact_parameter_counts(flavor, count):
    config = resolve_flavor(ModelConfig(flavor=flavor), 4112)
    assert config.num_parameters == count
    with torch.device("meta"):
        model = Llama(config, 16)
    assert sum(p.numel() for p in model.parameters()) == count
    shapes = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    if config.tied_embeddings:
        shapes.pop("output.weight", None)
    assert shapes == parameter_shapes(config)
    assert list(shapes) == list(parameter_shapes(config))


def test_keys_change_the_flavor():
    section = ModelConfig(
        flavor="debug",
        head_dim=48,
        qkv_bias=True,
        qk_norm=True,
        rope_theta=1e4,
        norm_eps=1e-6,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_context=64,
    )
    config = resolve_flavor(section, 4112)
    assert config == dataclasses.replace(
        FLAVORS["debug"],
        vocab_size=4112,
        explicit_head_dim=48,
        qkv_bias=True,
        qk_norm=True,
        rope_theta=1e4,
        norm_eps=1e-6,
        rope_scaling=RopeScaling(4.0, original_context=64, kind="yarn"),
    )
    # The width that dim and num_heads give is not another model
    same = resolve_flavor(ModelConfig(flavor="debug", head_dim=32), 4112)
    assert same == resolve_flavor(ModelConfig(flavor="debug"), 4112)
    # Off, where the flavor has it
    plain = resolve_flavor(ModelConfig(flavor="qwen3_0.6b", qk_norm=False), 4112)
    assert not plain.qk_norm
    assert (
        resolve_flavor(ModelConfig(flavor="llama3_1b", rope_scaling="none"), 9).rope_scaling is None
    )
    longer = resolve_flavor(ModelConfig(flavor="llama3_1b", rope_factor=64.0), 9)
    assert longer.rope_scaling == RopeScaling(64.0)


def test_windows():
    """The window of each block, in sequences of some length."""
    mistral = resolve_flavor(ModelConfig(flavor="mistral_7b_v0.1"), 100)
    assert mistral.windows(4097) == [4096] * 32
    assert mistral.windows(4096) == [0] * 32
    off = resolve_flavor(ModelConfig(flavor="mistral_7b_v0.1", sliding_window=0), 100)
    assert off == dataclasses.replace(mistral, sliding_window=0)
    section = ModelConfig(flavor="debug", sliding_window=8, window_layers="1,2-3")
    some = resolve_flavor(section, 100)
    assert (some.sliding_window, some.window_layers) == (8, "1-3")
    assert some.windows(9) == [0, 8, 8, 8]
    everywhere = resolve_flavor(dataclasses.replace(section, window_layers="0, 1-2, 3"), 100)
    assert everywhere.window_layers == "all"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6]),
        ("", []),
        ("0", [0]),
        ("0-2, 5", [0, 1, 2, 5]),
        ("1 3-3,6", [1, 3, 6]),
    ],
)
def test_numbers_of_layers(text, numbers):
    assert layer_numbers(text, 7) == numbers
    assert layer_numbers(layer_ranges(numbers, 7), 7) == numbers


@pytest.mark.parametrize("text", ["7", "2-1", "1, 1", "3, 0-1", "-1", "x", "0-", "100000", "0.5"])
def test_what_is_no_list_of_layers(text):
    with pytest.raises(ValueError, match="ascending numbers from 0 to 6"):
        layer_numbers(text, 7)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"head_dim": 7}, ("model.head_dim = 7", "even")),
        ({"rope_scaling": "yarn"}, ("model.rope_scaling = yarn", "model.rope_factor = 0")),
        ({"rope_factor": 4.0}, ("model.rope_factor", "no scaling", "llama3, linear, yarn")),
        ({"window_layers": "0-1"}, ("model.window_layers = '0-1'", "model.sliding_window = 0")),
        (
            {"window_layers": "", "sliding_window": 8},
            ("model.window_layers = ''", "model.sliding_window = 8", "all"),
        ),
        (
            {"window_layers": "0-4", "sliding_window": 8},
            ("model.window_layers = '0-4'", "from 0 to 3", "0-3"),
        ),
    ],
    ids=str,
)
def test_keys_that_do_not_fit_are_named(fields, parts):
    with refused(*parts):
        resolve_flavor(ModelConfig(flavor="debug", **fields), 4112)


def test_impossible_shapes_are_named():
    section = ModelConfig(flavor="debug", dim=130, num_heads=4, num_kv_heads=3, vocab_size=10)
    with pytest.raises(ConfigError) as caught:
        resolve_flavor(section, 4112)
    text = str(caught.value)
    assert_mentions(text, "model.dim = 130", "model.num_heads = 4")
    assert_mentions(text, "model.num_kv_heads = 3", "model.num_heads = 4", "1, 2, 4")
    assert_mentions(text, "model.vocab_size = 10", "debug", "4112")
