"""Converts Megatron-LM's arguments in a script, a file or a line.

Read at core_v0.19.0: megatron/training/arguments.py, the dataclasses from which it makes arguments,
and core/optimizer_param_scheduler.py. A switch is written as its option, so that of
`--disable-bias-linear` is `disable_bias_linear`; absent, it is false. Its model is a Llama only if
the script says so: by default it has LayerNorm, biases, GELU and learned positions.
"""

from __future__ import annotations

from titanlite.tools.import_config.common import (
    data_ranks,
    replicate,
    set_batch,
    set_floor,
    spare_norms_and_biases,
)
from titanlite.tools.import_config.draft import REQUIRED, Draft
from titanlite.tools.import_config.table import Format, Row, by, leave, must

SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
WSD_DECAYS = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}


def _processes(draft: Draft) -> None:
    """The number of processes, if the script starts torchrun with numbers; one node by default."""
    if not draft.processes:
        draft.processes = draft.count("nproc_per_node") * draft.count("nnodes")


def _shape(draft: Draft) -> None:
    dim = draft.count("hidden_size")
    heads = draft.count("num_attention_heads")
    draft.set("model.dim", dim, "hidden_size")
    draft.set("model.num_heads", heads, "num_attention_heads")
    kv_heads = heads
    if draft.on("group_query_attention"):
        kv_heads = draft.count("num_query_groups")
    names = "group_query_attention num_query_groups num_attention_heads"
    draft.set("model.num_kv_heads", kv_heads, names)
    if draft.value("ffn_hidden_size") is not None:
        draft.set("model.ffn_dim", draft.value("ffn_hidden_size"), "ffn_hidden_size")
    else:  # with SwiGLU, without which there is no file
        draft.set("model.ffn_dim", int(4 * dim * 2 / 3 / 64) * 64, "hidden_size swiglu")
    if draft.value("kv_channels") is not None:
        draft.set("model.head_dim", draft.value("kv_channels"), "kv_channels")
    tied = not draft.on("untie_embeddings_and_output_weights")
    name = "untie_embeddings_and_output_weights"
    draft.set("model.embeddings", "tied" if tied else "untied", name)


def _positions(draft: Draft) -> None:
    kind = draft.value("position_embedding_type")
    names = "position_embedding_type use_rotary_position_embeddings"
    if kind != "rope" and not draft.on("use_rotary_position_embeddings"):
        draft.refuse(names, kind, "positions are RoPE's; expected rope")
    linear = draft.value("rotary_seq_len_interpolation_factor")
    if draft.on("use_rope_scaling") and linear is not None:
        draft.refuse("rotary_seq_len_interpolation_factor", linear, "one scaling at a time")
    elif draft.on("use_rope_scaling"):
        draft.set("model.rope_scaling", "llama3", "use_rope_scaling")
        draft.set("model.rope_factor", draft.value("rope_scaling_factor"), "rope_scaling_factor")
        draft.set("model.rope_original_context", 8192, "use_rope_scaling")
    elif linear is not None:
        name = "rotary_seq_len_interpolation_factor"
        draft.set("model.rope_scaling", "linear", name)
        draft.set("model.rope_factor", linear, name)


def _vocabulary(draft: Draft) -> None:
    """The padded vocabulary; the tokenizer decides where no argument says its size."""
    multiple = draft.count("make_vocab_size_divisible_by") * draft.count(
        "tensor_model_parallel_size"
    )
    names = "vocab_size make_vocab_size_divisible_by tensor_model_parallel_size"
    if draft.on("no_pad_vocab_size") or draft.on("disable_pad_vocab_size"):
        multiple = 1
    if draft.count("padded_vocab_size"):
        draft.set("model.vocab_size", draft.value("padded_vocab_size"), "padded_vocab_size")
    elif draft.count("vocab_size") and multiple:
        padded = -(-draft.count("vocab_size") // multiple) * multiple
        draft.set("model.vocab_size", padded, names)
    elif multiple > 1:
        draft.decide(
            f"model.vocab_size: the tokenizer's ids, rounded up to a multiple of {multiple} there"
        )


def _precision(draft: Draft) -> None:
    dtype = "float32"
    if draft.on("bf16"):
        dtype = "bfloat16"
    elif draft.on("fp16"):
        dtype = "float16"
    draft.set("training.compute_dtype", dtype, "bf16 fp16")
    names = "grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32"
    if dtype == "bfloat16" and draft.on("grad_reduce_in_bf16"):
        draft.set("training.reduce_dtype", "bfloat16", "grad_reduce_in_bf16")
    elif draft.on("grad_reduce_in_bf16"):
        draft.leave("grad_reduce_in_bf16", True, "it counts with bf16 alone")
    elif dtype == "float16" and not draft.on("accumulate_allreduce_grads_in_fp32"):
        draft.leave(names, False, "gradients are reduced in float32, not float16")
    if dtype != "float16":
        return
    draft.set("training.loss_scale_growth", draft.value("loss_scale_window"), "loss_scale_window")
    fixed = draft.value("loss_scale")
    if fixed is not None:
        draft.leave("loss_scale", fixed, "the scale is always dynamic")
    initial = draft.number("initial_loss_scale")
    if initial <= 2**24:
        draft.set("training.loss_scale", initial, "initial_loss_scale")
    else:
        draft.leave("initial_loss_scale", int(initial), "it begins with 65536, at most 2**24")
    if draft.value("hysteresis") != 1:
        draft.leave("hysteresis", draft.value("hysteresis"), "every overflow halves the scale")


def _adam(draft: Draft) -> None:
    betas = [draft.value("adam_beta1"), draft.value("adam_beta2")]
    draft.set("optimizer.betas", betas, "adam_beta1 adam_beta2")
    draft.set("optimizer.weight_decay", draft.value("weight_decay"), "weight_decay")
    spare_norms_and_biases(draft, "weight_decay")


def _length(draft: Draft) -> None:
    """Steps, or samples as tokens, which are counted exactly."""
    steps = draft.count("train_iters")
    samples = draft.count("train_samples")
    if bool(steps) == bool(samples):
        draft.refuse("train_iters train_samples", f"{steps}, {samples}", "expected one of them")
    elif steps:
        draft.set("training.steps", steps, "train_iters")
    else:
        tokens = samples * draft.count("seq_length")
        draft.set("training.tokens", tokens, "train_samples seq_length")


def _schedule(draft: Draft) -> None:
    style = str(draft.value("lr_decay_style"))
    if style not in SCHEDULES:
        draft.refuse("lr_decay_style", style, f"expected one of {', '.join(SCHEDULES)}")
        return
    draft.set("schedule.name", SCHEDULES[style], "lr_decay_style")
    set_floor(draft, draft.number("min_lr"), draft.number("lr"), "min_lr lr")
    length = draft.count("seq_length")
    if style == "WSD":
        shape = str(draft.value("lr_wsd_decay_style"))
        if shape in WSD_DECAYS:
            draft.set("schedule.decay", WSD_DECAYS[shape], "lr_wsd_decay_style")
        else:
            draft.refuse("lr_wsd_decay_style", shape, f"expected one of {', '.join(WSD_DECAYS)}")
        if draft.count("lr_wsd_decay_samples"):
            tokens = draft.count("lr_wsd_decay_samples") * length
            draft.set("schedule.decay_tokens", tokens, "lr_wsd_decay_samples seq_length")
        else:
            steps = draft.value("lr_wsd_decay_iters")
            draft.set("schedule.decay_steps", steps, "lr_wsd_decay_iters")
    for decay, run in (("lr_decay_iters", "train_iters"), ("lr_decay_samples", "train_samples")):
        end = draft.value(decay)
        if end not in (None, draft.value(run)) and style != "constant":
            draft.leave(decay, end, f"the decay ends with the run, at {draft.value(run)}")
    _warmup(draft, length)
    warmup = "lr_warmup_fraction lr_warmup_iters lr_warmup_samples"
    if style == "inverse-square-root" and not any(draft.number(name) for name in warmup.split()):
        # There the peak is then the rate of the first sample, not of the first step
        draft.refuse(f"lr_decay_style {warmup}", style, "expected a warm-up")


def _warmup(draft: Draft, length: int) -> None:
    """A fraction is one of the decay, which may be shorter than the run."""
    fraction = draft.number("lr_warmup_fraction")
    iters = draft.count("lr_decay_iters") or draft.count("train_iters")
    samples = draft.count("lr_decay_samples") or draft.count("train_samples")
    if fraction and iters:
        names = "lr_warmup_fraction lr_decay_iters train_iters"
        draft.set("schedule.warmup_steps", round(fraction * iters), names)
    elif fraction:
        names = "lr_warmup_fraction lr_decay_samples train_samples"
        draft.set("schedule.warmup_tokens", round(fraction * samples * length), names)
    elif draft.count("lr_warmup_samples"):
        tokens = draft.count("lr_warmup_samples") * length
        draft.set("schedule.warmup_tokens", tokens, "lr_warmup_samples seq_length")
    else:
        draft.set("schedule.warmup_steps", draft.value("lr_warmup_iters"), "lr_warmup_iters")


def _batch(draft: Draft) -> None:
    """A pipeline's microbatches are parts of one local batch."""
    micro = draft.count("micro_batch_size")
    total = draft.count("global_batch_size")
    names = "micro_batch_size global_batch_size"
    ranks = data_ranks(draft)
    if draft.get("parallel.pp") == 1 or not micro:
        set_batch(draft, micro, 0 if total else 1, total, names)
        return
    draft.set("parallel.pp_microbatch_size", micro, "micro_batch_size")
    if not ranks:
        draft.refusals.append(
            "micro_batch_size: with a pipeline the local batch depends on the number of "
            "processes (GPUs): give --processes N"
        )
    elif total % (micro * ranks):
        draft.refuse(names, f"{micro}, {total}", f"expected a multiple of {micro} x {ranks} ranks")
    else:
        set_batch(draft, (total or micro * ranks) // ranks, 0, total or micro * ranks, names)


def _data_parallel(draft: Draft) -> None:
    """Sets how parameters and moments are sharded; Megatron replicates them by default."""
    if draft.on("use_torch_fsdp2"):
        names = "use_torch_fsdp2 torch_fsdp2_no_reshard_after_forward"
        kept = draft.on("torch_fsdp2_no_reshard_after_forward")
        draft.set("parallel.reshard_after_forward", "never" if kept else "always", names)
    elif draft.on("use_distributed_optimizer"):
        draft.set("parallel.reshard_after_forward", "never", "use_distributed_optimizer")
    else:
        replicate(draft, "use_distributed_optimizer")


def _interleaved(draft: Draft) -> None:
    names = "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank"
    stages = draft.count("num_virtual_stages_per_pipeline_rank") or 1
    layers = draft.count("num_layers_per_virtual_pipeline_stage")
    pp = draft.get("parallel.pp")
    if layers:
        stages = draft.count("num_layers") // (layers * pp)
        if stages * layers * pp != draft.count("num_layers"):
            draft.refuse(names, layers, f"expected a divisor of the layers of {pp} stages")
    if pp > 1 and stages > 1:
        draft.set("parallel.pp_schedule", "Interleaved1F1B", names)
        draft.set("parallel.pp_stages_per_process", stages, names)


def _recompute(draft: Draft) -> None:
    mode = draft.value("recompute_granularity")
    if draft.on("recompute_activations"):
        mode = "selective"
    if mode is None:
        return
    draft.set("recompute.mode", mode, "recompute_granularity recompute_activations")
    if mode == "selective":
        names = "recompute_granularity recompute_activations"
        reason = "attention is recomputed there; here all but the results of expensive operators"
        draft.leave(names, mode, reason)
    method = draft.value("recompute_method")
    layers = draft.value("recompute_num_layers")
    if mode == "full" and (method, layers) not in (("uniform", 1), ("uniform", None)):
        names = "recompute_method recompute_num_layers"
        draft.leave(names, f"{method} {layers}", "every block is recomputed; see recompute.every")


def _documents(draft: Draft) -> None:
    both = draft.on("reset_position_ids") and draft.on("reset_attention_mask")
    names = "reset_position_ids reset_attention_mask"
    draft.set("data.document_mask", both, names)
    if not both and (draft.on("reset_position_ids") or draft.on("reset_attention_mask")):
        draft.leave(names, True, "data.document_mask does both")


def _saves(draft: Draft) -> None:
    draft.set("checkpoint.freq", draft.value("save_interval") or 0, "save_interval")
    mode = "async" if draft.on("async_save") else "disabled"
    draft.set("checkpoint.async_mode", mode, "async_save")


def _validation(draft: Draft) -> None:
    freq = draft.value("eval_interval") or 0
    draft.set("validation.freq", freq, "eval_interval")
    samples = draft.count("eval_iters") * draft.get("training.global_batch_size")
    if freq and samples:
        draft.set("validation.samples", samples, "eval_iters global_batch_size")


def _sinks(draft: Draft) -> None:
    pairs = (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb"))
    names = [name for name, _ in pairs if draft.entries.get(name)]
    sinks = [sink for name, sink in pairs if name in names]
    if sinks:
        draft.set("metrics.sinks", sinks, " ".join(names))
    if "wandb_project" in names:
        draft.set("metrics.project", draft.entries["wandb_project"], "wandb_project")


def _data(draft: Draft) -> None:
    given = [name for name in ("data_path", "train_data_path") if name in draft.entries]
    found = str(draft.entries[given[0]])[:80] if given else "not in the file"
    draft.decide(
        f"data.path: the data there is {found!r}; titanlite prepare reads its .bin and .idx files"
    )
    files = [draft.entries[name] for name in TOKENIZER if name in draft.entries]
    draft.decide(f"data.tokenizer: it is {str(files[0])[:80] if files else 'not in the file'!r}")


def _timeout(draft: Draft) -> None:
    seconds = int(60 * draft.number("distributed_timeout_minutes"))
    draft.set("comm.timeout_seconds", seconds, "distributed_timeout_minutes")


TOKENIZER = ("tokenizer_model", "vocab_file")
ROWS = (
    *by(_processes, "", "counts the processes", "nproc_per_node nnodes=1"),
    *leave(
        "torchrun's arguments are the same here",
        "node_rank=null|any master_addr=null|any master_port=null|any rdzv_backend=null|any "
        "rdzv_endpoint=null|any rdzv_id=null|any max_restarts=null|any",
    ),
    Row("tensor_model_parallel_size", "parallel.tp", 1),
    Row("pipeline_model_parallel_size", "parallel.pp", 1),
    Row("context_parallel_size", "parallel.cp", 1),
    *by(
        _interleaved,
        "parallel.pp_schedule parallel.pp_stages_per_process",
        "`Interleaved1F1B`",
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank",
    ),
    *by(
        _data_parallel,
        "parallel.reshard_after_forward parallel.dp_replicate parallel.dp_shard",
        'replicas; `"never"` for the distributed optimizer, `"always"` for FSDP',
        "use_distributed_optimizer=false use_torch_fsdp2=false "
        "torch_fsdp2_no_reshard_after_forward=false",
    ),
    *must(
        "this degree or order of parallel processes is not built",
        "expert_model_parallel_size=1 expert_tensor_parallel_size "
        "tensor_parallel_num_weight_shards hierarchical_context_parallel_sizes "
        "hybrid_context_parallel=false num_distributed_optimizer_instances=1 "
        "outer_dp_sharding_strategy=no_shard pipeline_model_parallel_layout "
        "use_tp_pp_dp_mapping=false use_megatron_fsdp=false decrease_batch_size_if_needed=false",
    ),
    Row("num_layers", "model.num_layers", REQUIRED),
    *by(
        _shape,
        "model.dim model.num_heads model.num_kv_heads model.ffn_dim model.head_dim "
        "model.embeddings",
        "SwiGLU's width is 8/3 `hidden_size` in multiples of 64; tied by default",
        "hidden_size=required num_attention_heads=required group_query_attention=false "
        "num_query_groups=1 ffn_hidden_size kv_channels "
        "untie_embeddings_and_output_weights=false",
    ),
    *(
        Row(name, "", default, reason, same=(needed,), refuse=True)
        for name, default, needed, reason in (
            ("swiglu", False, True, "the feed-forward is SwiGLU's, with three matrices"),
            ("normalization", "LayerNorm", "RMSNorm", "norms are RMSNorm"),
            ("disable_bias_linear", False, True, "linear layers have no biases"),
        )
    ),
    *by(
        _positions,
        "model.rope_scaling model.rope_factor model.rope_original_context",
        "`rope` alone; `use_rope_scaling` is Llama 3.1's",
        "position_embedding_type=learned_absolute use_rotary_position_embeddings=false "
        "use_rope_scaling=false rope_scaling_factor=8.0 rotary_seq_len_interpolation_factor",
    ),
    Row("rotary_base", "model.rope_theta", 10000),
    Row("norm_epsilon", "model.norm_eps", 1e-5),
    Row("add_qkv_bias", "model.qkv_bias", False),
    Row("qk_layernorm", "model.qk_norm", False),
    *by(
        _vocabulary,
        "model.vocab_size",
        "rounded up as there",
        "padded_vocab_size vocab_size make_vocab_size_divisible_by=128 no_pad_vocab_size=false "
        "disable_pad_vocab_size=false",
    ),
    *must(
        "the model is a dense Llama",
        "num_experts multi_latent_attention=false experimental_attention_variant "
        "heterogeneous_layers_config_path hybrid_layer_pattern hybrid_override_pattern "
        "mtp_num_layers encoder_num_layers decoder_num_layers spec softmax_type=vanilla "
        "window_size rotary_percent=1.0 no_rope_freq rope_type=null|rope "
        "no_position_embedding=false|true qk_l2_norm=false qk_clip=false "
        "attention_output_gate=false glu_linear_offset=0.0 activation_func_clamp_value "
        "squared_relu=false openai_gelu=false quick_geglu=false "
        "apply_residual_connection_post_layernorm=false use_mup=false freeze_all_layers=false "
        "fp8_format fp4_format use_checkpoint_args=false use_mp_args_from_checkpoint_args=false "
        "yaml_cfg sft=false perform_rl_step=false fim_data=false",
    ),
    *leave(
        "weights begin as torchtitan's do: std 0.02, less in deeper blocks",
        "init_method_std=0.02 embedding_init_method_std init_method_xavier_uniform=false "
        "data_parallel_random_init=false",
    ),
    *(
        Row(name, "", 0.1, "there is no dropout of weights that are trained", same=(0,))
        for name in ("hidden_dropout", "attention_dropout")
    ),
    Row("seq_length", "training.seq_len", REQUIRED),
    *by(
        _length,
        "training.steps training.tokens",
        "samples x `seq_length`",
        "train_iters train_samples",
    ),
    *by(
        _batch,
        "training.local_batch_size training.global_batch_size parallel.pp_microbatch_size",
        "with pp a local batch has all microbatches of a rank",
        "micro_batch_size=required global_batch_size",
    ),
    *must(
        "rates follow samples there, and version 0.19 ignores the older of the two: write "
        "`training.batch_ramp` by hand",
        "step_batch_size_schedule rampup_batch_size",
    ),
    *by(
        _precision,
        "training.compute_dtype training.reduce_dtype training.loss_scale "
        "training.loss_scale_growth",
        "float32 without either; a scale for float16 alone",
        "bf16=false fp16=false grad_reduce_in_bf16=false "
        "accumulate_allreduce_grads_in_fp32=false loss_scale initial_loss_scale=4294967296 "
        "loss_scale_window=1000 hysteresis=2",
    ),
    Row("optimizer", "optimizer.name", "adam", values={"adam": "adamw"}),
    Row("lr", "optimizer.lr", REQUIRED),
    *by(
        _adam,
        "optimizer.betas optimizer.weight_decay optimizer.groups",
        "norms and biases do not decay",
        "adam_beta1=0.9 adam_beta2=0.999 weight_decay=0.01",
    ),
    Row("adam_eps", "optimizer.eps", 1e-8),
    Row("clip_grad", "training.max_norm", 1.0),
    *by(
        _schedule,
        "schedule.name schedule.decay schedule.decay_steps schedule.decay_tokens "
        "schedule.min_ratio schedule.warmup_steps schedule.warmup_tokens",
        "`min_lr` / `lr`; a warm-up fraction is one of the decay, not of the run",
        "lr_decay_style=linear min_lr=0.0 lr_decay_iters lr_decay_samples "
        "lr_wsd_decay_style=exponential lr_wsd_decay_iters lr_wsd_decay_samples "
        "lr_warmup_fraction lr_warmup_iters=0 lr_warmup_samples=0",
    ),
    *leave(
        "rates, decay and moments are the same for all parameters and steps",
        "lr_warmup_init=0.0 decoupled_lr decoupled_min_lr start_weight_decay end_weight_decay "
        "weight_decay_incr_style=constant apply_wd_to_qk_layernorm=false "
        "no_weight_decay_cond_type override_opt_param_scheduler=false|true "
        "use_checkpoint_opt_param_scheduler=false|true use_precision_aware_optimizer=false "
        "exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32 main_grads_dtype=fp32 main_params_dtype=fp32 "
        "sgd_momentum=0.9 min_loss_scale=1.0 iterations_to_skip=[]",
    ),
    *by(
        _recompute,
        "recompute.mode",
        "",
        "recompute_granularity recompute_activations=false recompute_method recompute_num_layers",
    ),
    *leave(
        "`recompute.mode` is the one choice",
        "recompute_modules distribute_saved_activations=false cpu_offloading_num_layers=0",
    ),
    Row("optimizer_cpu_offload", "parallel.optimizer_offload", False),
    *leave(
        "all moments are offloaded, and copied in order",
        "optimizer_offload_fraction=1.0 use_torch_optimizer_for_cpu_offload=false "
        "overlap_cpu_optimizer_d2h_h2d=false|true",
    ),
    Row("seed", "run.seed", 1234),
    *by(
        _documents,
        "data.document_mask",
        "both of them",
        "reset_position_ids=false reset_attention_mask=false",
    ),
    *by(
        _data,
        "data.path data.tokenizer",
        "to decide",
        "data_path train_data_path tokenizer_model vocab_file",
    ),
    *leave(
        "whole documents are held out, 1 in 20; the data's files say the rest",
        "split valid_data_path test_data_path data_args_path per_split_data_args_path "
        "mock_data=false tokenizer_type merge_file vocab_extra_ids=0 tiktoken_pattern "
        "tiktoken_num_special_tokens=1000 eod_mask_loss=false "
        "dataloader_inter_document_masking=false dataloader_type=null|single "
        "full_validation=false eval_global_batch_size eval_micro_batch_size",
    ),
    *leave(
        "samples need no cache and no worker processes",
        "data_cache_path num_workers=2 no_mmap_bin_files=false|true "
        "no_create_attention_mask_in_dataloader=false|true num_dataset_builder_threads=1",
    ),
    Row("save", "run.folder", None),
    *by(
        _saves,
        "checkpoint.freq checkpoint.async_mode",
        "without an interval only at the end",
        "save_interval async_save=false",
    ),
    *leave(
        "a run resumes from its own folder; `checkpoint.initial_load` begins with weights",
        "load pretrained_checkpoint finetune=false ckpt_step exit_on_missing_checkpoint=false "
        "no_load_optim no_load_rng auto_detect_ckpt_format=false|true",
    ),
    *leave(
        "checkpoints are torch.distributed.checkpoint's, with all state",
        "ckpt_format=torch_dist|torch|torch_dcp|fsdp_dtensor use_dist_ckpt=false|true "
        "dist_ckpt_format=null|torch_dist dist_ckpt_strictness=assume_ok_unexpected "
        "ckpt_fully_parallel_save=false|true ckpt_fully_parallel_load=false|true "
        "ckpt_assume_constant_structure=false|true no_save_optim no_save_rng "
        "save_retain_interval non_persistent_save_interval non_persistent_ckpt_type",
    ),
    *by(
        _validation,
        "validation.freq validation.samples",
        "`eval_iters` x global batch",
        "eval_interval eval_iters=100",
    ),
    Row("log_interval", "metrics.log_freq", 100),
    # Text, so that variables of the script may stand in it
    *by(_sinks, "metrics.project", "`metrics.sinks` too", "tensorboard_dir wandb_project"),
    *leave(
        "`metrics.jsonl` has loss, rate, throughput, times and memory",
        "wandb_exp_name wandb_save_dir wandb_entity tensorboard_log_interval=1 "
        "tensorboard_queue_size=1000 log_throughput=false|true log_progress=false|true "
        "log_params_norm=false|true log_num_zeros_in_grad=false "
        "log_timers_to_tensorboard=false|true log_validation_ppl_to_tensorboard=false|true "
        "log_memory_to_tensorboard=false|true log_world_size_to_tensorboard=false|true "
        "timing_log_level=0|1|2 timing_log_option=minmax|max|all "
        "no_barrier_with_level_1_timing=false|true logging_level log_straggler=false",
    ),
    *leave(
        "`[profiling]`",
        "profile=false profile_step_start=10 profile_step_end=12 profile_ranks=[] "
        "use_pytorch_profiler=false record_memory_history=false nvtx_ranges=false",
    ),
    *by(
        _timeout,
        "comm.timeout_seconds",
        "times 60",
        "distributed_timeout_minutes=10",
    ),
    Row("deterministic_mode", "debug.deterministic", False),
    *leave(
        "the kernel and the order of communication change no formula; torch chooses them here",
        "sequence_parallel=false|true attention_backend=auto|flash|fused|unfused "
        "use_flash_attn=false|true flash_attention_version=null|2|3|4 "
        "transformer_impl=transformer_engine|local use_mcore_models=false|true "
        'cp_comm_type=["p2p"]|p2p|all_gather|a2a rotary_interleaved=false|true '
        "overlap_grad_reduce=false|true overlap_param_gather=false|true "
        "no_overlap_p2p_communication=false|true no_align_param_gather=false|true "
        "no_align_grad_reduce=false|true tp_comm_overlap=false|true ddp_bucket_size "
        "ddp_num_buckets ddp_average_in_collective=false|true delay_wgrad_compute=false|true "
        "defer_embedding_wgrad_compute=false|true cross_entropy_loss_fusion=false|true "
        "cross_entropy_fusion_impl=native|te no_masked_softmax_fusion=false|true "
        "no_bias_gelu_fusion=false|true no_bias_swiglu_fusion=false|true "
        "no_bias_dropout_fusion=false|true no_rope_fusion=false|true "
        "no_persist_layer_norm=false|true no_gradient_accumulation_fusion=false|true "
        "disable_jit_fuser=false|true cuda_graph_impl=none|local|transformer_engine "
        "te_rng_tracker=false|true distributed_backend=nccl|gloo manual_gc=false|true "
        "manual_gc_interval=0 empty_unused_memory_level=0|1|2 use_cpu_initialization=null|true "
        "calculate_per_token_loss=false|true account_for_embedding_in_pipeline_split=false|true "
        "account_for_loss_in_pipeline_split=false|true decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers no_check_for_nan_in_loss_and_grad=false|true",
    ),
    *leave("RoPE has no table of positions", "max_position_embeddings=null|any"),
    *leave(
        "numbers are computed in the compute dtype, and where torch says so in float32",
        "fp32_residual_connection=false attention_softmax_in_fp32=false|true "
        "apply_query_key_layer_scaling=false apply_layernorm_1p=false "
        "fp16_lm_cross_entropy=false",
    ),
    *leave(
        "a signal saves and ends a run",
        "exit_interval exit_duration_in_mins exit_signal_handler=false|true",
    ),
)
REMARKS = (
    "lr: the rate of step n there is that of step n - 1 here, so a warm-up begins with 0",
    "initial weights: normal of std init_method_std there, the embedding and the output too, with "
    "one smaller std for the last matrices of all blocks; here they are torchtitan's",
)
MEGATRON = Format("megatron", "Megatron-LM", "core 0.19.0", ROWS, REMARKS)
