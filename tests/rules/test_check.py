"""A layout that does not fit is refused before anything starts: the keys, what was found, the
nearest that fits.
"""

from __future__ import annotations

import dataclasses

import pytest
from messages import assert_mentions

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.model.flavors import FLAVORS, LlamaConfig, resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError

# 4 layers, 4 heads, 2 key/value heads
DEBUG = dataclasses.replace(FLAVORS["debug"], vocab_size=4112)


def config(*arguments: str) -> Config:
    base = ["debug", "--training.global_batch_size=24", "--training.local_batch_size=2"]
    return load_config([*base, *(f"--{argument}" for argument in arguments)])


def degrees(world_size: int, *arguments: str, llama: LlamaConfig = DEBUG) -> tuple[int, ...]:
    found = check_layout(config(*arguments), llama, world_size)
    assert tuple(found) == AXES
    return tuple(found.values())


@pytest.mark.parametrize(
    ("world_size", "arguments", "expected"),
    [
        (4, [], (1, 1, 4, 1, 1)),
        (4, ["parallel.dp_replicate=2"], (1, 2, 2, 1, 1)),
        (4, ["parallel.dp_replicate=-1", "parallel.dp_shard=2"], (1, 2, 2, 1, 1)),
        (1, ["parallel.dp_shard=1"], (1, 1, 1, 1, 1)),
        (8, ["parallel.tp=2", "parallel.pp=2"], (2, 1, 2, 1, 2)),
        (8, ["parallel.tp=2", "parallel.cp=-1", "parallel.dp_shard=1"], (1, 1, 1, 4, 2)),
        (4, ["parallel.pp=-1", "parallel.dp_shard=2"], (2, 1, 2, 1, 1)),
        (6, ["parallel.dp_shard=3", "parallel.tp=-1"], (1, 1, 3, 1, 2)),
        (4, ["parallel.reshard_after_forward=2"], (1, 1, 4, 1, 1)),
        (2, ["parallel.pp=2", "parallel.pp_split=layers.3"], (2, 1, 1, 1, 1)),
        (4, ["parallel.cp=4", "parallel.dp_shard=1", "training.seq_len=40"], (1, 1, 1, 4, 1)),
        (1, ["parallel.pp_schedule=ZBVZeroBubble", "compile.enabled"], (1, 1, 1, 1, 1)),
    ],
)
def test_degrees_resolve_to_the_world_size(world_size, arguments, expected):
    assert degrees(world_size, *arguments) == expected


@pytest.mark.parametrize(
    ("world_size", "arguments", "expected"),
    [
        (4, ["parallel.dp_replicate=-1"], ("parallel.dp_replicate", "parallel.dp_shard", "-1")),
        (4, ["parallel.tp=0"], ("parallel.tp = 0", "-1", "at least 1")),
        (4, ["parallel.tp=3"], ("parallel.tp = 3", "4 processes", "1 or 2 or 4")),
        (8, ["parallel.tp=2", "parallel.pp=3"], ("parallel.pp = 3", "parallel.tp = 2", " 6", "8 processes", "parallel.pp = 1 or 2 or 4")),
        (4, ["parallel.dp_replicate=2", "parallel.dp_shard=4"], ("parallel.dp_replicate = 2", "parallel.dp_shard = 4", "4 processes", "NGPU", "NNODES", "start 8", "-1")),
        (1, ["parallel.dp_shard=2"], ("parallel.dp_shard = 2", "1 process", "NGPU", "NNODES", "start 2")),
        (1, ["parallel.pp=2", "parallel.ep=2"], ("parallel.pp = 2", "1 process", "start 4")),
        (1, ["parallel.cp=2", "parallel.ep=2"], ("parallel.cp = 2", "1 process", "start 2")),
        (5, [], ("training.global_batch_size = 24", "training.local_batch_size = 2", "5 data-parallel", "20 or 30")),
        (16, [], ("training.global_batch_size = 24", "nearest: 32", "local batch size")),
        # tensor parallel
        (4, ["parallel.tp=4"], ("parallel.tp = 4", "model.num_kv_heads = 2", "1 or 2")),
        (3, ["parallel.tp=3"], ("parallel.tp = 3", "model.num_heads = 4", "model.num_kv_heads = 2", "model.ffn_dim = 352", "model.vocab_size = 4112", "training.seq_len = 128", ": 1")),
        (2, ["parallel.tp=2", "training.seq_len=127"], ("parallel.tp = 2", "training.seq_len = 127", ": 1")),
        (4, ["parallel.tp=2", "parallel.pp=2", "parallel.pp_schedule=ZBVZeroBubble", "parallel.async_tp", "compile.enabled=auto"], ("parallel.async_tp", "parallel.tp > 1", "compile.enabled = true")),
        (2, ["parallel.async_tp", "compile.enabled"], ("parallel.async_tp = true", "parallel.tp > 1", "compile.enabled = true", "compile.backend = inductor", "run.device = cpu")),
        # context parallel
        (2, ["parallel.cp=2", "training.seq_len=130"], ("training.seq_len = 130", "parallel.cp = 4", "128 or 132", "parallel.cp = 1")),
        (2, ["parallel.cp=2", "training.seq_len=127"], ("training.seq_len = 127", "124 or 128", "parallel.cp = 1")),
        (4, ["parallel.cp=4", "parallel.cp_method=ulysses"], ("parallel.cp = 4", "parallel.cp_method = ulysses", "model.num_kv_heads / parallel.tp = 2", "1 or 2", "all_gather")),
        (4, ["parallel.cp=2", "parallel.tp=2", "parallel.cp_method=ulysses"], ("parallel.cp = 2", "parallel.cp_method = ulysses", "model.num_kv_heads / parallel.tp = 1")),
        # sharding and recomputation
        (8, ["parallel.reshard_after_forward=2", "parallel.tp=2"], ('parallel.reshard_after_forward = "2"', "parallel.pp", "parallel.tp", "default, always or never")),
        (4, ["parallel.reshard_after_forward=3"], ('parallel.reshard_after_forward = "3"', "parallel.dp_shard x parallel.cp = 4", "allowed: 2")),
        (2, ["parallel.reshard_after_forward=2"], ('parallel.reshard_after_forward = "2"', "none", "default, always or never")),
        (2, ["parallel.reshard_after_forward=allways"], ('parallel.reshard_after_forward = "allways"', "default, always, never", "number", "did you mean always?")),
        # float8
        (2, ["parallel.tp=2", "float8.enabled"], ()),
        (1, ["float8.enabled", "float8.skip=layers"], ("float8.skip = 'layers'", "all linear layers", "float8.enabled = false")),
        (1, ["float8.enabled", "float8.skip=attention.wk, feed_foward.w1"], ("float8.skip", "feed_foward.w1", "attention.wq, attention.wk, attention.wv, attention.wo, feed_forward.w1, feed_forward.w2, feed_forward.w3", "did you mean feed_forward.w1?")),
        # the noise scale
        (12, ["metrics.noise_scale_freq=2"], ("metrics.noise_scale_freq = 2", "global_batch_size = 24", "local_batch_size = 2", "12 data-parallel", "at least 48")),
        (6, ["metrics.noise_scale_freq=2"], ()),
        (2, ["metrics.noise_scale_freq=2", "parallel.reduce_every_microbatch=false"], ("metrics.noise_scale_freq = 2", "parallel.reduce_every_microbatch = true")),
        (1, ["metrics.noise_scale_freq=2", "parallel.reduce_every_microbatch=false"], ()),
        (1, ["metrics.noise_scale_freq=2", "parallel.reduce_every_microbatch=false", "parallel.cpu_offload"], ("parallel.reduce_every_microbatch = true",)),
        (1, ["recompute.mode=memory_budget", "compile.enabled=auto"], ()),
        (1, ["recompute.mode=memory_budget", "compile.enabled=false"], ("recompute.mode = memory_budget", "compile.enabled = auto or true", "compile.backend")),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_keys_and_the_nearest_that_would(world_size, arguments, expected):
    if not expected:
        assert degrees(world_size, *arguments, llama=resolve_flavor(config(*arguments).model, 4112))
        return
    with pytest.raises(ConfigError) as caught:
        degrees(world_size, *arguments)
    assert_mentions(str(caught.value), *expected)


def test_everything_that_does_not_fit_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        degrees(
            8,
            "parallel.tp=4",
            "parallel.cp=2",
            "training.seq_len=126",
            "parallel.async_tp",
            "compile.enabled=false",
        )
    assert len(caught.value.problems) == 3


def test_one_mistake_is_one_error():
    for arguments in (
        ["parallel.pp=2", "parallel.pp_stages_per_process=3"],
        ["parallel.pp=2", "parallel.pp_split=layers.2,layers.2"],
        ["parallel.cp=2", "training.seq_len=127"],
    ):
        with pytest.raises(ConfigError) as caught:
            degrees(2, *arguments)
        assert len(caught.value.problems) == 1, caught.value.problems
