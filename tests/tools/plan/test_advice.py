"""Verdicts, the ZeRO stage of a layout, and what would need less."""

from __future__ import annotations

import pytest

from titanlite.config.load import load_config
from titanlite.model.flavors import FLAVORS
from titanlite.rules.degrees import AXES
from titanlite.tools.plan.advice import Need, estimated_needs, remedies, zero_stage
from titanlite.tools.plan.counts import Memory
from titanlite.tools.plan.estimate_memory import CONTEXT_BYTES

EMPTY = dict.fromkeys(Memory.__dataclass_fields__, 0)
ONE = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(5, 10, "fits"), (5, 11, "may fit"), (10, 11, "may fit"), (11, 12, "does not fit")],
)
def test_a_range_fits_if_its_upper_end_does_beside_the_context(low, high, verdict):
    assert Need(0, Memory(**EMPTY), low, high).verdict(10 + CONTEXT_BYTES) == verdict


@pytest.mark.parametrize(
    ("degrees", "options", "local_batches", "stage"),
    [
        ({"tp": 8}, [], 2, "none"),
        ({"dp_replicate": 8}, [], 2, "stage 0"),
        ({"dp_shard": 8}, [], 2, "stage 3: weights, gradients and states are sharded"),
        ({"cp": 8}, [], 2, "stage 3: "),
        ({"dp_shard": 8, "dp_replicate": 2}, [], 2, "stage 3: "),
        ({"dp_shard": 8}, ["--parallel.reshard_after_forward=never"], 2, "stage 2"),
        ({"dp_shard": 8}, ["--parallel.reduce_every_microbatch=false"], 2, "stage 3, but"),
        ({"dp_shard": 8}, ["--parallel.reduce_every_microbatch=false"], 1, "stage 3: "),
        (
            {"dp_shard": 8},
            ["--parallel.reshard_after_forward=never", "--parallel.reduce_every_microbatch=false"],
            2,
            "stage 1",
        ),
        ({"dp_shard": 8, "pp": 2}, [], 1, "stage 1"),
        ({"dp_shard": 8, "pp": 2}, ["--parallel.reshard_after_forward=always"], 1, "stage 3, but"),
    ],
)
def test_a_layout_is_called_by_what_it_holds_while_it_computes(
    degrees, options, local_batches, stage
):
    name = zero_stage(load_config(["llama3_8b", *options]), ONE | degrees, local_batches)
    assert name.startswith(stage)
    assert ("2 replicas" in name) == (degrees.get("dp_replicate") == 2)


LARGE = ["--recompute.mode=none", "--loss.num_chunks=1", "--training.local_batch_size=2"]


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (LARGE, 'recompute.mode = "full"'),
        (
            ["--recompute.mode=full", "--loss.num_chunks=1", "--compile.loss=false"],
            "loss.num_chunks = 8",
        ),
        ([*LARGE, "--parallel.tp=8"], "training.local_batch_size = 1"),
        (["--recompute.mode=full", "--loss.num_chunks=8"], "parallel.cpu_offload = true"),
    ],
)
def test_each_change_that_is_named_needs_less(options, change):
    """The largest saving first; each is of a valid config."""
    config = load_config(["llama3_8b", *options])
    llama = FLAVORS["llama3_8b"]
    found = remedies(config, llama, 8)
    assert change in [remedy.change for remedy in found]
    present = max(need.high for need in estimated_needs(config, llama, 8))
    left = [remedy.need.high for remedy in found]
    assert left == sorted(left)
    assert left[-1] < 0.97 * present
    for remedy in found:
        key, _, value = remedy.change.partition(" = ")
        option = f"--{key}={value.strip(chr(34))}"
        changed = load_config(["llama3_8b", *options, option, "--parallel.dp_shard=-1"])
        needs = estimated_needs(changed, llama, 8)
        assert max(need.high for need in needs) == remedy.need.high
