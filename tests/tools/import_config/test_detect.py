"""Which trainer a config is of, and what all tables have in common."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from foreign_configs import SAMPLES, imported
from fuzz_samples import Reader, given
from messages import refused

from titanlite.config.foreign import foreign_key
from titanlite.config.keys import all_keys
from titanlite.config.load import load_config
from titanlite.config.to_toml import to_toml
from titanlite.model.flavors import resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.tools.import_config import mapping
from titanlite.tools.import_config.detect import FORMATS, NAMES, by_name, detect, import_config
from titanlite.tools.import_config.mapping import translate


@pytest.mark.parametrize("name", NAMES)
def test_each_sample_is_detected_by_its_content(name, tmp_path):
    ending, text = SAMPLES[name]
    (tmp_path / f"a.{ending}").write_text(text)
    form, draft = import_config(tmp_path / f"a.{ending}")
    assert form.name == name
    assert not any("not known to the importer" in text for text in draft.lacks)


def test_a_format_can_be_asked_for():
    assert by_name("olmo").title == "OLMo"
    with refused("--format olmoe", "deepspeed", "did you mean olmo?"):
        by_name("olmoe")


def test_a_config_of_ours_and_one_of_an_unknown_trainer(tmp_path):
    (tmp_path / "ours.toml").write_text(to_toml(load_config(["debug"])))
    with refused("ours.toml", "a config of titanlite"):
        import_config(tmp_path / "ours.toml")
    with refused("b.json", "2 keys", "torchtitan", "--format"):
        detect(tmp_path / "b.json", {"colour": 1, "size": 2})


@pytest.mark.parametrize(
    "entries",
    [
        {"base_model": "m", "adapter": "lora", "sequence_len": 64, "micro_batch_size": 2,
         "optimizer": "adamw", "num_epochs": 3, "lr_scheduler": "cosine"},
        {"model.type": "llama"},
        {"model.type": "llama", "model.size": "7b"},
    ],
)  # fmt: skip
def test_a_config_of_which_little_is_known_is_refused(entries, tmp_path):
    path = tmp_path / "a.yaml"
    with refused("a.yaml", f"{len(entries)} keys", "TrainingArguments", "--format", "megatron"):
        detect(path, entries)


def test_keys_that_are_off_do_not_make_a_config_unknown(tmp_path):
    silent = {f"other_{number}": None for number in range(30)}
    entries = {"output_dir": "o", "per_device_train_batch_size": 2, **silent}
    assert detect(tmp_path / "a.json", entries).name == "trainer"


@pytest.mark.parametrize("name", NAMES)
def test_the_length_is_to_be_decided_where_a_config_has_none(name):
    said = "\n".join(translate({"seed": 1}, by_name(name)).decisions)
    has_default = name == "torchtitan"
    assert (
        "training.seq_len: the config does not say it; the default is 256" in said
    ) != has_default


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_each_row_of_a_table_names_keys_that_exist_and_is_alone(form):
    theirs = [name for row in form.rows for name in row.theirs.split()]
    assert sorted(set(theirs)) == sorted(theirs), "a key has one row"
    for row in form.rows:
        assert set(row.ours.split()) <= set(all_keys())
        assert row.ours or row.note, "a key without an equal has a reason"
        assert row.apply is not None or len(row.ours.split()) < 2


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_the_suggestions_for_a_typed_key_agree_with_the_tables(form):
    """`config/foreign.py` answers one key, by its last word, without knowing the trainer."""
    for row in form.rows:
        if row.apply is not None or not row.ours:
            continue
        for name in row.theirs.split():
            here = foreign_key(name)
            if here:
                assert row.ours in here, name


PROCESSES = {
    "deepspeed": 4,
    "megatron": 512,
    "torchtitan": 16,
    "olmo": 64,
    "neox": 16,
    "nanotron": 16,
}


@pytest.mark.parametrize("name", PROCESSES)
def test_the_layout_of_each_sample_is_allowed_for_its_processes(name, tmp_path):
    config, _ = imported(tmp_path, name, processes=PROCESSES[name])
    degrees = check_layout(config, resolve_flavor(config.model, 4096), PROCESSES[name])
    assert math.prod(degrees.values()) == PROCESSES[name]


def import_and_load(folder: Path, data: bytes) -> None:
    """What is imported can be loaded."""
    (folder / "foreign").write_bytes(data)
    form, draft = import_config(folder / "foreign", processes=64)
    (folder / "run.toml").write_text(mapping.to_toml(draft, "foreign", form))
    load_config([str(folder / "run.toml")])


FUZZED = {
    "config of another trainer": Reader(
        "text", given(*(text.encode() for _, text in SAMPLES.values())), import_and_load
    ),
}
