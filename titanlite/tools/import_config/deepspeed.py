"""Converts DeepSpeed's JSON.

Read at v0.19.5: deepspeed/runtime/config.py and constants.py, the config classes of its parts,
lr_schedules.py and, for the optimizers' defaults, engine.py and ops/adam.
"""

from __future__ import annotations

from titanlite.tools.import_config.common import replicate, set_batch, set_floor
from titanlite.tools.import_config.draft import AUTO, Draft
from titanlite.tools.import_config.table import Format, Row, by, leave, must

ZERO = "zero_optimization."
ADAM = "optimizer.params."
RATE = "scheduler.params."
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _layout(draft: Draft) -> None:
    degree = draft.count("tensor_parallel.autotp_size")
    inner = draft.count("tensor_parallel.tp.tp_size")
    names = "tensor_parallel.autotp_size tensor_parallel.tp.tp_size"
    draft.set("parallel.tp", max(degree, inner, 1), names)
    ulysses = draft.count("sequence_parallel_size")
    if ulysses > 1:
        draft.set("parallel.cp", ulysses, "sequence_parallel_size")
        draft.set("parallel.cp_method", "ulysses", "sequence_parallel_size")


def _stage(draft: Draft) -> None:
    name = f"{ZERO}stage"
    stage = draft.value(name)
    if stage == 0:
        replicate(draft, name)
    elif stage in (1, 2):
        draft.set("parallel.reshard_after_forward", "never", name)
    elif stage == 3:
        draft.set("parallel.reshard_after_forward", "always", name)
    else:
        draft.refuse(name, stage, "expected a stage from 0 to 3")
    second = draft.count(f"{ZERO}zero_hpz_partition_size")
    if stage == 3 and second > 1:
        name = f"{ZERO}zero_hpz_partition_size"
        draft.set("parallel.reshard_after_forward", str(second), name)
    shards = draft.count(f"{ZERO}mics_shard_size")
    if shards:
        draft.set("parallel.dp_shard", shards, f"{ZERO}mics_shard_size")
        draft.set("parallel.dp_replicate", -1, f"{ZERO}mics_shard_size")


def _offload(draft: Draft) -> None:
    """Sets the keys of CPU offload; offloaded parameters take their moments along."""
    devices = {
        "parallel.cpu_offload": f"{ZERO}offload_param.device",
        "parallel.optimizer_offload": f"{ZERO}offload_optimizer.device",
    }
    for key, name in devices.items():
        device = draft.value(name)
        if device == "cpu" and not draft.get("parallel.cpu_offload"):
            draft.set(key, True, name)
        elif device not in ("none", None, "cpu"):
            draft.leave(name, device, "offload to NVMe is not built; parallel.cpu_offload is")


def _precision(draft: Draft) -> None:
    if AUTO in (draft.entries.get("bf16.enabled"), draft.entries.get("fp16.enabled")):
        return
    dtype = "float32"
    if draft.on("bf16.enabled"):
        dtype = "bfloat16"
    elif draft.on("fp16.enabled"):
        dtype = "float16"
    draft.set("training.compute_dtype", dtype, "bf16.enabled fp16.enabled")
    reduced = draft.value("communication_data_type") or {"bfloat16": "bf16", "float16": "fp16"}.get(
        dtype, "fp32"
    )
    if reduced in ("bf16", "bfloat16"):
        draft.set("training.reduce_dtype", "bfloat16", "communication_data_type bf16.enabled")
    elif reduced not in ("fp32", "float32"):
        name = "communication_data_type"
        draft.leave(name, reduced, "gradients are reduced in float32, not float16")
    if dtype == "float16":
        _loss_scale(draft)


def _loss_scale(draft: Draft) -> None:
    fixed = draft.number("fp16.loss_scale")
    power = draft.count("fp16.initial_scale_power")
    if fixed:
        draft.leave("fp16.loss_scale", fixed, "the scale is always dynamic; it begins with this")
        draft.set("training.loss_scale", fixed, "fp16.loss_scale")
    elif 0 < power <= 24:
        draft.set("training.loss_scale", 2.0**power, "fp16.initial_scale_power")
    else:
        draft.leave("fp16.initial_scale_power", power, "it begins with 65536, at most 2**24")
    window = draft.value("fp16.loss_scale_window")
    draft.set("training.loss_scale_growth", window, "fp16.loss_scale_window")
    if draft.value("fp16.hysteresis") != 1:
        hysteresis = draft.value("fp16.hysteresis")
        draft.leave("fp16.hysteresis", hysteresis, "every overflow halves the scale")


def _optimizer(draft: Draft) -> None:
    """Every Adam is AdamW there, unless `adam_w_mode` is false."""
    kind = draft.value("optimizer.type")
    if kind is None:
        draft.decide("optimizer: the script makes it; the file does not say which")
        return
    known = str(kind).lower()
    is_adamw = known == "adamw" or (known == "adam" and draft.on(f"{ADAM}adam_w_mode"))
    if not is_adamw:
        names = f"optimizer.type {ADAM}adam_w_mode"
        draft.refuse(names, kind, "expected AdamW, or Adam without adam_w_mode = false")
        return
    draft.set("optimizer.name", "adamw", "optimizer.type")
    # torch's AdamW decays by default, DeepSpeed's kernels do not
    decay = 0.01 if draft.on(f"{ADAM}torch_adam") else 0.0
    values = {
        "lr": draft.value(f"{ADAM}lr"),
        "betas": draft.value(f"{ADAM}betas"),
        "eps": draft.value(f"{ADAM}eps"),
        "weight_decay": draft.value(f"{ADAM}weight_decay"),
    }
    if f"{ADAM}weight_decay" not in draft.entries:
        values["weight_decay"] = decay
    for entry, value in values.items():
        if draft.entries.get(ADAM + entry) != AUTO:
            draft.set(f"optimizer.{entry}", value, ADAM + entry)
    if values["weight_decay"]:
        draft.decide("optimizer.decayed: the script says which parameters decay there; here all do")


def _schedule(draft: Draft) -> None:
    kind = str(draft.value("scheduler.type"))
    if kind == "None":
        draft.decide("schedule: the script makes it; the file does not say which")
        return
    if kind not in SCHEDULES:
        draft.refuse("scheduler.type", kind, f"expected one of {', '.join(SCHEDULES)}")
        return
    draft.set("schedule.name", SCHEDULES[kind], "scheduler.type")
    if draft.entries.get(f"{RATE}warmup_num_steps") != AUTO:
        steps = draft.value(f"{RATE}warmup_num_steps")
        draft.set("schedule.warmup_steps", steps, f"{RATE}warmup_num_steps")
    if draft.entries.get(f"{RATE}total_num_steps", AUTO) != AUTO:
        steps = draft.value(f"{RATE}total_num_steps")
        draft.set("training.steps", steps, f"{RATE}total_num_steps")
    if kind == "WarmupCosineLR":
        ratio = draft.value(f"{RATE}cos_min_ratio")
        draft.set("schedule.min_ratio", ratio, f"{RATE}cos_min_ratio")
    else:
        _peak(draft, kind)
    shape = draft.value(f"{RATE}warmup_type")
    if shape != "linear" and draft.get("schedule.warmup_steps") > 0:
        draft.leave(f"{RATE}warmup_type", shape, "the warm-up is linear")
    start = "warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr"
    if draft.on(RATE + start):
        reason = "the warm-up begins with the rate of its first step"
        draft.leave(RATE + start, draft.value(RATE + start), reason)


def _peak(draft: Draft, kind: str) -> None:
    """The scheduler's own peak, which for WarmupLR is the optimizer's by default."""
    name = f"{RATE}warmup_max_lr"
    peak = draft.value(name)
    if peak is None and kind == "WarmupDecayLR" and draft.entries.get(name) != AUTO:
        peak = 0.001
    if peak is not None:
        draft.set("optimizer.lr", peak, name)
    lowest = draft.number(f"{RATE}warmup_min_lr")
    peak = draft.get("optimizer.lr")
    if kind == "WarmupDecayLR":
        set_floor(draft, lowest, peak, f"{RATE}warmup_min_lr {RATE}warmup_max_lr")


def _batch(draft: Draft) -> None:
    names = "train_micro_batch_size_per_gpu gradient_accumulation_steps train_batch_size"
    if AUTO in [draft.entries.get(name) for name in names.split()]:
        return
    local = draft.count("train_micro_batch_size_per_gpu")
    steps = draft.count("gradient_accumulation_steps")
    total = draft.count("train_batch_size")
    if not local and not total:
        draft.refuse(names, "none", "DeepSpeed needs train_batch_size or the micro batch")
        return
    set_batch(draft, local, steps or (0 if total else 1), total, names)


def _activations(draft: Draft) -> None:
    name = "activation_checkpointing.cpu_checkpointing"
    if draft.on(name):
        draft.set("recompute.mode", "full", name)
        draft.set("recompute.offload", True, name)


ROWS = (
    *by(
        _layout,
        "parallel.tp parallel.cp parallel.cp_method",
        "Ulysses is `cp`",
        "tensor_parallel.autotp_size=0 tensor_parallel.tp.tp_size=1 sequence_parallel_size=1",
    ),
    *by(
        _stage,
        "parallel.reshard_after_forward parallel.dp_replicate parallel.dp_shard",
        '0: `dp_replicate = -1`, `dp_shard = 1`; 1 and 2: `"never"`; 3: `"always"`',
        "stage=0 zero_hpz_partition_size=1 mics_shard_size=-1",
        under="zero_optimization.",
    ),
    *by(
        _offload,
        "parallel.cpu_offload parallel.optimizer_offload",
        "`cpu`; parameters include the moments",
        "zero_optimization.offload_param.device=none "
        "zero_optimization.offload_optimizer.device=none",
    ),
    *by(
        _precision,
        "training.compute_dtype training.reduce_dtype training.loss_scale "
        "training.loss_scale_growth",
        "master weights are float32; gradients are reduced in the compute dtype by default",
        "bf16.enabled=false fp16.enabled=false communication_data_type fp16.loss_scale=0 "
        "fp16.initial_scale_power=16 fp16.loss_scale_window=1000 fp16.hysteresis=2",
    ),
    Row("gradient_clipping", "training.max_norm", 1.0, "0 before version 0.19.5"),
    *by(
        _optimizer,
        "optimizer.name optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay",
        "AdamW; with `torch_adam` the decay is 0.01 by default",
        "optimizer.type optimizer.params.lr=0.001 optimizer.params.betas=[0.9,0.999] "
        "optimizer.params.eps=1e-08 optimizer.params.weight_decay=0.0 "
        "optimizer.params.adam_w_mode=true optimizer.params.torch_adam=false",
    ),
    *by(
        _schedule,
        "schedule.name schedule.warmup_steps schedule.min_ratio training.steps optimizer.lr",
        "`WarmupDecayLR` is `linear`, `WarmupCosineLR` `cosine`, `WarmupLR` `constant`",
        "scheduler.type scheduler.params.warmup_min_lr=0.0 scheduler.params.warmup_max_lr "
        "scheduler.params.warmup_num_steps=1000 scheduler.params.warmup_type=log "
        "scheduler.params.total_num_steps scheduler.params.cos_min_ratio=0.0001 "
        "scheduler.params.warmup_min_ratio=0.0",
    ),
    *by(
        _batch,
        "training.local_batch_size training.global_batch_size",
        "the number of accumulation steps follows from the two",
        "train_micro_batch_size_per_gpu gradient_accumulation_steps train_batch_size",
    ),
    *by(
        _activations,
        "recompute.mode recompute.offload",
        "`full`, with the blocks' inputs in CPU memory",
        "activation_checkpointing.cpu_checkpointing=false",
    ),
    Row("steps_per_print", "metrics.log_freq", None),
    *must(
        "gradients are means over the tokens of a step, of all parameters",
        "prescale_gradients=false gradient_predivide_factor=1.0 sparse_gradients=false "
        "amp.enabled=false torch_autocast.enabled=false "
        "bf16.bf16_master_weights_and_grads=false bf16.bf16_optimizer_states=false "
        "fp16.fp16_master_weights_and_grads=false",
    ),
    *must(
        "it is not built",
        "elasticity.enabled=false data_efficiency.enabled=false "
        "curriculum_learning.enabled=false progressive_layer_drop.enabled=false "
        "eigenvalue.enabled=false optimizer.params.amsgrad=false "
        "optimizer.params.bias_correction=true optimizer.legacy_fusion=false",
    ),
    *leave(
        "FSDP2 communicates one unit (a block) at a time, and overlaps it",
        "overlap_comm=null|true|false contiguous_gradients=true|false reduce_scatter=true|false "
        "reduce_bucket_size=500000000 allgather_partitions=true|false "
        "allgather_bucket_size=500000000 use_multi_rank_bucket_allreduce=true|false "
        "sub_group_size=1000000000 stage3_prefetch_bucket_size=50000000|auto "
        "stage3_param_persistence_threshold=100000|auto "
        "stage3_model_persistence_threshold=9223372036854775807 "
        "stage3_max_live_parameters=1000000000 stage3_max_reuse_distance=1000000000 "
        "stage3_module_granularity_threshold=0 stage3_use_all_reduce_for_fetch_params=false|true "
        "stage3_allgather_sequential=false|true round_robin_gradients=false|true "
        "mics_hierarchical_params_gather=false|true memory_efficient_linear=true|false "
        "override_module_apply=true|false log_trace_cache_warnings=false|true "
        "enable_sanity_checks=false|true save_muon_momentum_buffer_in_memory=false|true",
        under=ZERO,
    ),
    *leave(
        "the optimizer and its gathers are torch's",
        "zero_allow_untested_optimizer=false|true zero_force_ds_cpu_optimizer=true|false "
        "disable_allgather=false|true",
    ),
    *leave(
        "copies use pinned memory and are not divided into buffers",
        "pin_memory=true|false nvme_path buffer_count=5 buffer_size=100000000 "
        "max_in_cpu=1000000000",
        under=f"{ZERO}offload_param.",
    ),
    *leave(
        "copies use pinned memory and are not divided into buffers",
        "pin_memory=true|false nvme_path buffer_count=4 pipeline_read=false|true "
        "pipeline_write=false|true fast_init=false|true ratio=1.0 super_offload=false "
        "cpuadam_cores_perc=0.8",
        under=f"{ZERO}offload_optimizer.",
    ),
    *leave(
        "communication is not quantised",
        "zero_quantized_weights=false zero_quantized_nontrainable_weights=false "
        "zero_quantized_gradients=false zeropp_loco_param",
        under="zero_optimization.",
    ),
    *leave(
        "`checkpoint.export` writes the model when a run ends; checkpoints are whole and sharded",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save=false "
        "zero_optimization.pipeline_loading_checkpoint=false|true "
        "zero_optimization.load_from_fp32_weights=true|false "
        "zero_optimization.elastic_checkpoint=false|true "
        "zero_optimization.ignore_unused_parameters=true|false "
        "zero_optimization.legacy_stage1=false checkpoint.tag_validation=Warn "
        "checkpoint.load_universal=false|true checkpoint.use_node_local_storage=false "
        "checkpoint.parallel_write.pipeline_stage=false",
    ),
    *leave(
        "every overflow halves the scale, without a lower bound; gradients are float32",
        "fp16.min_loss_scale=1|0 fp16.consecutive_hysteresis=false fp16.auto_cast=false "
        "bf16.immediate_grad_update=false|true bf16.check_grad_overflow=true|false "
        "data_types.grad_accum_dtype=null|fp32 seq_parallel_communication_data_type=fp32",
    ),
    *leave(
        "`recompute.mode` says what is recomputed; with tp the inputs of blocks are divided",
        "partition_activations=false|true number_checkpoints "
        "contiguous_memory_optimization=false|true synchronize_checkpoint_boundary=false|true "
        "profile=false",
        under="activation_checkpointing.",
    ),
    *leave(
        "`metrics.jsonl` is always written; see `metrics.sinks`, `metrics.project`, `[profiling]`",
        "wall_clock_breakdown=false|true memory_breakdown=false|true dump_state=false|true "
        'log_level tensorboard.enabled=false tensorboard.output_path="" '
        "tensorboard.job_name=DeepSpeedJobName wandb.enabled=false wandb.project=deepspeed "
        'wandb.group wandb.team csv_monitor.enabled=false csv_monitor.output_path="" '
        "csv_monitor.job_name=DeepSpeedJobName comet.enabled=false flops_profiler.enabled=false "
        "flops_profiler.recompute_fwd_factor=0.0 flops_profiler.profile_step=1 "
        "flops_profiler.module_depth=-1 flops_profiler.top_modules=1 "
        "flops_profiler.detailed=true|false flops_profiler.output_file "
        "comms_logger.enabled=false comms_logger.verbose=false comms_logger.prof_all=true|false "
        "comms_logger.debug=false comms_logger.prof_ops=[]",
    ),
    *leave(
        "the last batch of an epoch goes on into the next one",
        "dataloader_drop_last=false|true",
    ),
    *leave("`[compile]`", "compile.deepcompile=false graph_harvesting=false"),
)
REMARKS = ("lr: the rate of step n there is about that of step n - 1 here",)
DEEPSPEED = Format("deepspeed", "DeepSpeed", "0.19.5", ROWS, REMARKS)
