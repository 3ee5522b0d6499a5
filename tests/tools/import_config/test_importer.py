"""Which trainer a config is of."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from foreign_configs import SAMPLES, imported
from fuzz_samples import Reader, given
from messages import refused

from titanlite.config.load import load_config
from titanlite.config.to_toml import to_toml
from titanlite.model.flavors import resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.tools.import_config.importer import NAMES, by_name, detect, import_config
from titanlite.tools.import_config.translate import to_toml as draft_to_toml


@pytest.mark.parametrize("name", NAMES)
def test_each_sample_is_detected_by_its_content(name, tmp_path):
    ending, text = SAMPLES[name]
    (tmp_path / f"a.{ending}").write_text(text)
    form, _ = import_config(tmp_path / f"a.{ending}", processes=16)
    assert form.name == name


def test_a_format_can_be_asked_for(tmp_path):
    assert by_name("trainer").title == "TrainingArguments"
    with refused("--format megatrn", "deepspeed", "did you mean megatron?"):
        import_config(tmp_path / "missing.json", "megatrn")


def test_a_config_of_ours_and_one_of_an_unknown_trainer(tmp_path):
    (tmp_path / "ours.toml").write_text(to_toml(load_config(["debug"])))
    with refused("ours.toml", "a config of titanlite", "--print-config` checks it"):
        import_config(tmp_path / "ours.toml")
    with refused("2 keys", "torchtitan 0.2.2", "--format"):
        detect({"colour": 1, "size": 2})


@pytest.mark.parametrize(
    "table",
    [
        {"base_model": "m", "adapter": "lora", "sequence_len": 64, "micro_batch_size": 2,
         "optimizer": "adamw", "num_epochs": 3, "lr_scheduler": "cosine"},
        {"model": {"type": "llama"}},
        {"model": {"type": "llama", "size": "7b"}, "optimizer": {"name": "adamw"}},
    ],
)  # fmt: skip
def test_a_config_of_which_little_is_known_is_refused(table):
    with refused("keys are those of no trainer", "TrainingArguments", "--format", "megatron"):
        detect(table)


def test_every_problem_has_the_name_of_the_file(tmp_path):
    (tmp_path / "a.json").write_text('{"train_batch_size": 8, "stage": 3, "wrong": 1}')
    with refused("a.json: stage = 3", "a.json: wrong = 1"):
        import_config(tmp_path / "a.json", "deepspeed")


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_of_each_sample_is_allowed_for_its_processes(name, tmp_path):
    config, _ = imported(tmp_path, name)
    if name == "trainer":
        return  # its model is in a folder of weights
    degrees = check_layout(config, resolve_flavor(config.model, 4096), 16)
    assert math.prod(degrees.values()) == 16


def import_and_load(folder: Path, data: bytes) -> None:
    """Loads what is imported."""
    (folder / "foreign").write_bytes(data)
    form, draft = import_config(folder / "foreign", processes=64)
    (folder / "run.toml").write_text(draft_to_toml(draft, "foreign", form))
    load_config([str(folder / "run.toml")])


FUZZED = {
    "config of another trainer": Reader(
        "text", given(*(text.encode() for _, text in SAMPLES.values())), import_and_load
    ),
}
