"""Combinations of settings that are refused, and what the message names."""

from __future__ import annotations

import dataclasses

import pytest
from messages import refused
from model_builder import EVEN

from titanlite.config.load import load_config
from titanlite.rules.check import check_layout


def refuse(options: list[str], *words: str) -> None:
    with refused(*words):
        check_layout(load_config(["debug", *(f"--{option}" for option in options)]), EVEN, 1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "training.param_dtype=bfloat16",
            ["training.param_dtype = bfloat16", "expected training.param_dtype"],
        ),
        ("training.reduce_dtype=bfloat16", ["training.reduce_dtype = bfloat16"]),
        ("training.loss_scale=1000", ["training.loss_scale = 1000", "nearest: 1024"]),
        (
            "optimizer.implementation=foreach",
            ["optimizer.implementation = foreach", "auto or fused"],
        ),
        ("float8.enabled", ["devices with float8 have bfloat16"]),
    ],
)
def test_what_does_not_fit_float16_is_refused(option, words):
    refuse(["training.compute_dtype=float16", option], *words)


def test_two_kinds_of_offloading_are_refused():
    refuse(
        ["parallel.optimizer_offload", "parallel.cpu_offload"],
        "parallel.cpu_offload",
        "expected only one",
    )


def test_rowwise_scaling_needs_bfloat16_on_the_hardware():
    refuse(
        ["float8.enabled", "float8.scaling=rowwise", "training.compute_dtype=float32"],
        "returns bfloat16",
    )


def test_offloading_without_recomputation_is_refused():
    refuse(["recompute.offload"], "recompute.mode = none", "kept with recompute.mode = full")


def test_the_state_of_muon_is_not_offloaded():
    refuse(
        ["optimizer.name=muon", "parallel.optimizer_offload"],
        "optimizer.name = muon",
        "expected optimizer.name",
    )


@pytest.mark.parametrize(
    ("form", "model", "words"),
    [
        ("peft", {}, ["checkpoint.export = peft", "lora.rank > 0"]),
        (
            "hf",
            {"qkv_bias": True, "qk_norm": True},
            ["checkpoint.export = hf", "transformers has no such model"],
        ),
    ],
)
def test_an_export_that_would_fail_after_the_training_is_refused(form, model, words):
    config = load_config(["debug", f"--checkpoint.export={form}"])
    with refused(*words):
        check_layout(config, dataclasses.replace(EVEN, **model), 1)
