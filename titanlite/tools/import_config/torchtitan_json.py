"""Converts the JSON that a run of torchtitan 0.3 writes with `debug.save_config_file`.

Configs of 0.3 are Python functions; the file is their result, with every field and the whole model.
Read at commit b5bcd76 of 2026-08-21, in torchtitan/config/configs.py, trainer.py and the classes
of its parts. The shape is read from the model's tree, of which every part must be a Llama's.
"""

from __future__ import annotations

import re
from typing import Any

from titanlite.runtime.errors import reason_of
from titanlite.tools.import_config.common import set_batch
from titanlite.tools.import_config.draft import Draft
from titanlite.tools.import_config.read_config import flatten
from titanlite.tools.import_config.table import Format, Row, by, leave, must, read_fields
from titanlite.tools.import_config.torchtitan import COMMON, DEGREES, LATE_DECAY, P

MODEL = "model_spec.model"
# What a Llama's tree has, the blocks' parts after `block.`: sizes, which are read or follow from
# others, and values without which it is another model
SIZES = """
dim vocab_size enable_weight_tying lm_head.in_features lm_head.out_features
tok_embeddings.num_embeddings tok_embeddings.embedding_dim norm.normalized_shape norm.eps
block.attention.n_heads block.attention.dim block.attention.n_kv_heads block.attention.head_dim
block.attention.qkv_linear.head_dim block.attention.qkv_linear.n_heads
block.attention.qkv_linear.n_kv_heads block.attention.qkv_linear.wqkv.in_features
block.attention.qkv_linear.wqkv.out_features block.attention.wo.in_features
block.attention.wo.out_features block.attention.qk_norm.normalized_shape
block.attention.inner_attention.block_size block.attention.inner_attention.kernel_options
block.attention.rope.dim block.attention.rope.max_context_length block.attention.rope.theta
block.attention.rope.scaling block.attention.rope.scaling_factor
block.attention.rope.original_max_position_embeddings block.attention.rope.rope_factor
block.attention.rope.beta_fast block.attention.rope.beta_slow
block.attention.rope.original_seq_len block.attention.rope.truncate
block.feed_forward.w1.in_features block.feed_forward.w1.out_features
block.feed_forward.w2.in_features block.feed_forward.w2.out_features
block.feed_forward.w3.in_features block.feed_forward.w3.out_features
block.attention_norm.normalized_shape block.ffn_norm.normalized_shape
block.attention_norm.eps block.ffn_norm.eps block.attention.qk_norm.eps
"""
LLAMA = """
lm_head.bias=false norm.elementwise_affine=true block.attention.qkv_linear.wqkv.bias=false
block.attention.wo.bias=false block.attention.qk_norm
block.attention.qk_norm.elementwise_affine=true
block.attention.rope.low_freq_factor=1.0 block.attention.rope.high_freq_factor=4.0
block.feed_forward.w1.bias=false block.feed_forward.w2.bias=false block.feed_forward.w3.bias=false
block.moe block.attention_norm.elementwise_affine=true block.ffn_norm.elementwise_affine=true
"""
INITIAL = re.compile(r"(^|\.)(param_init|sharding_config)(\.|$)")  # not of the shape


def _model(draft: Draft) -> None:
    """The shape, by the model's tree."""
    try:
        settings = shape_of(draft.value(MODEL))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        reason = f"its parts are not those of a Llama ({reason_of(error)}); write [model] by hand"
        draft.refuse(MODEL, draft.value("model_spec.name"), reason)
        return
    for key, value in settings.items():
        draft.set(key, value, MODEL)
    # Its loaders always give positions within documents, from which the mask is made
    draft.set("data.document_mask", True, MODEL)


def shape_of(model: Any) -> dict[str, object]:
    """Our settings for the tree of a model. Raises one of several errors if it is no Llama."""
    blocks = [_parts(block, "block.") for block in model["layers"]]
    if any(block != blocks[0] for block in blocks):
        raise ValueError("blocks differ")
    outside = {name: part for name, part in model.items() if name != "layers"}
    tree = {**_parts(outside, ""), **blocks[0]}
    llama = read_fields(LLAMA)
    for name, value in tree.items():
        if name not in llama and name not in SIZES.split():
            raise ValueError(f"{name} = {value!r}"[:100])
        if name in llama and value != llama[name][0]:
            raise ValueError(f"{name} = {value!r}"[:100])
    heads = tree["block.attention.n_heads"]
    head_dim = tree["block.attention.qkv_linear.head_dim"]
    epsilons = {value for name, value in tree.items() if name.endswith("norm.eps")}
    if tree["block.attention.rope.dim"] != head_dim or len(epsilons) != 1:
        raise ValueError("RoPE of a part of a head, or norms that differ")
    scaling = tree["block.attention.rope.scaling"]
    if scaling not in ("none", "llama"):
        raise ValueError(f"RoPE's scaling is {scaling!r}"[:100])
    settings = {
        "model.dim": tree["dim"],
        "model.num_layers": len(blocks),
        "model.num_heads": heads,
        "model.num_kv_heads": tree["block.attention.n_kv_heads"] or heads,
        "model.head_dim": head_dim,
        "model.ffn_dim": tree["block.feed_forward.w1.out_features"],
        "model.vocab_size": tree["vocab_size"],
        "model.norm_eps": epsilons.pop(),
        "model.rope_theta": tree["block.attention.rope.theta"],
        "model.rope_scaling": "llama3" if scaling == "llama" else "none",
        "model.embeddings": "tied" if tree["enable_weight_tying"] else "untied",
        "model.qkv_bias": False,
        "model.qk_norm": "block.attention.qk_norm" not in tree,
    }
    if scaling == "llama":
        rope = "block.attention.rope"
        settings["model.rope_factor"] = tree[f"{rope}.scaling_factor"]
        settings["model.rope_original_context"] = tree[f"{rope}.original_max_position_embeddings"]
    return settings


def _parts(table: dict[str, object], prefix: str) -> dict[str, Any]:
    """The values of a part of the tree by name, without what is not of the shape."""
    entries = flatten(table)
    return {prefix + name: entries[name] for name in entries if not INITIAL.search(name)}


def _optimizer(draft: Draft) -> None:
    """One group of all parameters, with AdamW."""
    name = "optimizer.param_groups"
    groups = draft.value(name)
    known = {"lr", "betas", "eps", "weight_decay"}
    is_one = isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict)
    group = groups[0] if is_one else {}
    kwargs = group.get("optimizer_kwargs")
    plain = group.get("pattern") == ".*" and group.get("optimizer_name") == "AdamW"
    if not plain or not isinstance(kwargs, dict) or set(kwargs) - known or "lr" not in kwargs:
        expected = "one group `.*` of AdamW with lr, betas, eps and weight_decay"
        draft.refuse(name, groups, f"expected {expected}; see optimizer.groups for others")
        return
    # The defaults of torch.optim.AdamW
    defaults = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    for entry, value in {**defaults, **kwargs}.items():
        draft.set(f"optimizer.{entry}", value, name)
    implementation = draft.value("optimizer.implementation")
    if implementation == "fused_opt_states_bf16":
        draft.set("optimizer.state_dtype", "bfloat16", "optimizer.implementation")
    else:
        draft.set("optimizer.implementation", implementation, "optimizer.implementation")


def _batch(draft: Draft) -> None:
    """Tokens as sequences: a local batch has all microbatches of a pipeline."""
    length = draft.count("training.max_context_length")
    names = "training.num_tokens_per_train_step training.num_tokens_per_microbatch_per_dp_rank"
    tokens = draft.count("training.num_tokens_per_microbatch_per_dp_rank")
    total = draft.count("training.num_tokens_per_train_step")
    if not length or not tokens or tokens % length or total % length:
        draft.refuse(names, f"{tokens}, {total}", f"expected multiples of {length} tokens")
        return
    draft.set("training.seq_len", length, "training.max_context_length")
    microbatch = tokens // length
    local = microbatch
    if draft.get("parallel.pp") > 1:
        local *= draft.count(f"{P}num_pp_microbatches")
        draft.set("parallel.pp_microbatch_size", microbatch, names)
    set_batch(draft, local, 0 if total else 1, total // length, names)


def _recompute(draft: Draft) -> None:
    """The class is not in the file: only some of them have these fields."""
    prefix = "activation_checkpoint."
    if not any(name.startswith("activation_checkpoint") for name in draft.entries):
        draft.set("recompute.mode", "selective", "activation_checkpoint")  # Trainer.Config's
    elif draft.value(f"{prefix}memory_budget") is not None:
        draft.set("recompute.mode", "memory_budget", f"{prefix}memory_budget")
        budget = draft.value(f"{prefix}memory_budget")
        draft.set("recompute.budget", budget, f"{prefix}memory_budget")
    elif draft.value(f"{prefix}force_recompute_mm_shapes_by_fqns") is not None:
        name = f"{prefix}force_recompute_mm_shapes_by_fqns"
        draft.set("recompute.mode", "selective", name)
    elif draft.value(f"{prefix}preserve_rng_state") is not None:
        draft.set("recompute.mode", "full", f"{prefix}preserve_rng_state")


def _loss(draft: Draft) -> None:
    chunks = draft.value("loss.num_chunks")
    if chunks is not None:
        draft.set("loss.num_chunks", chunks, "loss.num_chunks")
    for name in ("loss.loss_fn.global_vocab_size", "loss.global_vocab_size"):
        vocab = draft.value(name)
        if vocab not in (None, draft.get("model.vocab_size")):
            draft.refuse(name, vocab, "the loss has as many classes as the model has tokens")


def _data(draft: Draft) -> None:
    draft.decide(f"data.path: the data there is {draft.value('dataloader')}"[:300])
    draft.decide(f"data.tokenizer: it is in {draft.value('hf_assets_path')!r} there")


ROWS = (
    *by(
        _model,
        "model.dim model.num_layers model.num_heads model.num_kv_heads model.head_dim "
        "model.ffn_dim model.vocab_size model.norm_eps model.rope_theta model.rope_scaling "
        "model.embeddings model.qk_norm data.document_mask",
        "the shape of the tree; documents are masked",
        "name=required flavor=required model=required",
        under="model_spec.",
    ),
    *DEGREES,
    *COMMON,
    *by(
        _data,
        "data.path data.tokenizer",
        "to decide",
        "dataloader hf_assets_path=./tests/assets/tokenizer",
    ),
    Row("dump_folder", "run.folder", "./outputs"),
    *by(
        _optimizer,
        "optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay",
        "one group of AdamW",
        "optimizer.param_groups=[] optimizer.implementation=fused",
    ),
    *by(
        _batch,
        "training.seq_len training.local_batch_size training.global_batch_size "
        "parallel.pp_microbatch_size",
        "tokens / `max_context_length`",
        "training.num_tokens_per_microbatch_per_dp_rank=16384 "
        "training.num_tokens_per_train_step=-1 training.max_context_length=2048 "
        "parallelism.num_pp_microbatches=1",
    ),
    Row("compile.enable_async_tensor_parallel", "parallel.async_tp", False),
    *by(
        _recompute,
        "recompute.mode recompute.budget",
        "`selective`, `full` or `memory_budget`, by the fields of the table",
        "activation_checkpoint activation_checkpoint.memory_budget "
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns "
        "activation_checkpoint.preserve_rng_state",
    ),
    *by(
        _loss,
        "loss.num_chunks",
        "",
        "loss.num_chunks loss.loss_fn.global_vocab_size loss.global_vocab_size",
    ),
    *must("parts are not replaced", "override.imports=[]"),
    *leave(
        "the kernels and their tensors differ, not the formulas",
        "parallelism.spmd_backend=spmd_types|partial_dtensor "
        "parallelism.enable_sequence_parallel=true|false "
        "parallelism.enable_fsdp_symm_mem=false|true parallelism.context_parallel_ptrr_mask_key "
        "training.disable_cuda_graphs=false|true optimizer.optimizer_factory_kwargs_by_name={}",
    ),
    *leave(
        "`[validation]` has samples of the training text",
        "validator.enable=false validator.freq=10|any validator.steps=-1|any "
        "validator.dataloader=null|any tokenizer={}",
    ),
    *leave(
        "there is no key for it",
        "activation_checkpoint.determinism_check=default activation_checkpoint.debug=false "
        "activation_checkpoint.visualize_memory_budget_pareto=false "
        "debug.spmd_typechecking=false debug.detect_anomaly=false debug.batch_invariant=false "
        "debug.print_config=false|true debug.save_config_file "
        "debug.enable_structured_logging=true|false profiler.enable_profiling=false "
        "profiler.profile_freq=10|any profiler.profiler_active=1 profiler.profiler_warmup=3 "
        "profiler.enable_memory_snapshot=false "
        "profiler.save_traces_folder=profiling/traces|profile_traces "
        "profiler.save_memory_snapshot_folder=profiling/memory_snapshot "
        "profiler.memory_snapshot_max_entries=1000000 profiler.memory_snapshot_freq "
        "profiler.profiler_repeat profiler.profiler_skip_first "
        "profiler.profiler_skip_first_wait profiler.trace_post_processor",
    ),
)
TORCHTITAN_JSON = Format(
    "torchtitan-json",
    "torchtitan",
    "0.3 (b5bcd76)",
    ROWS,
    (LATE_DECAY,),
    whole=(MODEL, "dataloader", "validator.dataloader", "tokenizer"),
)
