"""What a run does without `tools/`: an error that says so, or nothing."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from messages import refused

from titanlite.bridge import tools
from titanlite.config.schema import (
    FROM_CHECKPOINT,
    CheckpointConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    TrainingConfig,
)
from titanlite.model.flavors import resolve_flavor
from titanlite.runtime.errors import LAUNCHED
from titanlite.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def _without_tools(monkeypatch):
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    monkeypatch.setattr(tools.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(tools, "broadcast", lambda value, patience: value)
    monkeypatch.setattr(tools, "broadcast_from_rank0", lambda function: function())
    monkeypatch.delenv(LAUNCHED, raising=False)


@pytest.mark.usefixtures("_without_tools")
def test_what_a_run_needs_is_an_error_that_says_so(tmp_path):
    flavor = Config(model=ModelConfig(flavor=FROM_CHECKPOINT))
    with refused("model.flavor = from_checkpoint", "titanlite/tools"):
        tools.adopt_model(flavor)
    text = tmp_path / "a.txt"
    text.write_text("a text")
    with refused(f"data.path = '{text}'", "titanlite/tools"):
        tools.prepared_folders(DataConfig(path=str(text)), Tokenizer())
    source = Config(checkpoint=CheckpointConfig(initial_load="model.pt"))
    llama = resolve_flavor(source.model, 4112)
    with refused("checkpoint.initial_load", "titanlite/tools"):
        tools.load_initial_weights(source, [], llama, Tokenizer(), resumed=False)
    adapted = dataclasses.replace(source, lora=LoraConfig(rank=4))
    with refused("checkpoint.initial_load", "titanlite/tools"):
        tools.frozen_fingerprint(adapted)


@pytest.mark.usefixtures("_without_tools")
def test_what_only_adds_to_a_run_is_left_out(tmp_path, caplog):
    config = Config(training=TrainingConfig(steps=3), checkpoint=CheckpointConfig(export="hf"))
    tools.write_report(tmp_path)
    with caplog.at_level(logging.WARNING, "titanlite"):
        tools.write_export(config, tmp_path, step=3)
    assert "checkpoint.export needs titanlite/tools" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_reads_no_initial_weights_without_adapters():
    config = Config(checkpoint=CheckpointConfig(initial_load="no/such/file"))
    llama = resolve_flavor(config.model, 4112)
    tools.load_initial_weights(config, [], llama, Tokenizer(), resumed=True)
    assert tools.frozen_fingerprint(config) == ""
