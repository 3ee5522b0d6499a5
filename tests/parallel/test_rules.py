"""What does not fit is told before anything starts: the keys, what was found, and the nearest that would fit."""

from __future__ import annotations

import dataclasses

import pytest

from titanlite.config.load import load_config
from titanlite.config.schema import Config, ConfigError
from titanlite.model.flavors import FLAVORS, LlamaConfig, resolve_flavor
from titanlite.parallel.layout import AXES
from titanlite.parallel.rules import check_layout, unused_settings

DEBUG = dataclasses.replace(FLAVORS["debug"], vocab_size=4112)  # 4 layers, 4 heads, 2 key/value heads


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
        (4, ["parallel.dp_replicate=-1"], "parallel.dp_replicate and parallel.dp_shard are both -1: only one can be what is left"),
        (4, ["parallel.tp=0"], "parallel.tp = 0: expected -1 (what is left) or at least 1"),
        (4, ["parallel.tp=3"], "parallel.tp = 3 does not divide the 4 processes; nearest that do: parallel.tp = 1 or 2 or 4"),
        (8, ["parallel.tp=2", "parallel.pp=3"], "parallel.pp = 3 times parallel.tp = 2 is 6, which does not divide the 8 processes; nearest that do: parallel.pp = 1 or 2 or 4"),
        (4, ["parallel.dp_replicate=2", "parallel.dp_shard=4"], "parallel.dp_replicate = 2 times parallel.dp_shard = 4 is 8, but there are 4 processes (NGPU x NNODES); start 8, or set one degree to -1"),
        (1, ["parallel.dp_shard=2"], "parallel.dp_shard = 2, but there are 1 processes (NGPU x NNODES); start 2"),
        (5, [], "nearest: 20 or 30"),
        (16, [], "nearest: 32, or another local batch size"),
        # tensor parallel
        (4, ["parallel.tp=4"], "parallel.tp = 4 does not divide model.num_kv_heads = 2; nearest that divide all: 1 or 2"),
        (3, ["parallel.tp=3"], "does not divide model.num_heads = 4 and model.num_kv_heads = 2 and model.ffn_dim = 352 and model.vocab_size = 4112 and training.seq_len = 128; nearest that divide all: 1"),
        (2, ["parallel.tp=2", "training.seq_len=127"], "parallel.tp = 2 does not divide training.seq_len = 127; nearest that divide all: 1"),
        (4, ["parallel.tp=2", "parallel.pp=2", "parallel.pp_schedule=ZBVZeroBubble", "parallel.async_tp", "compile.enabled=auto"], "expected parallel.tp > 1, compile.enabled = true"),
        (2, ["parallel.async_tp", "compile.enabled"], "parallel.async_tp = true: the compiler overlaps it on GPUs; expected parallel.tp > 1, compile.enabled = true, compile.backend = inductor and not run.device = cpu"),
        # context parallel
        (2, ["parallel.cp=2", "training.seq_len=130"], "training.seq_len = 130 is not a multiple of 2 x parallel.cp = 4 (each process has a chunk from the head and one from the tail); nearest: 128 or 132, or parallel.cp = 1"),
        (2, ["parallel.cp=2", "training.seq_len=127"], "nearest: 124 or 128, or parallel.cp = 1"),
        (4, ["parallel.cp=4", "parallel.cp_method=ulysses"], "parallel.cp = 4 with parallel.cp_method = ulysses does not divide model.num_kv_heads / parallel.tp = 2; nearest that divide all: 1 or 2; all_gather needs no heads to divide"),
        (4, ["parallel.cp=2", "parallel.tp=2", "parallel.cp_method=ulysses"], "does not divide model.num_kv_heads / parallel.tp = 1"),
        (2, ["parallel.cp=2", "parallel.cp_method=ring", "run.device=cpu"], "parallel.cp_method = ring needs CUDA devices; with run.device = cpu: all_gather or ulysses"),
        # pipeline parallel
        (8, ["parallel.pp=8"], "parallel.pp = 8 with 1 stages each (1F1B) needs at least 8 layers; model.num_layers = 4; nearest parallel.pp: 1 or 2 or 4"),
        (4, ["parallel.pp=4", "parallel.pp_schedule=DualPipeV"], "parallel.pp = 4 with 2 stages each (DualPipeV) needs at least 8 layers; model.num_layers = 4; nearest parallel.pp: 1 or 2"),
        (2, ["parallel.pp=2", "parallel.pp_stages_per_process=2"], "parallel.pp_stages_per_process = 2: 1F1B needs 1 (or 0)"),
        (2, ["parallel.pp=2", "parallel.pp_stages_per_process=1", "parallel.pp_schedule=ZBVZeroBubble"], "ZBVZeroBubble needs 2"),
        (2, ["parallel.pp=2", "parallel.pp_microbatch_size=4", "training.local_batch_size=6"], "parallel.pp_microbatch_size = 4 does not divide training.local_batch_size = 6; nearest that do: 2 or 3 or 6"),
        (4, ["parallel.pp=4"], "training.local_batch_size = 2 is 2 microbatches of parallel.pp_microbatch_size = 1, which parallel.pp_schedule = 1F1B with 4 processes and 4 stages does not take; nearest that do: 4 or 6 or 8"),
        (2, ["parallel.pp=2", "training.local_batch_size=3", "parallel.pp_schedule=DualPipeV"], "with 2 processes and 4 stages does not take; nearest that do: 4 or 6 or 8"),
        (4, ["parallel.pp=4", "training.local_batch_size=6", "parallel.pp_schedule=Interleaved1F1B", "model.num_layers=8"], ""),
        (2, ["parallel.pp=2", "training.local_batch_size=3", "parallel.pp_schedule=Interleaved1F1B"], ""),
        (2, ["parallel.pp=2", "parallel.pp_split=layer.2"], "parallel.pp_split: no module 'layer.2'; did you mean layers.2"),
        (2, ["parallel.pp=2", "parallel.pp_split=layers.1, layers.2"], "parallel.pp_split = 'layers.1, layers.2' names 2; expected 1"),
        (4, ["parallel.pp=4", "training.local_batch_size=4", "parallel.pp_split=layers.2 layers.1 norm"], "expected each name once and in the model's order"),
        (2, ["parallel.pp=2", "parallel.reduce_every_microbatch=false"], "parallel.reduce_every_microbatch = false: a pipeline sums gradients once per local batch"),
        (2, ["parallel.pp=2", "parallel.pp_schedule=ZBVZeroBubble", "compile.enabled"], "with compile.enabled = true use one of GPipe, 1F1B, Interleaved1F1B, LoopedBFS"),
        (2, ["parallel.pp=2", "parallel.pp_schedule=DualPipeV", "training.local_batch_size=4", "recompute.mode=selective"], "which recompute.mode = selective cannot; use recompute.mode = full, or one of GPipe"),
        # sharding and recomputation
        (8, ["parallel.reshard_after_forward=2", "parallel.tp=2"], "a number works without parallel.pp and parallel.tp only; with them use default, always or never"),
        (4, ["parallel.reshard_after_forward=3"], 'parallel.reshard_after_forward = "3": expected a number of processes that divides parallel.dp_shard x parallel.cp = 4 and is neither 1 nor all of them; allowed: 2'),
        (2, ["parallel.reshard_after_forward=2"], "allowed: none for 2, so use default, always or never"),
        (2, ["parallel.reshard_after_forward=allways"], 'parallel.reshard_after_forward = "allways": expected default, always, never or a number; did you mean always?'),
        # float8
        (2, ["parallel.tp=2", "float8.enabled"], "float8.enabled = true: its layers are not cut; expected parallel.tp = 1"),
        (1, ["float8.enabled", "float8.skip=layers"], "float8.skip = 'layers' skips all linear layers; expected some, or float8.enabled = false"),
        (1, ["float8.enabled", "float8.skip=attention.wk, feed_foward.w1"], "float8.skip: feed_foward.w1 is in the name of no linear layer; expected parts of attention.wq, attention.wk, attention.wv, attention.wo, feed_forward.w1, feed_forward.w2, feed_forward.w3; did you mean feed_forward.w1?"),
        (1, ["recompute.mode=memory_budget", "compile.enabled=auto"], None),
        (2, ["parallel.pp=2", "parallel.pp_schedule=ZBVZeroBubble", "recompute.mode=memory_budget", "compile.enabled=auto"], "with recompute.mode = memory_budget use one of GPipe, 1F1B, Interleaved1F1B, LoopedBFS"),
        (1, ["recompute.mode=memory_budget", "compile.enabled=false"], "recompute.mode = memory_budget is the compiler's; expected compile.enabled = auto or true, and compile.backend not eager"),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_keys_and_the_nearest_that_would(world_size, arguments, expected):
    if not expected:
        assert degrees(world_size, *arguments, llama=resolve_flavor(config(*arguments).model, 4112))
        return
    with pytest.raises(ConfigError) as caught:
        degrees(world_size, *arguments)
    assert expected in str(caught.value)


def test_everything_that_does_not_fit_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        degrees(
            8, "parallel.tp=4", "parallel.cp=2", "training.seq_len=126", "parallel.async_tp", "compile.enabled=false"
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


def test_keys_of_techniques_that_are_not_used_are_named():
    given = config("parallel.pp_split=layers.2", "parallel.cp_method=ulysses", "recompute.every=2")
    found = unused_settings(given, dict.fromkeys(AXES, 1))
    assert found == [
        "parallel.pp_split = layers.2 has no effect: parallel.pp = 1",
        "parallel.cp_method = ulysses has no effect: parallel.cp = 1",
        "recompute.every = 2 has no effect: recompute.mode = none",
    ]
    assert unused_settings(config("recompute.mode=full", "recompute.every=2"), dict.fromkeys(AXES, 2)) == []
