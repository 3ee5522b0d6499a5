"""Verdicts, the ZeRO stage of a layout, and remedies."""

from __future__ import annotations

import pytest

from titanlite.config.load import load_config
from titanlite.rules.degrees import AXES
from titanlite.tools.plan.advice import Need, advice, zero_stage
from titanlite.tools.plan.counts import Memory

EMPTY = dict.fromkeys(Memory.__dataclass_fields__, 0)
ONE = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(5, 10, "fits"), (5, 11, "may fit"), (10, 11, "may fit"), (11, 12, "does not fit")],
)
def test_a_range_fits_if_its_upper_end_does(low, high, verdict):
    assert Need(0, Memory(**EMPTY), low, high).verdict(10) == verdict


@pytest.mark.parametrize(
    ("degrees", "options", "stage"),
    [
        ({}, [], "stage 0"),
        ({"dp_replicate": 8}, [], "stage 0"),
        ({"dp_shard": 8}, [], "stage 3"),
        ({"cp": 8}, [], "stage 3"),
        ({"dp_shard": 8}, ["--parallel.reshard_after_forward=never"], "stage 2"),
        (
            {"dp_shard": 8},
            ["--parallel.reshard_after_forward=never", "--parallel.reduce_every_microbatch=false"],
            "stage 1",
        ),
        ({"dp_shard": 8, "pp": 2}, [], "stage 1"),
    ],
)
def test_a_layout_is_called_by_what_it_holds_while_it_computes(degrees, options, stage):
    assert zero_stage(load_config(["llama3_8b", *options]), ONE | degrees).startswith(stage)


def remedies(part: str, degrees: dict[str, int], *options: str) -> list[str]:
    config = load_config(["llama3_8b", *options])
    return list(advice(config, ONE | degrees, Memory(**EMPTY | {part: 2**34})))


@pytest.mark.parametrize(
    ("part", "degrees", "options", "key"),
    [
        ("logits", {}, ["--loss.num_chunks=1"], "loss.num_chunks = 8 leaves about 2.0"),
        ("activations", {}, ["--recompute.mode=none"], "recompute.mode = selective"),
        ("activations", {}, ["--recompute.mode=selective"], "recompute.mode = full"),
        ("optimizer", {}, [], "optimizer.state_dtype = bfloat16 leaves 8.0"),
        ("optimizer", {"dp_replicate": 2}, [], "parallel.dp_shard in place of dp_replicate"),
        ("optimizer", {}, ["--optimizer.state_dtype=bfloat16"], "parallel.optimizer_offload"),
        ("parameters", {}, [], "more GPUs"),
        (
            "whole_gradients",
            {},
            ["--parallel.reduce_every_microbatch=false"],
            "parallel.reduce_every_microbatch = true",
        ),
        ("gathered", {"pp": 2}, [], "parallel.reshard_after_forward = always"),
    ],
)
def test_the_remedy_of_the_largest_part_is_a_key(part, degrees, options, key):
    (text,) = remedies(part, degrees, *options)
    assert "16.0 GiB: " in text
    assert key in text
