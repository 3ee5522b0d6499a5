"""Parameter groups by name: what they set, and patterns that are refused."""

from __future__ import annotations

import pytest
from messages import assert_mentions, refused
from model_builder import small_model

from titanlite.config.load import load_config
from titanlite.config.schema import Config, GroupConfig, OptimizerConfig, ScheduleConfig
from titanlite.config.to_toml import to_toml
from titanlite.model.flavors import resolve_flavor
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.schedule import Schedule
from titanlite.rules.check import check_layout
from titanlite.runtime.errors import ConfigError

HEAD = """
[optimizer]
lr = 0.1
decayed = "linear"
"""
THREE = """
[[optimizer.groups]]
pattern = "layers.0.*"
lr = 0.01

[[optimizer.groups]]
pattern = "layers.*.w?.weight"
weight_decay = 0.5

[[optimizer.groups]]
pattern = "*norm.weight"
lr = 0
weight_decay = 0
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str) -> Config:
        (tmp_path / "run.toml").write_text(HEAD + text)
        return load_config([str(tmp_path / "run.toml")])

    return load


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_first_group_that_fits_sets_rate_and_decay(load, name):
    config = load(f'name = "{name}"\n' + THREE)
    model = small_model()
    optimizer = build_optimizer([model], config.optimizer)
    schedule = Schedule(optimizer, ScheduleConfig(warmup_steps=4), config.optimizer.lr, 100)
    assert schedule.set_lr(2) == pytest.approx(0.05)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        names[id(p)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert len(found) == len(names)
    assert found["layers.0.attention.wq.weight"] == pytest.approx((0.005, 0.1))
    assert found["layers.0.attention_norm.weight"] == pytest.approx((0.005, 0.0))
    assert found["layers.1.feed_forward.w1.weight"] == pytest.approx((0.05, 0.5))
    assert found["layers.1.ffn_norm.weight"] == found["norm.weight"] == (0.0, 0.0)
    assert found["tok_embeddings.weight"] == pytest.approx((0.05, 0.0))
    assert found["output.weight"] == pytest.approx((0.05, 0.1))


def test_groups_are_written_and_read_back(load, tmp_path):
    config = load(THREE)
    assert config.optimizer.groups[1] == GroupConfig("layers.*.w?.weight", None, 0.5)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config([str(tmp_path / "again.toml")]) == config
    assert OptimizerConfig().groups == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("optimizer.groups[1].pattern is missing", "layers.*.weight")),
        (
            'pattern = "layer.*.attention.wq.weight"',
            ("groups[1].pattern", "did you mean layers.*.attention.wq.weight?"),
        ),
        (
            'pattern = "zzz"',
            (
                "groups[1]",
                '"zzz" fits no parameter',
                "tok_embeddings.weight",
                "layers.*.ffn_norm.weight",
            ),
        ),
        # Tied embeddings have none
        ('pattern = "output.weight"', ('"output.weight" fits no parameter',)),
        (
            'pattern = "*"\n[[optimizer.groups]]\npattern = "norm.*"',
            ("groups[2]", "earlier groups"),
        ),
        ('pattern = "*"\nlr = -0.5', ("optimizer.groups[1].lr = -0.5", "at least 0")),
        ('patern = "*"', ("unknown key patern", "did you mean pattern?")),
    ],
)
def test_mistakes_are_reported(load, text, expected):
    with pytest.raises(ConfigError) as caught:
        config = load(f"[[optimizer.groups]]\n{text}\n")
        check_layout(config, resolve_flavor(config.model, 4112), 1)
    assert_mentions(str(caught.value), *expected)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--training.frozen=layers.9.*"],
            ["training.frozen", "'layers.9.*'", "fits no parameter"],
        ),
        (["--training.frozen=*"], ["training.frozen = *", "nothing is left"]),
        (["--training.frozen=norm.weight", "--lora.rank=2"], ["lora.rank", "leave it out"]),
        (
            ["--training.frozen=tok_embeddings.*, layers.0.*", "--parallel.pp=2"],
            ["training.frozen", "pipeline stage", "block 0"],
        ),
    ],
)
def test_frozen_parameters_that_cannot_be(options, words):
    config = load_config(["debug", *options])
    with refused(*words):
        check_layout(config, resolve_flavor(config.model, 4112), config.parallel.pp)
