"""torchtitan's TOML."""

from __future__ import annotations

import pytest
from foreign_configs import TORCHTITAN, imported, values
from messages import refused

from titanlite.model.flavors import resolve_flavor


def test_llama3_8b_with_every_parallelism_but_pp(tmp_path):
    config, draft = imported(tmp_path, "torchtitan", processes=16)
    names = "model.flavor parallel.tp parallel.cp parallel.cp_method float8.enabled float8.scaling"
    assert values(config, names) == ["llama3_8b", 2, 2, "ring", True, "tensorwise"]
    names = "training.local_batch_size training.global_batch_size training.seq_len"
    assert values(config, names) == [1, 4, 8192]
    names = "schedule.name schedule.decay schedule.decay_fraction schedule.min_ratio"
    assert values(config, names) == ["wsd", "sqrt", 0.2, 0.1]
    # Every second block is recomputed as a whole
    assert values(config, "recompute.mode recompute.every") == ["full", 2]
    names = "compile.enabled compile.loss checkpoint.async_mode checkpoint.keep metrics.sinks"
    assert values(config, names) == ["true", "true", "async_pinned", 10, ("tensorboard",)]
    assert [text.partition(" ")[0] for text in draft.left] == [
        "quantize.linear.float8.filter_fqns",
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        "lr_scheduler:",
    ]


def test_rope_is_scaled_as_there(tmp_path):
    """torchtitan 0.2 scales the frequencies of every llama3 by 8; Meta's Llama 3 has no scaling."""
    config, _ = imported(tmp_path, "torchtitan")
    scaling = resolve_flavor(config.model, 128256).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("llama3", 8.0, 8192)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)


def test_defaults_of_the_trainer_are_kept(tmp_path):
    text = '[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 2\n[job]\ndescription = "x y"\n'
    config, draft = imported(tmp_path, "torchtitan", text)
    names = "optimizer.lr schedule.name schedule.min_ratio training.seq_len checkpoint.freq"
    assert values(config, names) == [8e-4, "linear", 0.0, 2048, 0]
    names = "recompute.mode recompute.every compile.enabled training.compute_dtype"
    assert values(config, names) == ["full", 2, "false", "bfloat16"]
    assert draft.settings["optimizer.lr"].origin == "default of optimizer.lr"
    # Its debugmodel is not ours
    names = "model.dim model.num_layers model.num_heads model.ffn_dim model.vocab_size"
    assert values(config, names) == [256, 6, 16, 768, 2048]


@pytest.mark.parametrize(
    ("changed", "names", "expected"),
    [
        (("[compile]\nenable = true", "[compile]\nenable = false"),
         "compile.enabled compile.loss", ["false", "false"]),
        (('components = ["model", "loss"]', 'components = ["model"]'),
         "compile.enabled compile.loss", ["true", "false"]),
        (('selective_ac_option = "2"', 'selective_ac_option = "op"'),
         "recompute.mode recompute.every", ["selective", 1]),
        (("decay_ratio = 0.2\n", ""), "schedule.name schedule.decay_fraction", ["wsd", 1.0]),
        (('decay_ratio = 0.2\ndecay_type = "sqrt"', 'decay_type = "cosine"'), "schedule.name", ["cosine"]),
        (("local_batch_size = 1", "local_batch_size = 2\nglobal_batch_size = 64"),
         "training.global_batch_size training.local_batch_size", [64, 2]),
        (("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2\npipeline_parallel_schedule = "
          '"Interleaved1F1B"\npipeline_parallel_microbatch_size = 1'),
         "parallel.pp parallel.pp_schedule", [2, "Interleaved1F1B"]),
        (('flavor = "8B"', 'flavor = "8B_flex"'), "model.flavor data.document_mask", ["llama3_8b", True]),
        (('name = "llama3"\nflavor = "8B"', 'name = "qwen3"\nflavor = "0.6B"'),
         "model.flavor model.rope_scaling", ["qwen3_0.6b", None]),
        (("[metrics]", "[debug]\nseed = 3\n[metrics]"), "run.seed", [3]),
    ],
)  # fmt: skip
def test_other_values(changed, names, expected, tmp_path):
    assert changed[0] in TORCHTITAN
    config, _ = imported(tmp_path, "torchtitan", TORCHTITAN.replace(*changed))
    assert values(config, names) == expected


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        # Keys of 2024: degrees stood in [training] and [experimental]
        (("[parallelism]", "[training]\nbatch_size = 8\n[parallelism]"), ["twice"]),
        (("local_batch_size = 1", "batch_size = 8"), ["training.batch_size = 8", "not known"]),
        (("local_batch_size = 1", "tensor_parallel_degree = 8"), ["training.tensor_parallel_degree = 8"]),
        (("local_batch_size = 1", "data_parallel_shard_degree = 8"),
         ["training.data_parallel_shard_degree = 8"]),
        (("local_batch_size = 1", "data_parallel_degree = 8"), ["training.data_parallel_degree = 8"]),
        (("local_batch_size = 1", "compile = true"), ["training.compile = True"]),
        (("[metrics]", "[experimental]\npipeline_parallel_degree = 4\n[metrics]"),
         ["experimental.pipeline_parallel_degree = 4"]),
        (("interval = 500", 'interval_type = "seconds"'), ["checkpoint.interval_type = seconds"]),
        (("warmup_steps = 200", "lr_min = 0.1"), ["lr_scheduler.lr_min = 0.1"]),
        (('name = "llama3"', 'name = "deepseek_v3"'), ["deepseek_v3 8B", "expected one of", "llama3 8B"]),
        (('flavor = "8B"', 'flavor = "8b"'), ["llama3 8b", "llama3 8B"]),
        (("tensor_parallel_degree = 2", "expert_parallel_degree = 2"), ["models are dense; expected 1"]),
        (("tensor_parallel_degree = 2", "pipeline_parallel_layers_per_stage = 2"), ["expected None"]),
        (("tensor_parallel_degree = 2", "tensor_parallel_degree = 3"), ["a multiple of 6, the product"]),
        # On 16 processes 4 ranks of FSDP x tp 2 x cp 2 are a layout; 8 x 4 and 2 x 4 are none
        (("shard_degree = -1", "shard_degree = 8"), ["--processes 16: expected 32, the product of"]),
        (("shard_degree = -1", "shard_degree = 2"), ["--processes 16: expected 8, the product of"]),
        (("replicate_degree = 1", "replicate_degree = 3"), ["expected a multiple of 12, the product of"]),
        (('name = "AdamW"', 'name = "Adam"'), ["optimizer.name = Adam", "expected one of AdamW"]),
        (('"quantize.linear.float8"', '"quantize.linear.mx"'), ["model.converters", "float8 or none"]),
        (("filter_fqns", 'recipe_name = "rowwise_with_gw_hp"\nfilter_fqns'), ["rowwise_with_gw_hp"]),
        (("[metrics]", "[fault_tolerance]\nenable = true\n[metrics]"), ["fault_tolerance.enable = True"]),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_makes_no_file(changed, parts, tmp_path):
    assert changed[0] in TORCHTITAN
    if parts == ["twice"]:
        parts = ["not TOML"]
    with refused(*parts):
        imported(tmp_path, "torchtitan", TORCHTITAN.replace(*changed))


def test_the_batch_needs_the_number_of_processes_unless_the_degrees_say_it(tmp_path):
    with refused("training.local_batch_size", "give --processes N"):
        imported(tmp_path, "torchtitan", processes=0)
    text = TORCHTITAN.replace("shard_degree = -1", "shard_degree = 8")
    config, _ = imported(tmp_path, "torchtitan", text, processes=0)
    assert config.training.global_batch_size == 8
