"""No field of another trainer is passed over: each is a row, or makes no file.

The lists of fields are the other programs' own, so a row that is missing, mistyped or has another
default fails here.
"""

from __future__ import annotations

import dataclasses
import json
import re

import foreign_configs
import foreign_fields
import pytest
from foreign_configs import torchtitan_run
from transformers import TrainingArguments

from titanlite.config.keys import all_keys
from titanlite.runtime.errors import ConfigError
from titanlite.tools.import_config.draft import REQUIRED, Draft
from titanlite.tools.import_config.importer import FORMATS, NAMES, by_name
from titanlite.tools.import_config.read_config import flatten, read_arguments
from titanlite.tools.import_config.table import ANY, Format, read_fields
from titanlite.tools.import_config.translate import translate


def arguments_of_transformers() -> dict[str, object]:
    """The fields of TrainingArguments with their defaults; enums as their text."""
    defaults = {}
    for field in dataclasses.fields(TrainingArguments):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        defaults[field.name] = getattr(default, "value", default)
    return defaults


def written_down(text: str) -> dict[str, object]:
    return {name: values[0] for name, values in read_fields(text).items()}


FIELDS = {
    "torchtitan": written_down(foreign_fields.TORCHTITAN),
    "torchtitan-json": written_down(foreign_fields.TORCHTITAN_JSON),
    "megatron": written_down(foreign_fields.MEGATRON),
    "deepspeed": written_down(foreign_fields.DEEPSPEED),
    "trainer": arguments_of_transformers(),
}
TORCHRUN = ("node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id",
            "max_restarts")  # fmt: skip
# Rows of fields that the lists do not have: other programs' in the same file, and entries of tables
OTHERS = {
    "torchtitan": (),
    "torchtitan-json": ("model_spec.", "optimizer.param_groups", "loss.", "dataloader",
                        "validator.dataloader", "activation_checkpoint"),
    "megatron": (*TORCHRUN, "nproc_per_node", "nnodes"),
    "deepspeed": (),
    "trainer": ("lr_scheduler_kwargs.", "fsdp_config.", "parallelism_config.",
                # run_clm.py's
                "model_name_or_path", "dataset_name", "train_file", "validation_file", "block_size",
                # version 4's
                "warmup_ratio", "evaluation_strategy", "overwrite_output_dir", "save_safetensors",
                "logging_dir", "group_by_length", "no_cuda"),
}  # fmt: skip
ADAM = {"optimizer.type": "AdamW"}
SWITCHES = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
LLAMA = read_arguments(
    f"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 {SWITCHES} "
    "--micro-batch-size 2 --max-position-embeddings 32"
)
STEPS = {**LLAMA, "train_iters": 100}
BATCH = {"train_batch_size": 32}
# Configs in which each field that has an effect has it: some count only beside others
BASES: dict[str, list[dict[str, object]]] = {
    "torchtitan": [
        {},
        {"checkpoint.enable": True, "checkpoint.initial_load_path": "x"},
        {"parallelism.pipeline_parallel_degree": 2},
        {"model.converters": ["quantize.linear.float8"], "compile.enable": True},
    ],
    "torchtitan-json": [
        flatten(json.loads(torchtitan_run(**sections)), by_name("torchtitan-json").whole)
        for sections in (
            {},
            {"checkpoint": {"enable": True}},
            {"parallelism": {"pipeline_parallel_degree": 2}},
            {"compile": {"enable": True}},
        )
    ],
    "megatron": [
        STEPS,
        {**STEPS, "fp16": True},
        {**STEPS, "bf16": True},
        {**STEPS, "group_query_attention": True, "num_query_groups": 2},
        {**STEPS, "lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 9},
        {**STEPS, "use_rope_scaling": True, "vocab_size": 1000},
        {**STEPS, "use_torch_fsdp2": True, "eval_interval": 5, "save_interval": 5},
        {**STEPS, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {**LLAMA, "train_samples": 1000, "lr_decay_style": "WSD", "lr_wsd_decay_style": "linear",
         "lr_wsd_decay_samples": 9, "lr_warmup_fraction": 0.1},
        {**STEPS, "recompute_granularity": "full", "recompute_method": "uniform"},
        {**LLAMA, "train_samples": 1000},
        {**STEPS, "position_embedding_type": "none", "use_rotary_position_embeddings": True},
    ],
    "deepspeed": [
        {**BATCH, **ADAM},
        {**BATCH, "optimizer.type": "Adam"},
        {**BATCH, "fp16.enabled": True},
        {**BATCH, "zero_optimization.stage": 3},
        {**BATCH, **ADAM, "scheduler.type": "WarmupDecayLR"},
        {**BATCH, **ADAM, "scheduler.type": "WarmupCosineLR"},
        {"train_micro_batch_size_per_gpu": 2},
    ],
    "trainer": [
        {"weight_decay": 0.1, "fsdp": True},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs.min_lr_rate": 0.2},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs.num_decay_steps": 5},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 4},
        {"eval_strategy": "steps", "max_steps": 50},
    ],
}  # fmt: skip


def outcome(form: Format, entries: dict[str, object]) -> tuple[object, ...]:
    """What a config becomes: settings and texts, or the problems that make no file."""
    try:
        draft: Draft = translate(entries, form, 16)
    except ConfigError as error:
        return tuple(error.problems)
    settings = tuple((s.key, s.value) for s in draft.settings.values())
    return (settings, *map(without_origin, draft.left), *map(without_origin, draft.decisions))


def without_origin(text: str) -> str:
    """The text without the fields at its begin, of which only those of the file are named."""
    return re.sub(r"^(default of )?[\w.]+(, [\w.]+)* = ", "= ", text)


def other_values(value: object) -> list[object]:
    """Values that the program would read as another choice than this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 3, 7]
    if isinstance(value, float):
        return [value * 0.75 + 0.1]
    if isinstance(value, list):
        return [["other"], [0.5, 0.6]]
    return ["other", 7]


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_a_row_is_mapped_or_has_values_that_change_nothing_and_a_reason(form):
    names = [row.theirs for row in form.rows]
    assert len(set(names)) == len(names), "a field has one row"
    for row in form.rows:
        assert set(row.ours.split()) <= set(all_keys()), row.theirs
        mapped = row.apply is not None or row.ours
        assert mapped or (row.same and row.note), row.theirs
        assert not (mapped and row.same), row.theirs
        assert row.apply is not None or len(row.ours.split()) < 2, row.theirs


def test_few_fields_change_nothing_at_any_value():
    found = {row.theirs for form in FORMATS for row in form.rows if ANY in row.same}
    assert found == {
        *TORCHRUN, "max_position_embeddings", "job.description", "profiler.profile_freq",
        "validator.freq", "validator.steps", "validator.dataloader",
    }  # fmt: skip


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_rows_are_of_fields_that_the_program_reads_with_its_defaults(form):
    fields = FIELDS[form.name]
    for row in form.rows:
        if row.theirs not in fields:
            assert row.theirs.startswith(OTHERS[form.name]), row.theirs
        elif row.default != REQUIRED and ANY not in row.same:
            assert row.default == fields[row.theirs], row.theirs


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_every_field_is_a_row_or_makes_no_file(form):
    known = {row.theirs for row in form.rows}
    unknown = sorted(set(FIELDS[form.name]) - known)
    assert form.name in ("megatron", "deepspeed") or not unknown
    for name in unknown:
        problems = outcome(form, {**BASES[form.name][0], name: True})
        assert len(problems) == 1
        assert str(problems[0]).startswith(f"{name} = True: not known here as a field of")


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_a_default_that_is_written_is_the_same_as_one_that_is_not(form):
    known = {row.theirs for row in form.rows}
    for base in BASES[form.name]:
        silent = outcome(form, base)
        for name, default in FIELDS[form.name].items():
            if name in known and name not in base and default is not None:
                assert outcome(form, {**base, name: default}) == silent, name


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_another_value_changes_a_setting_or_is_named_or_makes_no_file(form):
    for row in form.rows:
        if ANY in row.same or row.theirs not in FIELDS[form.name]:
            continue
        others = other_values(row.default if row.default != REQUIRED else 4)
        others = [value for value in others if value not in row.same]
        for value in others:
            assert any(has_effect(form, base, row.theirs, value) for base in BASES[form.name]), (
                f"{row.theirs} = {value}"
            )


def has_effect(form: Format, base: dict[str, object], name: str, value: object) -> bool:
    without = {other: entry for other, entry in base.items() if other != name}
    return outcome(form, {**without, name: value}) != outcome(form, without)


def test_each_format_has_a_config_that_can_be_written():
    for form in FORMATS:
        for base in BASES[form.name]:
            assert isinstance(outcome(form, base)[0], tuple), outcome(form, base)
    assert set(foreign_configs.SAMPLES) == set(NAMES)
