"""The JSON of a run with torchtitan 0.3."""

from __future__ import annotations

import json

import pytest
from foreign_configs import imported, model_tree, torchtitan_run, values
from messages import refused

from titanlite.model.flavors import FLAVORS, resolve_flavor
from titanlite.tools.import_config.torchtitan_json import shape_of


def test_an_8b_on_16_processes(tmp_path):
    config, draft = imported(tmp_path, "torchtitan-json")
    ours = resolve_flavor(config.model, 128256)
    assert ours.num_parameters == FLAVORS["llama3_8b"].num_parameters == 8_030_261_248
    assert ours.rope_scaling is not None
    assert (ours.rope_theta, ours.rope_scaling.factor, ours.norm_eps) == (500000.0, 8.0, 1e-5)
    # 524,288 tokens of a step are 64 sequences: on 8 data-parallel ranks 8 of one each
    names = "training.seq_len training.local_batch_size training.global_batch_size parallel.tp"
    assert values(config, names) == [8192, 1, 64, 2]
    names = "optimizer.lr optimizer.betas recompute.mode loss.num_chunks data.document_mask"
    assert values(config, names) == [3e-4, (0.9, 0.95), "selective", 8, True]
    assert [text.partition(":")[0] for text in draft.decisions] == ["data.path", "data.tokenizer"]
    assert len(draft.left) == 1


@pytest.mark.parametrize(
    ("sections", "names", "expected"),
    [
        ({"training": {"num_tokens_per_train_step": -1}}, "training.global_batch_size", [8]),
        ({"training": {"num_tokens_per_microbatch_per_dp_rank": 16384},
          "parallelism": {"pipeline_parallel_degree": 2, "num_pp_microbatches": 4}},
         "training.local_batch_size parallel.pp_microbatch_size training.global_batch_size", [8, 2, 64]),
        # Without pp the number of microbatches is ignored there
        ({"parallelism": {"num_pp_microbatches": 4, "pipeline_parallel_schedule": "Interleaved1F1B"}},
         "training.local_batch_size parallel.pp_schedule", [1, "1F1B"]),
        ({"optimizer": {"implementation": "fused_opt_states_bf16"}}, "optimizer.state_dtype", ["bfloat16"]),
        ({"checkpoint": {"enable": True, "interval": 50}}, "checkpoint.freq checkpoint.keep", [50, 10]),
    ],
)  # fmt: skip
def test_other_values(sections, names, expected, tmp_path):
    config, _ = imported(tmp_path, "torchtitan-json", torchtitan_run(**sections))
    assert values(config, names) == expected


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (None, ["none", 0.5]),
        ({"preserve_rng_state": True}, ["full", 0.5]),
        ({"memory_budget": 0.3, "visualize_memory_budget_pareto": False}, ["memory_budget", 0.3]),
        ({"force_recompute_mm_shapes_by_fqns": []}, ["selective", 0.5]),
    ],
)
def test_the_class_of_recomputation_is_told_by_its_fields(entries, expected, tmp_path):
    run = json.loads(torchtitan_run())
    run["activation_checkpoint"] = entries
    config, _ = imported(tmp_path, "torchtitan-json", json.dumps(run))
    assert values(config, "recompute.mode recompute.budget") == expected


def test_tied_embeddings_and_heads_of_another_width():
    tree = model_tree(64, 2, 4, 4, 96, 100)
    tree["enable_weight_tying"] = True
    layer = tree["layers"][0]["attention"]
    layer["n_kv_heads"] = None  # as many as query heads
    shape = shape_of(tree)
    assert (shape["model.embeddings"], shape["model.num_kv_heads"]) == ("tied", 4)
    assert (shape["model.head_dim"], shape["model.qk_norm"]) == (16, False)
    layer["qk_norm"] = {**tree["norm"], "normalized_shape": 16, "param_init": {"weight": "ones"}}
    assert shape_of(tree)["model.qk_norm"] is True


CHANGES = {
    "blocks differ": ("layers", 1, "moe", {}),
    "block.feed_forward.w1.bias = True": ("layers", 0, "feed_forward", "w1", "bias", True),
    "block.moe.num_experts = 8": ("layers", 0, "moe", {"num_experts": 8}),
    "block.attention.inner_attention.window = 128": (
        "layers", 0, "attention", "inner_attention", "window", 128
    ),
    "block.attention.sinks = True": ("layers", 0, "attention", "sinks", True),
    "block.attention.rope.low_freq_factor = 2.0": (
        "layers", 0, "attention", "rope", "low_freq_factor", 2.0
    ),
    "RoPE's scaling is 'yarn'": ("layers", 0, "attention", "rope", "scaling", "yarn"),
    "RoPE of a part of a head": ("layers", 0, "attention", "rope", "dim", 64),
    "norms that differ": ("layers", 0, "ffn_norm", "eps", 1e-6),
    "norm.elementwise_affine = False": ("norm", "elementwise_affine", False),
    "logit_cap = 30": ("logit_cap", 30),
}  # fmt: skip


@pytest.mark.parametrize(("said", "change"), CHANGES.items(), ids=CHANGES)
def test_a_model_that_is_no_llama_makes_no_file(said, change, tmp_path):
    run = json.loads(torchtitan_run())
    tree = run["model_spec"]["model"]
    *path, last, value = change
    trees = [tree]
    if path[:1] == ["layers"] and said != "blocks differ":
        trees = [{"layers": [layer]} for layer in tree["layers"]]
    for part in trees:
        for step in path:
            part = part[step]
        part[last] = value
    with refused("model_spec.model = llama3", said, "write [model] by hand"):
        imported(tmp_path, "torchtitan-json", json.dumps(run))


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"training": {"num_tokens_per_train_step": 10_000}}, ["10000", "multiples of 8192 tokens"]),
        ({"training": {"local_batch_size": 4}}, ["training.local_batch_size = 4: not known"]),
        ({"optimizer": {"param_groups": []}}, ["optimizer.param_groups", "one group `.*` of AdamW"]),
        ({"loss": {"mtp_scale": 0.1}}, ["loss.mtp_scale = 0.1: not known"]),
        ({"loss": {"loss_fn": {"global_vocab_size": 5}}}, ["as many classes"]),
        ({"override": {"imports": ["x"]}}, ["parts are not replaced"]),
        ({"parallelism": {"expert_parallel_degree": 2}}, ["models are dense"]),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_makes_no_file(sections, parts, tmp_path):
    with refused(*parts):
        imported(tmp_path, "torchtitan-json", torchtitan_run(**sections))
