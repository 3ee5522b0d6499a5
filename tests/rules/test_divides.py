"""Pipelines that do not fit: the keys, what was found, the nearest that fits.

The model has 4 layers.
"""

from __future__ import annotations

import dataclasses

import pytest
from messages import assert_mentions

from titanlite.config.load import load_config
from titanlite.model.flavors import FLAVORS, resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.runtime.errors import ConfigError

DEBUG = dataclasses.replace(FLAVORS["debug"], vocab_size=4112)


@pytest.mark.parametrize(
    ("world_size", "arguments", "expected"),
    [
        (8, ["parallel.pp=8"], ("parallel.pp = 8", "1F1B", "at least 8 layers", "model.num_layers = 4", "1 or 2 or 4")),
        (4, ["parallel.pp=4", "parallel.pp_schedule=DualPipeV"], ("parallel.pp = 4", "2 stages", "DualPipeV", "at least 8 layers", "model.num_layers = 4", "1 or 2")),
        (2, ["parallel.pp=2", "parallel.pp_stages_per_process=2"], ("parallel.pp_stages_per_process = 2", "1F1B", " 1 ", "0")),
        (2, ["parallel.pp=2", "parallel.pp_stages_per_process=1", "parallel.pp_schedule=ZBVZeroBubble"], ("parallel.pp_stages_per_process = 1", "ZBVZeroBubble", " 2 ")),
        (2, ["parallel.pp=2", "parallel.pp_microbatch_size=4", "training.local_batch_size=6"], ("parallel.pp_microbatch_size = 4", "training.local_batch_size = 6", "2 or 3 or 6")),
        (4, ["parallel.pp=4"], ("training.local_batch_size = 2", "2 microbatches", "parallel.pp_microbatch_size = 1", "parallel.pp_schedule = 1F1B", "4 stages", "4 or 6 or 8")),
        (2, ["parallel.pp=2", "training.local_batch_size=3", "parallel.pp_schedule=DualPipeV"], ("training.local_batch_size = 3", "DualPipeV", "2 processes", "4 stages", "4 or 6 or 8")),
        (4, ["parallel.pp=4", "training.local_batch_size=6", "parallel.pp_schedule=Interleaved1F1B", "model.num_layers=8"], ()),
        (2, ["parallel.pp=2", "training.local_batch_size=3", "parallel.pp_schedule=Interleaved1F1B"], ()),
        (2, ["parallel.pp=2", "parallel.pp_split=layer.2"], ("parallel.pp_split", "'layer.2'", "did you mean layers.2")),
        (2, ["parallel.pp=2", "parallel.pp_split=layers.1, layers.2"], ("parallel.pp_split = 'layers.1, layers.2'", " 2", "expected 1")),
        (4, ["parallel.pp=4", "training.local_batch_size=4", "parallel.pp_split=layers.2 layers.1 norm"], ("parallel.pp_split", "layers.2 layers.1 norm", "once", "order")),
        (2, ["parallel.pp=2", "parallel.reduce_every_microbatch=false"], ("parallel.reduce_every_microbatch = false", "pipeline", "true")),
        (2, ["parallel.pp=2", "parallel.pp_schedule=ZBVZeroBubble", "compile.enabled"], ("parallel.pp_schedule = ZBVZeroBubble", "compile.enabled = true", "GPipe, 1F1B, Interleaved1F1B, LoopedBFS")),
        (2, ["parallel.pp=2", "parallel.pp_schedule=DualPipeV", "training.local_batch_size=4", "recompute.mode=selective"], ("parallel.pp_schedule = DualPipeV", "recompute.mode = selective", "recompute.mode = full", "GPipe, 1F1B")),
        (2, ["parallel.pp=2", "parallel.pp_schedule=ZBVZeroBubble", "parallel.reshard_after_forward=always"], ("parallel.pp_schedule = ZBVZeroBubble", "parallel.reshard_after_forward = always", "default or never", "GPipe, 1F1B, Interleaved1F1B, LoopedBFS")),
        (2, ["parallel.pp=2", "parallel.pp_schedule=ZBVZeroBubble", "recompute.mode=memory_budget", "compile.enabled=auto"], ("parallel.pp_schedule = ZBVZeroBubble", "recompute.mode = memory_budget", "GPipe, 1F1B, Interleaved1F1B, LoopedBFS")),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_keys_and_the_nearest_that_would(world_size, arguments, expected):
    base = ["debug", "--training.global_batch_size=24", "--training.local_batch_size=2"]
    config = load_config([*base, *(f"--{argument}" for argument in arguments)])
    if not expected:
        check_layout(config, resolve_flavor(config.model, 4112), world_size)
        return
    with pytest.raises(ConfigError) as caught:
        check_layout(config, DEBUG, world_size)
    assert_mentions(str(caught.value), *expected)
