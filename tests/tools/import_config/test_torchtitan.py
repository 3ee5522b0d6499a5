"""torchtitan's TOML."""

from __future__ import annotations

import pytest
from foreign_configs import TORCHTITAN, imported, values


def test_llama3_8b_with_every_parallelism_but_pp(tmp_path):
    config, draft = imported(tmp_path, "torchtitan", processes=16)
    names = "model.flavor parallel.tp parallel.cp parallel.cp_method float8.enabled float8.skip"
    assert values(config, names) == ["llama3_8b", 2, 2, "ring", True, "attention.wk"]
    names = "training.local_batch_size training.global_batch_size training.seq_len"
    assert values(config, names) == [1, 4, 8192]
    names = "schedule.name schedule.decay schedule.decay_fraction schedule.min_ratio"
    assert values(config, names) == ["wsd", "sqrt", 0.2, 0.1]
    # Every second block is recomputed as a whole
    assert values(config, "recompute.mode recompute.every") == ["full", 2]
    names = "compile.enabled compile.loss checkpoint.async_mode checkpoint.keep metrics.sinks"
    assert values(config, names) == ["true", "true", "async_pinned", 10, ("tensorboard",)]
    assert [text.partition(" ")[0] for text in draft.lacks] == [
        "quantize.linear.float8.enable_fsdp_float8_all_gather"
    ]


def test_defaults_of_the_trainer_are_kept(tmp_path):
    text = '[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 2\n[job]\ndescription = "x y"\n'
    config, draft = imported(tmp_path, "torchtitan", text)
    names = "optimizer.lr schedule.name schedule.min_ratio training.seq_len checkpoint.freq"
    assert values(config, names) == [8e-4, "linear", 0.0, 2048, 0]
    assert draft.settings["optimizer.lr"].origin == "default of optimizer.lr"
    assert draft.lacks == []


@pytest.mark.parametrize(
    ("changed", "names", "expected"),
    [
        (("[compile]\nenable = true", "[compile]\nenable = false"),
         "compile.enabled compile.loss", ["false", "false"]),
        (('selective_ac_option = "2"', 'selective_ac_option = "op"'),
         "recompute.mode recompute.every", ["selective", 1]),
        (("decay_ratio = 0.2\n", ""), "schedule.name schedule.decay_fraction", ["wsd", 1.0]),
        (('decay_ratio = 0.2\ndecay_type = "sqrt"', 'decay_type = "cosine"'), "schedule.name", ["cosine"]),
        (("local_batch_size = 1", "local_batch_size = 2\nglobal_batch_size = 64\nseed = 3"),
         "training.global_batch_size training.local_batch_size run.seed", [64, 2, 3]),
        (("[checkpoint]", '[validation]\nenable = true\nfreq = 7\nsteps = 3\nlocal_batch_size = 2\n[checkpoint]'),
         "validation.freq validation.samples", [7, 6]),
        (("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2\npipeline_parallel_schedule = "
          '"Interleaved1F1B"\npipeline_parallel_split_points = ["layers.8"]'),
         "parallel.pp parallel.pp_schedule parallel.pp_split", [2, "Interleaved1F1B", "layers.8"]),
    ],
)  # fmt: skip
def test_other_values(changed, names, expected, tmp_path):
    assert changed[0] in TORCHTITAN
    config, _ = imported(tmp_path, "torchtitan", TORCHTITAN.replace(*changed))
    assert values(config, names) == expected


def test_a_flavor_that_is_not_ours(tmp_path):
    text = TORCHTITAN.replace('name = "llama3"', 'name = "deepseek_v3"').replace('"8B"', '"16B"')
    config, draft = imported(tmp_path, "torchtitan", text)
    assert config.model.flavor == "debug"
    assert any("deepseek_v3 16b" in line for line in draft.lacks)
    assert any(line.startswith("model:") for line in draft.decisions)
