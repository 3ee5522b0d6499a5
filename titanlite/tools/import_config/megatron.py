"""Megatron-LM's arguments (megatron/training/arguments.py), in a script, a file or a line."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.config.keys import schema_keys
from titanlite.tools.import_config.common import (
    batch_sizes,
    data_ranks,
    decide_flavor,
    min_ratio,
    whole,
)
from titanlite.tools.import_config.mapping import Draft, Format, Row, as_number, nothing


def _first_number(draft: Draft, name: str) -> int:
    """The number that follows the name; 0 if it is none. The script's name may follow it."""
    words = str(draft.value(name)).split()
    number = as_number(words[0]) if words else 0
    return whole(number) if isinstance(number, (int, float)) else 0


def _processes(draft: Draft) -> None:
    """The number of processes, if the script starts torchrun with numbers."""
    per_node = _first_number(draft, "nproc_per_node")
    nodes = _first_number(draft, "nnodes") if draft.has("nnodes") else 1  # torchrun's default
    if draft.processes or not per_node:
        return
    draft.processes = per_node * nodes  # 0, not known, if nnodes is a variable from elsewhere
    if not draft.has("nnodes"):
        draft.decide(
            f"training.local_batch_size, training.global_batch_size: for the {per_node} processes "
            "of one node (nproc_per_node, without nnodes); give --processes N for others"
        )


def _shape(draft: Draft) -> None:
    if not draft.has("hidden_size"):
        return
    decide_flavor(draft)
    draft.set("model.dim", draft.value("hidden_size"), "hidden_size")
    heads = draft.value("num_attention_heads")
    if heads is not None:
        draft.set("model.num_heads", heads, "num_attention_heads")
        groups = draft.value("num_query_groups") if draft.on("group_query_attention") else heads
        draft.set("model.num_kv_heads", groups or heads, "num_query_groups num_attention_heads")
    if draft.on("ffn_hidden_size"):
        draft.set("model.ffn_dim", draft.value("ffn_hidden_size"), "ffn_hidden_size")
    else:
        size = 4 * whole(draft.number("hidden_size"))
        draft.set("model.ffn_dim", size, "hidden_size")
    if not draft.on("swiglu"):
        draft.decide(
            "model: without --swiglu the feed-forward there has two matrices and GELU; here it is "
            "SwiGLU with three"
        )


def _untied(draft: Draft) -> None:
    draft.set("model.embeddings", "untied", "untie_embeddings_and_output_weights")


def _positions(draft: Draft) -> None:
    kind = draft.value("position_embedding_type")
    if kind != "rope":
        draft.lack("position_embedding_type", kind, "positions are RoPE's")


def _norm(draft: Draft) -> None:
    kind = draft.value("normalization")
    if str(kind).lower() != "rmsnorm":
        draft.lack("normalization", kind, "norms are RMSNorm")


def _precision(draft: Draft) -> None:
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.on(name):
            draft.set("training.compute_dtype", dtype, name)


def _betas(draft: Draft) -> None:
    betas = [draft.value("adam_beta1", 0.9), draft.value("adam_beta2", 0.999)]
    draft.set("optimizer.betas", betas, "adam_beta1 adam_beta2")


def _samples(draft: Draft) -> None:
    tokens = draft.number("train_samples") * draft.number("seq_length")
    draft.set("training.tokens", tokens, "train_samples seq_length")


def _schedule(draft: Draft) -> None:
    style = str(draft.value("lr_decay_style"))
    draft.set("schedule.name", style, "lr_decay_style")
    if style.lower() == "wsd":
        steps = draft.value("lr_wsd_decay_iters")
        if steps is not None:
            draft.set("schedule.decay_steps", steps, "lr_wsd_decay_iters")
        shape = draft.value("lr_wsd_decay_style", "exponential")
        draft.set("schedule.decay", shape, "lr_wsd_decay_style")
    decay = draft.number("lr_decay_iters")
    if decay and decay != draft.number("train_iters") and style.lower() != "wsd":
        draft.lack("lr_decay_iters", decay, "the decay ends with the last step")


def _warmup(draft: Draft) -> None:
    if draft.on("lr_warmup_fraction"):
        draft.set("schedule.warmup_ratio", draft.value("lr_warmup_fraction"), "lr_warmup_fraction")
    elif draft.on("lr_warmup_samples"):
        tokens = draft.number("lr_warmup_samples") * draft.number("seq_length")
        draft.set("schedule.warmup_tokens", tokens, "lr_warmup_samples seq_length")
    else:
        draft.set("schedule.warmup_steps", draft.value("lr_warmup_iters"), "lr_warmup_iters")


def _lowest(draft: Draft) -> None:
    min_ratio(draft, "min_lr", "lr")


def _recompute(draft: Draft) -> None:
    if draft.on("recompute_activations"):
        draft.set("recompute.mode", "selective", "recompute_activations")
    elif draft.on("recompute_granularity"):
        draft.set("recompute.mode", draft.value("recompute_granularity"), "recompute_granularity")
    if draft.get("recompute.mode") == "selective":
        draft.decide(
            'recompute.mode = "selective": there attention is recomputed, here everything but the '
            "results of expensive operators"
        )
    layers = draft.number("recompute_num_layers")
    if layers > 1 and draft.value("recompute_method") == "uniform":
        draft.lack("recompute_num_layers", layers, "the input of every block is kept")
    elif layers and draft.value("recompute_method") == "block":
        draft.lack("recompute_num_layers", layers, "the first blocks there; see recompute.every")


def _data_parallel(draft: Draft) -> None:
    if draft.on("use_torch_fsdp2") or draft.on("use_megatron_fsdp"):
        draft.set("parallel.reshard_after_forward", "always", "use_torch_fsdp2 use_megatron_fsdp")
    elif draft.on("use_distributed_optimizer"):
        draft.set("parallel.reshard_after_forward", "never", "use_distributed_optimizer")
    elif not draft.on("use_distributed_optimizer"):
        draft.decide(
            "parallel.dp_shard: without --use-distributed-optimizer every process has all "
            "parameters and moments; here they are sharded (parallel.dp_replicate keeps replicas)"
        )


def _interleaved(draft: Draft) -> None:
    names = "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank"
    stages = whole(draft.number("num_virtual_stages_per_pipeline_rank"))
    per_stage = whole(draft.number("num_layers_per_virtual_pipeline_stage"))
    pp = draft.get("parallel.pp")
    if per_stage and not stages:
        stages = whole(draft.number("num_layers")) // (per_stage * max(1, pp))
    if stages > 1:
        draft.set("parallel.pp_schedule", "Interleaved1F1B", names)
        draft.set("parallel.pp_stages_per_process", stages, names)


def _batch(draft: Draft) -> None:
    batch_sizes(draft, "micro_batch_size", "", "global_batch_size")
    if draft.get("parallel.pp") == 1:
        return
    # A pipeline's microbatches are parts of one local batch
    draft.set("parallel.pp_microbatch_size", draft.value("micro_batch_size", 1), "micro_batch_size")
    ranks = data_ranks(draft)
    total = draft.get("training.global_batch_size")
    if ranks and total % ranks == 0:
        names = "global_batch_size micro_batch_size"
        draft.set("training.local_batch_size", total // ranks, names)
    else:
        if total % schema_keys()["training.local_batch_size"].default == 0:  # which then loads
            draft.settings.pop("training.local_batch_size", None)
        draft.decide(
            "training.local_batch_size: with pp it has all microbatches of a step, which is "
            f"{total} / data-parallel processes; give --processes N, which computes it"
        )


def _ramp(draft: Draft) -> None:
    value = draft.value("rampup_batch_size")
    parts = [whole(float(part)) for part in str(value).split() if part.isdecimal()]
    total = draft.get("training.global_batch_size")
    if len(parts) != 3 or not all(parts):
        draft.lack("rampup_batch_size", value, "expected START INCREMENT SAMPLES")
        return
    start, increment, samples = parts
    tokens = samples * draft.get("training.seq_len")
    draft.set("training.global_batch_size", start, "rampup_batch_size")
    ramp = f"{total} by {increment} from {tokens} tokens"
    draft.set("training.batch_ramp", ramp, "rampup_batch_size global_batch_size")


def _sinks(draft: Draft) -> None:
    pairs = (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb"))
    names = [name for name, _ in pairs if draft.on(name)]
    sinks = [sink for name, sink in pairs if name in names]
    draft.set("metrics.sinks", sinks, " ".join(names))


def _eval_samples(draft: Draft) -> None:
    samples = draft.number("eval_iters") * draft.number("global_batch_size")
    if samples:
        draft.set("validation.samples", samples, "eval_iters global_batch_size")


def _data(draft: Draft) -> None:
    draft.decide(
        f"data.path: the data there is {str(draft.value('data_path'))[:80]!r}; its .bin and .idx "
        "files can be read by titanlite prepare, or give the text"
    )


def _tokenizer(draft: Draft) -> None:
    found = draft.value("tokenizer_model") or draft.value("vocab_file")
    draft.decide(f"data.tokenizer: there it is {str(found)[:80]!r}")


def _timeout(draft: Draft) -> None:
    minutes = draft.number("distributed_timeout_minutes")
    draft.set("comm.timeout_seconds", 60 * minutes, "distributed_timeout_minutes")


def _async_save(draft: Draft) -> None:
    if draft.on("async_save"):
        draft.set("checkpoint.async_mode", "async", "async_save")


ROWS = (
    Row("nproc_per_node nnodes", "", "torchrun's arguments are the same here", _processes),
    Row("tensor_model_parallel_size", "parallel.tp"),
    Row("pipeline_model_parallel_size", "parallel.pp"),
    Row("context_parallel_size", "parallel.cp"),
    Row(
        "sequence_parallel",
        "",
        "part of `parallel.tp`",
        nothing,
    ),
    Row(
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank",
        "parallel.pp_schedule parallel.pp_stages_per_process",
        "`Interleaved1F1B`",
        _interleaved,
    ),
    Row(
        "use_distributed_optimizer use_torch_fsdp2 use_megatron_fsdp",
        "parallel.reshard_after_forward",
        '`"never"` for the distributed optimizer, `"always"` for FSDP',
        _data_parallel,
    ),
    Row(
        "overlap_grad_reduce overlap_param_gather overlap_p2p_communication tp_comm_overlap",
        "",
        "FSDP2 overlaps its communication; `parallel.async_tp` that of tp",
    ),
    Row("num_layers", "model.num_layers"),
    Row(
        "hidden_size num_attention_heads num_query_groups group_query_attention ffn_hidden_size "
        "swiglu",
        "model.dim model.num_heads model.num_kv_heads model.ffn_dim",
        "4 `hidden_size` without `ffn_hidden_size`",
        _shape,
    ),
    Row("kv_channels", "model.head_dim"),
    Row("rotary_base", "model.rope_theta"),
    Row("norm_epsilon layernorm_epsilon", "model.norm_eps"),
    Row("position_embedding_type", "", "RoPE is the one kind", _positions),
    Row("normalization", "", "RMSNorm is the one kind", _norm),
    Row("untie_embeddings_and_output_weights", "model.embeddings", "", _untied),
    Row("padded_vocab_size", "model.vocab_size"),
    Row("max_position_embeddings", "", "the length of training is `training.seq_len`", nothing),
    Row("attention_dropout hidden_dropout", "", "there is no dropout but that of adapters"),
    Row(
        "disable_bias_linear no_position_embedding use_rotary_position_embeddings init_method_std "
        "make_vocab_size_divisible_by use_mcore_models use_flash_attn attention_backend "
        "transformer_impl no_masked_softmax_fusion attention_softmax_in_fp32 "
        "no_gradient_accumulation_fusion cross_entropy_loss_fusion",
        "",
        "part of the model or of its kernels",
        nothing,
    ),
    Row(
        "add_qkv_bias",
        "model.qkv_bias",
        "",
        lambda draft: draft.set("model.qkv_bias", "true", "add_qkv_bias"),
    ),
    Row(
        "qk_layernorm",
        "model.qk_norm",
        "",
        lambda draft: draft.set("model.qk_norm", "true", "qk_layernorm"),
    ),
    Row("seq_length", "training.seq_len"),
    Row("train_iters", "training.steps"),
    Row("train_samples", "training.tokens", "samples x `seq_length`", _samples),
    Row(
        "micro_batch_size global_batch_size",
        "training.local_batch_size training.global_batch_size parallel.pp_microbatch_size",
        "with pp a local batch has all microbatches of a process",
        _batch,
    ),
    Row(
        "rampup_batch_size",
        "training.batch_ramp training.global_batch_size",
        "`global by INCREMENT from SAMPLES x seq_length tokens`",
        _ramp,
    ),
    Row("bf16 fp16", "training.compute_dtype", "", _precision),
    Row(
        "accumulate_allreduce_grads_in_fp32 main_grads_dtype main_params_dtype",
        "",
        "gradients are reduced in `training.reduce_dtype`, float32 by default",
        nothing,
    ),
    Row("initial_loss_scale", "training.loss_scale"),
    Row("loss_scale_window", "training.loss_scale_growth"),
    Row(
        "fp8_format fp8_hybrid",
        "float8.enabled",
        "tensorwise; see `float8.scaling`",
        lambda draft: draft.set("float8.enabled", True, "fp8_format fp8_hybrid"),
    ),
    Row("optimizer", "optimizer.name"),
    Row("lr", "optimizer.lr"),
    Row("min_lr", "schedule.min_ratio", "`min_lr` / `lr`", _lowest),
    Row("adam_beta1 adam_beta2", "optimizer.betas", "the default there is 0.9 and 0.999", _betas),
    Row("adam_eps", "optimizer.eps"),
    Row("weight_decay", "optimizer.weight_decay", "the default there is 0.01"),
    Row("clip_grad", "training.max_norm"),
    Row(
        "lr_decay_style lr_wsd_decay_iters lr_wsd_decay_style lr_decay_iters lr_decay_samples",
        "schedule.name schedule.decay schedule.decay_steps",
        "the decay ends with the last step",
        _schedule,
    ),
    Row(
        "lr_warmup_iters lr_warmup_fraction lr_warmup_samples",
        "schedule.warmup_steps schedule.warmup_ratio schedule.warmup_tokens",
        "",
        _warmup,
    ),
    Row(
        "recompute_activations recompute_granularity recompute_method recompute_num_layers",
        "recompute.mode",
        "",
        _recompute,
    ),
    Row("optimizer_cpu_offload", "parallel.optimizer_offload"),
    Row("seed", "run.seed", "the default there is 1234"),
    Row("data_path data_args_path train_data_path mock_data", "data.path", "to decide", _data),
    Row("tokenizer_model vocab_file", "data.tokenizer", "to decide", _tokenizer),
    Row(
        "tokenizer_type merge_file vocab_size data_cache_path num_workers dataloader_type "
        "no_mmap_bin_files",
        "",
        "the tokenizer's file says it; samples need no worker processes",
        nothing,
    ),
    Row("split", "", "whole documents are held out, 1 in 20", nothing),
    Row("save", "run.folder"),
    Row(
        "load",
        "",
        "a run resumes from its own folder; `checkpoint.initial_load` begins with weights",
    ),
    Row("save_interval", "checkpoint.freq"),
    Row("async_save", "checkpoint.async_mode", "", _async_save),
    Row("eval_interval", "validation.freq"),
    Row("eval_iters", "validation.samples", "times `global_batch_size`", _eval_samples),
    Row("log_interval", "metrics.log_freq"),
    Row("tensorboard_dir wandb_project", "metrics.sinks", "", _sinks),
    Row(
        "wandb_exp_name wandb_save_dir tensorboard_queue_size log_throughput "
        "log_timers_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_memory_to_tensorboard timing_log_level",
        "",
        "`metrics.jsonl` always has throughput, times and memory",
        nothing,
    ),
    Row("distributed_timeout_minutes", "comm.timeout_seconds", "times 60", _timeout),
    Row("deterministic_mode", "debug.deterministic"),
    Row(
        "ckpt_format use_dist_ckpt dist_ckpt_format distributed_backend master_addr master_port "
        "node_rank rdzv_backend rdzv_endpoint",
        "",
        "nothing to set",
        nothing,
    ),
    Row("num_experts expert_model_parallel_size moe_*", "", "models are dense"),
)


def defaults(entries: Mapping[str, object]) -> dict[str, object]:
    """Of arguments.py, where they are not ours."""
    silent: dict[str, object] = {
        "lr_decay_style": "linear",
        "lr_warmup_iters": 0,
        "adam_beta2": 0.999,
        "weight_decay": 0.01,
        "seed": 1234,
        "use_distributed_optimizer": False,
    }
    if "lr" in entries:
        silent["min_lr"] = 0.0
    return silent


MEGATRON = Format(
    "megatron",
    "Megatron-LM",
    ROWS,
    defaults,
)
