"""DeepSpeed's JSON (deepspeed.ai/docs/config-json)."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.tools.import_config.common import batch_sizes, offload, zero_stage
from titanlite.tools.import_config.mapping import Draft, Format, Row, nothing

ZERO = "zero_optimization"
BUCKETS = "nothing to set: FSDP2 communicates one unit (a block) at a time, and overlaps it"


def _precision(draft: Draft) -> None:
    if draft.on("bf16.enabled"):
        draft.set("training.compute_dtype", "bfloat16", "bf16.enabled")
    elif draft.on("fp16.enabled"):
        draft.set("training.compute_dtype", "float16", "fp16.enabled")
    elif draft.has("fp16.enabled") or draft.has("bf16.enabled"):
        draft.set("training.compute_dtype", "float32", "fp16.enabled bf16.enabled")


def _loss_scale(draft: Draft) -> None:
    if not draft.on("fp16.enabled"):
        return
    fixed = draft.number("fp16.loss_scale")
    power = draft.number("fp16.initial_scale_power")
    if fixed:
        draft.lack("fp16.loss_scale", fixed, "the scale is always dynamic; it begins with this one")
        draft.set("training.loss_scale", fixed, "fp16.loss_scale")
    elif 0 < power <= 24:
        draft.set("training.loss_scale", 2.0 ** int(power), "fp16.initial_scale_power")
    if draft.on("fp16.loss_scale_window"):
        window = "fp16.loss_scale_window"
        draft.set("training.loss_scale_growth", draft.value(window), window)


def _stage(draft: Draft) -> None:
    zero_stage(draft, f"{ZERO}.stage")


def _offload_optimizer(draft: Draft) -> None:
    offload(draft, f"{ZERO}.offload_optimizer.device", "parallel.optimizer_offload")


def _offload_param(draft: Draft) -> None:
    offload(draft, f"{ZERO}.offload_param.device", "parallel.cpu_offload")
    if draft.get("parallel.cpu_offload"):  # which includes the moments
        draft.settings.pop("parallel.optimizer_offload", None)


def _secondary_partition(draft: Draft) -> None:
    name = f"{ZERO}.zero_hpz_partition_size"
    if draft.number(name) > 1:
        draft.set("parallel.reshard_after_forward", str(draft.value(name)), name)


def _optimizer(draft: Draft) -> None:
    draft.set("optimizer.name", draft.value("optimizer.type"), "optimizer.type")
    if draft.get("optimizer.name") == "muon":
        draft.decide("optimizer.type: compare the settings of Muon (docs/optimizers.md)")


def _scheduler(draft: Draft) -> None:
    draft.set("schedule.name", draft.value("scheduler.type"), "scheduler.type")
    params = "scheduler.params"
    if draft.has(f"{params}.cos_min_ratio"):
        ratio = draft.value(f"{params}.cos_min_ratio")
        draft.set("schedule.min_ratio", ratio, f"{params}.cos_min_ratio")
    elif draft.get("schedule.name") != "constant":
        draft.set("schedule.min_ratio", 0.0, "scheduler.type")
    if draft.on(f"{params}.warmup_min_lr"):
        lowest = draft.value(f"{params}.warmup_min_lr")
        draft.lack(
            f"{params}.warmup_min_lr", lowest, "the warmup begins with its first step's rate"
        )


def _peak(draft: Draft) -> None:
    name = "scheduler.params.warmup_max_lr"
    draft.set("optimizer.lr", draft.value(name), name)


def _batch(draft: Draft) -> None:
    batch_sizes(
        draft, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
    )


def _sinks(draft: Draft) -> None:
    names = [name for name in ("tensorboard", "wandb") if draft.on(f"{name}.enabled")]
    if names:
        draft.set("metrics.sinks", names, " ".join(f"{name}.enabled" for name in names))


def _activations(draft: Draft) -> None:
    name = "activation_checkpointing.cpu_checkpointing"
    if draft.on(name):
        draft.set("recompute.mode", "full", name)
        draft.set("recompute.offload", True, name)


ROWS = (
    Row("tensor_parallel.autotp_size", "parallel.tp"),
    Row(
        f"{ZERO}.stage",
        "parallel.reshard_after_forward parallel.dp_replicate parallel.dp_shard",
        '0: `dp_replicate = -1`, `dp_shard = 1`; 1 and 2: `"never"`; 3: `"always"`',
        _stage,
    ),
    Row(
        f"{ZERO}.offload_optimizer.device",
        "parallel.optimizer_offload",
        "`cpu`; the update itself runs on the GPU",
        _offload_optimizer,
    ),
    Row(
        f"{ZERO}.offload_param.device",
        "parallel.cpu_offload",
        "`cpu`; then the moments are in CPU memory too",
        _offload_param,
    ),
    Row(
        f"{ZERO}.zero_hpz_partition_size",
        "parallel.reshard_after_forward",
        "a number: the second all-gather stays among so many processes",
        _secondary_partition,
    ),
    Row(
        f"{ZERO}.stage3_prefetch_bucket_size {ZERO}.stage3_max_live_parameters",
        "",
        "`parallel.prefetch` counts units, not bytes",
    ),
    Row(
        f"{ZERO}.overlap_comm {ZERO}.contiguous_gradients {ZERO}.reduce_scatter "
        f"{ZERO}.reduce_bucket_size {ZERO}.allgather_bucket_size {ZERO}.allgather_partitions "
        f"{ZERO}.sub_group_size {ZERO}.stage3_max_reuse_distance "
        f"{ZERO}.stage3_param_persistence_threshold {ZERO}.round_robin_gradients",
        "",
        BUCKETS,
        nothing,
    ),
    Row(
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        "",
        '`checkpoint.export = "hf"` writes the model when the run ends',
    ),
    Row(
        f"{ZERO}.offload_optimizer.* {ZERO}.offload_param.*",
        "",
        "nothing to set: copies use pinned memory and are not divided into buffers",
        nothing,
    ),
    Row(
        f"{ZERO}.zero_quantized_weights {ZERO}.zero_quantized_gradients",
        "",
        "communication is not quantised; `parallel.reshard_after_forward` as a number saves more",
    ),
    Row(
        "bf16.enabled fp16.enabled",
        "training.compute_dtype",
        "parameters stay float32, which are the master weights",
        _precision,
    ),
    Row(
        "fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window",
        "training.loss_scale training.loss_scale_growth",
        "2 to the power of `initial_scale_power`",
        _loss_scale,
    ),
    Row(
        "fp16.hysteresis fp16.min_loss_scale fp16.consecutive_hysteresis fp16.auto_cast "
        "bf16.immediate_grad_update",
        "",
        "every overflow halves the scale, without a lower bound",
        nothing,
    ),
    Row("amp.enabled", "", "`training.compute_dtype` is the one way to mixed precision"),
    Row("communication_data_type", "training.reduce_dtype", "float32 by default"),
    Row(
        "data_types.grad_accum_dtype",
        "",
        "gradients are accumulated in `training.param_dtype`, float32 by default",
        nothing,
    ),
    Row("gradient_clipping", "training.max_norm", "the default there is 0, no clipping"),
    Row("optimizer.type", "optimizer.name", "every Adam is `adamw`", _optimizer),
    Row("optimizer.params.lr", "optimizer.lr"),
    Row("optimizer.params.betas", "optimizer.betas", "the default there is 0.9 and 0.999"),
    Row("optimizer.params.eps", "optimizer.eps"),
    Row("optimizer.params.weight_decay", "optimizer.weight_decay", "the default there is 0"),
    Row(
        "optimizer.params.adam_w_mode optimizer.params.torch_adam "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "",
        "nothing to set: weight decay is decoupled, and the implementation is chosen by the device",
        nothing,
    ),
    Row(
        "scheduler.type scheduler.params.cos_min_ratio scheduler.params.warmup_min_lr",
        "schedule.name schedule.min_ratio",
        "`WarmupDecayLR` is `linear`, `WarmupCosineLR` is `cosine`, `WarmupLR` is `constant`",
        _scheduler,
    ),
    Row("scheduler.params.warmup_max_lr", "optimizer.lr", "the peak rate", _peak),
    Row("scheduler.params.warmup_num_steps", "schedule.warmup_steps"),
    Row("scheduler.params.total_num_steps", "training.steps"),
    Row(
        "scheduler.params.warmup_type",
        "",
        "the warmup is linear; the default there, `log`, is not",
    ),
    Row(
        "train_micro_batch_size_per_gpu gradient_accumulation_steps train_batch_size",
        "training.local_batch_size training.global_batch_size",
        "the number of accumulation steps follows from the two",
        _batch,
    ),
    Row(
        "activation_checkpointing.cpu_checkpointing",
        "recompute.mode recompute.offload",
        "`full`, with the blocks' inputs in CPU memory",
        _activations,
    ),
    Row(
        "activation_checkpointing.*",
        "",
        "`recompute.mode` says what is recomputed; with tp the inputs of blocks are divided",
        nothing,
    ),
    Row("steps_per_print", "metrics.log_freq"),
    Row("tensorboard.enabled wandb.enabled", "metrics.sinks", "", _sinks),
    Row("wandb.project", "metrics.project"),
    Row("wandb.* tensorboard.* csv_monitor.*", "", "`metrics.jsonl` is always written"),
    Row(
        "wall_clock_breakdown flops_profiler.enabled comms_logger.enabled",
        "",
        "`metrics.step_times` and `profiling.enabled`",
    ),
    Row("flops_profiler.* comms_logger.*", "", "`profiling.enabled`"),
    Row(
        "prescale_gradients gradient_predivide_factor sparse_gradients dump_state",
        "",
        "nothing to set: the loss is divided by the number of targets of the whole step",
        nothing,
    ),
)


def defaults(entries: Mapping[str, object]) -> dict[str, object]:
    """Of Adam, which DeepSpeed passes on to PyTorch, and of clipping."""
    if "optimizer.type" not in entries:
        return {}
    return {
        "optimizer.params.betas": [0.9, 0.999],
        "optimizer.params.weight_decay": 0.0,
        "gradient_clipping": 0.0,
    }


DEEPSPEED = Format(
    "deepspeed",
    "DeepSpeed",
    ROWS,
    defaults,
)
