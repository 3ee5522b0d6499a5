"""Converts TrainingArguments of Hugging Face's Trainer, JSON or YAML, and run_clm.py's own fields.

Read in transformers 5.23.0: training_args.py, optimization.py and trainer.py. Subclasses have other
defaults (TRL's SFTConfig a learning rate of 2e-5), so a field that is not among these is refused.
"""

from __future__ import annotations

from titanlite.config.keys import schema_keys
from titanlite.tools.import_config.common import (
    replicate,
    set_batch,
    set_floor,
    spare_norms_and_biases,
)
from titanlite.tools.import_config.draft import Draft
from titanlite.tools.import_config.table import Format, Row, by, leave, must

RATE = "lr_scheduler_kwargs."
DEGREE = "parallelism_config."
ADAMW = ("adamw_torch_fused", "adamw_torch", "adamw_apex_fused", "adamw_hf")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}


def _length(draft: Draft) -> None:
    """`max_steps`, where it is above 0, counts more than epochs."""
    if draft.number("max_steps") > 0:
        draft.set("training.steps", draft.value("max_steps"), "max_steps")
    else:
        draft.set("training.epochs", draft.value("num_train_epochs"), "num_train_epochs")


def _degrees(draft: Draft) -> None:
    """Absent degrees are 1; without FSDP and DeepSpeed the rest are replicas, as with DDP."""
    keys = {
        "tp_size": "parallel.tp",
        "cp_size": "parallel.cp",
        "dp_replicate_size": "parallel.dp_replicate",
        "dp_shard_size": "parallel.dp_shard",
    }
    degrees = {name: draft.value(DEGREE + name) for name in keys}
    if any(degree is not None for degree in degrees.values()):
        for name, degree in degrees.items():
            draft.set(keys[name], 1 if degree is None else degree, DEGREE + name)
    elif not draft.on("fsdp") and draft.value("deepspeed") is None:
        replicate(draft, "fsdp deepspeed")


def _fsdp(draft: Draft) -> None:
    """True, or words of earlier versions, which count if the table does not say it."""
    asked = draft.value("fsdp")
    if not draft.on("fsdp"):
        return
    items = asked if isinstance(asked, list) else str(asked).split()
    reshard: object = True
    for item in [str(item) for item in items]:
        if item in ("full_shard", "shard_grad_op"):
            reshard = item == "full_shard"
        elif item == "offload":
            draft.set("parallel.cpu_offload", True, "fsdp")
        elif item.lower() not in ("true", "auto_wrap"):
            draft.refuse("fsdp", item, "expected true, full_shard, shard_grad_op, offload")
    table: dict[str, str] = {}
    for name in FSDP:
        if name in draft.entries:
            table[name.removeprefix("fsdp_config.").removeprefix("fsdp_")] = name
    if "reshard_after_forward" in table:
        reshard = draft.value(table["reshard_after_forward"])
    names = " ".join(["fsdp", *table.values()])
    if str(reshard).lower() in ("true", "full_shard"):
        draft.set("parallel.reshard_after_forward", "always", names)
    elif str(reshard).lower() in ("false", "shard_grad_op"):
        draft.set("parallel.reshard_after_forward", "never", names)
    else:
        draft.refuse(names, reshard, "expected true or false")
    if "cpu_offload" in table:
        offload = draft.value(table["cpu_offload"])
        draft.set("parallel.cpu_offload", offload, table["cpu_offload"])
    if "activation_checkpointing" in table and draft.on(table["activation_checkpointing"]):
        draft.set("recompute.mode", "full", table["activation_checkpointing"])


def _deepspeed(draft: Draft) -> None:
    found = draft.value("deepspeed")
    if found is not None:
        draft.decide(f"parallel: deepspeed = {found}: import it too, and put the two together")


def _batch(draft: Draft) -> None:
    names = "per_device_train_batch_size gradient_accumulation_steps"
    local = draft.count("per_device_train_batch_size")
    steps = draft.count("gradient_accumulation_steps")
    set_batch(draft, local, steps, 0, names)


def _optimizer(draft: Draft) -> None:
    name = draft.value("optim")
    if name not in ADAMW:
        draft.refuse("optim", name, f"expected one of {', '.join(ADAMW)}")
    betas = [draft.value("adam_beta1"), draft.value("adam_beta2")]
    draft.set("optimizer.betas", betas, "adam_beta1 adam_beta2")
    draft.set("optimizer.weight_decay", draft.value("weight_decay"), "weight_decay")
    spare_norms_and_biases(draft, "weight_decay")
    if draft.number("weight_decay"):
        draft.decide(
            'optimizer.groups: add { pattern = "*.bias", weight_decay = 0 } if the model has biases'
        )


def _schedule(draft: Draft) -> None:
    name = str(draft.value("lr_scheduler_type"))
    if name not in SCHEDULES:
        draft.refuse("lr_scheduler_type", name, f"expected one of {', '.join(SCHEDULES)}")
        return
    draft.set("schedule.name", SCHEDULES[name], "lr_scheduler_type")
    _warmup(draft)
    steps = draft.get("schedule.warmup_steps") if "schedule.warmup_steps" in draft.settings else 1
    if name == "constant":  # which has no warm-up there
        draft.settings.pop("schedule.warmup_ratio", None)
        draft.set("schedule.warmup_steps", 0, "lr_scheduler_type")
    if name == "inverse_sqrt" and (not steps or draft.value(f"{RATE}timescale") is not None):
        names = f"lr_scheduler_type {RATE}timescale"
        draft.refuse(names, name, "expected a warm-up, and its length as the time scale")
    _floor(draft, name)


def _floor(draft: Draft, name: str) -> None:
    rate = draft.value(f"{RATE}min_lr_rate")
    lowest = draft.value(f"{RATE}min_lr")
    draft.set("schedule.min_ratio", 0.0, "lr_scheduler_type")
    if name == "cosine_with_min_lr" and rate is not None:
        draft.set("schedule.min_ratio", rate, f"{RATE}min_lr_rate")
    elif name == "cosine_with_min_lr" and lowest is not None:
        names = f"{RATE}min_lr learning_rate"
        set_floor(draft, draft.number(f"{RATE}min_lr"), draft.number("learning_rate"), names)
    elif name == "cosine_with_min_lr":
        draft.refuse("lr_scheduler_type", name, "expected min_lr or min_lr_rate")
    elif lowest is not None or rate is not None:
        draft.leave(f"{RATE}min_lr {RATE}min_lr_rate", lowest or rate, f"{name} has none there")
    steps = draft.value(f"{RATE}num_decay_steps")
    if name == "warmup_stable_decay":
        draft.set("schedule.decay", draft.value(f"{RATE}decay_type"), f"{RATE}decay_type")
        draft.set("schedule.decay_steps", steps, f"{RATE}num_decay_steps")
        ratio = draft.value(f"{RATE}min_lr_ratio")
        draft.set("schedule.min_ratio", ratio, f"{RATE}min_lr_ratio")
    elif steps is not None:
        draft.leave(f"{RATE}num_decay_steps", steps, f"{name} has none there")


def _warmup(draft: Draft) -> None:
    """Below 1, `warmup_steps` is a ratio; version 4 had a field for it, which steps override."""
    steps = draft.number("warmup_steps")
    ratio = draft.number("warmup_ratio")
    if 0 < steps < 1:
        draft.set("schedule.warmup_ratio", steps, "warmup_steps")
    elif not steps and ratio:
        draft.set("schedule.warmup_ratio", ratio, "warmup_ratio")
    else:
        draft.set("schedule.warmup_steps", draft.value("warmup_steps"), "warmup_steps")


def _clip(draft: Draft) -> None:
    draft.set("training.max_norm", draft.value("max_grad_norm") or 0.0, "max_grad_norm")


def _precision(draft: Draft) -> None:
    dtype = "float32"
    for name, chosen in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.on(name):
            dtype = chosen
    draft.set("training.compute_dtype", dtype, "bf16 fp16")


def _recompute(draft: Draft) -> None:
    names = "gradient_checkpointing activation_checkpointing"
    if draft.on("gradient_checkpointing") or draft.on("activation_checkpointing"):
        draft.set("recompute.mode", "full", names)


def _validation(draft: Draft) -> None:
    strategy = draft.value("eval_strategy")
    if "evaluation_strategy" in draft.entries:
        strategy = draft.value("evaluation_strategy")
    names = "eval_strategy evaluation_strategy eval_steps"
    if strategy == "epoch":
        draft.set("validation.freq_epochs", 1, names)
    elif strategy == "steps":
        steps = draft.value("eval_steps") or draft.value("logging_steps")
        draft.set("validation.freq", steps, names)
    elif strategy not in ("no", False):
        draft.refuse(names, strategy, "expected no, steps or epoch")


def _saves(draft: Draft) -> None:
    strategy = draft.value("save_strategy")
    names = "save_strategy save_steps"
    if strategy == "epoch":
        draft.set("checkpoint.freq_epochs", 1, names)
    elif strategy in ("no", False):
        draft.set("checkpoint.freq", 0, names)
    elif strategy == "steps":
        draft.set("checkpoint.freq", draft.value("save_steps"), names)
    elif strategy == "best":
        draft.set("checkpoint.keep_best", 1, names)
    else:
        draft.refuse(names, strategy, "expected no, steps, epoch or best")
    draft.set("checkpoint.keep", draft.value("save_total_limit") or 0, "save_total_limit")
    if draft.on("load_best_model_at_end"):
        draft.set("checkpoint.keep_best", 1, "load_best_model_at_end")


def _sinks(draft: Draft) -> None:
    asked = draft.value("report_to")
    names = [str(name) for name in (asked if isinstance(asked, list) else [asked])]
    allowed = [str(name) for name in schema_keys()["metrics.sinks"].choices]
    kept = [name for name in names if name in allowed]
    if kept:
        draft.set("metrics.sinks", kept, "report_to")
    others = [name for name in names if name not in allowed and name not in ("none", "None")]
    if others:
        draft.leave("report_to", ", ".join(others), f"expected some of {', '.join(allowed)}")


def _model(draft: Draft) -> None:
    """The script's own fields: the model whose weights are trained on."""
    found = draft.value("model_name_or_path")
    if found is None:
        return
    draft.set("model.flavor", "from_checkpoint", "model_name_or_path")
    draft.set("checkpoint.initial_load", found, "model_name_or_path")
    draft.decide(f"checkpoint.initial_load: the folder to which {found!r} was downloaded")


def _data(draft: Draft) -> None:
    found = draft.value("dataset_name") or draft.value("train_file")
    if found is not None:
        draft.decide(f"data.path: the data there is {found!r}; give a file, a folder or hf:NAME")


FSDP = {
    f"fsdp_config.{prefix}{name}": default
    for prefix in ("", "fsdp_")
    for name, default in {
        "reshard_after_forward": True,
        "cpu_offload": False,
        "activation_checkpointing": False,
    }.items()
}
ROWS = (
    *by(
        _length,
        "training.steps training.epochs",
        "`max_steps` above 0 counts more",
        "max_steps=-1 num_train_epochs=3.0",
    ),
    *by(
        _degrees,
        "parallel.tp parallel.cp parallel.dp_replicate parallel.dp_shard",
        "without any, and without FSDP and DeepSpeed: replicas",
        "tp_size cp_size dp_replicate_size dp_shard_size",
        under="parallelism_config.",
    ),
    *must(
        "this degree is not built",
        "parallelism_config parallelism_config.sp_size=null|1 "
        "parallelism_config.sp_backend=null|deepspeed parallelism_config.cp_backend=null|torch "
        "parallelism_config.tp_handler parallelism_config.cp_handler "
        "parallelism_config.sp_handler",
    ),
    *by(
        _fsdp,
        "parallel.reshard_after_forward parallel.cpu_offload recompute.mode",
        '`"always"`; `"never"` without resharding',
        "fsdp fsdp_config.reshard_after_forward=true fsdp_config.cpu_offload=false "
        "fsdp_config.activation_checkpointing=false fsdp_config.fsdp_reshard_after_forward=true "
        "fsdp_config.fsdp_cpu_offload=false fsdp_config.fsdp_activation_checkpointing=false",
    ),
    *by(_deepspeed, "", "import its JSON too", "deepspeed"),
    *by(
        _batch,
        "training.local_batch_size training.global_batch_size",
        "times accumulation and processes",
        "per_device_train_batch_size=8 gradient_accumulation_steps=1",
    ),
    Row("learning_rate", "optimizer.lr", 5e-5),
    *by(
        _optimizer,
        "optimizer.name optimizer.betas optimizer.weight_decay optimizer.groups",
        "AdamW; norms and biases do not decay",
        "optim=adamw_torch_fused adam_beta1=0.9 adam_beta2=0.999 weight_decay=0.0",
    ),
    Row("adam_epsilon", "optimizer.eps", 1e-8),
    *by(_clip, "training.max_norm", "", "max_grad_norm=1.0"),
    *by(
        _schedule,
        "schedule.name schedule.warmup_steps schedule.warmup_ratio schedule.min_ratio "
        "schedule.decay schedule.decay_steps",
        "linear and cosine end at 0; a `warmup_steps` below 1 is a ratio",
        "lr_scheduler_type=linear warmup_steps=0 warmup_ratio=0.0 lr_scheduler_kwargs.min_lr "
        "lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.timescale "
        "lr_scheduler_kwargs.num_decay_steps lr_scheduler_kwargs.decay_type=cosine "
        "lr_scheduler_kwargs.min_lr_ratio=0.0",
    ),
    *must(
        "the schedule's other settings are not built",
        "lr_scheduler_kwargs=null|{} lr_scheduler_kwargs.num_cycles=0.5 "
        "lr_scheduler_kwargs.warmup_type=linear lr_scheduler_kwargs.num_stable_steps",
    ),
    *by(
        _precision,
        "training.compute_dtype",
        "float32 without either",
        "bf16=false fp16=false",
    ),
    *by(
        _recompute,
        "recompute.mode",
        "`full`",
        "gradient_checkpointing activation_checkpointing",
    ),
    Row("torch_compile", "compile.enabled", False),
    Row("seed", "run.seed", 42),
    Row("full_determinism", "debug.deterministic", False),
    *by(
        _validation,
        "validation.freq validation.freq_epochs",
        "`epoch`: `freq_epochs = 1`",
        "eval_strategy=no evaluation_strategy=no eval_steps",
    ),
    *by(
        _saves,
        "checkpoint.freq checkpoint.freq_epochs checkpoint.keep checkpoint.keep_best",
        "`epoch`: `freq_epochs = 1`; the best is kept, not loaded",
        "save_strategy=steps save_steps=500 save_total_limit load_best_model_at_end=false",
    ),
    Row("output_dir", "run.folder", None),
    Row("logging_steps", "metrics.log_freq", 500),
    *by(_sinks, "metrics.sinks", "", "report_to=none"),
    Row("ddp_timeout", "comm.timeout_seconds", 1800),
    Row("use_cpu", "run.device", False, values={False: "auto", True: "cpu"}),
    *by(
        _model,
        "model.flavor checkpoint.initial_load",
        "`from_checkpoint`",
        "model_name_or_path",
    ),
    *by(_data, "data.path", "to decide", "dataset_name train_file"),
    Row("block_size", "training.seq_len", None),
    *leave(
        "it is not built",
        "label_smoothing_factor=0.0 neftune_noise_alpha auto_find_batch_size=false "
        "train_sampling_strategy=random length_column_name=length optim_args "
        "optim_target_modules include_num_input_tokens_seen=no data_seed ignore_data_skip=false "
        "torch_empty_cache_steps tf32 gradient_checkpointing_kwargs "
        "activation_checkpointing_kwargs accelerator_config",
    ),
    *leave("`[compile]`", "torch_compile_backend torch_compile_mode"),
    *leave(
        "the loss is a mean over the tokens of a step",
        "average_tokens_across_devices=true",
    ),
    *leave(
        "kernels are torch's",
        "use_liger_kernel=false|true liger_kernel_config use_cache=false|true",
    ),
    *leave(
        "a unit of FSDP is a block; checkpoints are sharded",
        "fsdp_config=null|{} fsdp_config.version=2|1 fsdp_config.min_num_params=0 "
        "fsdp_config.transformer_layer_cls_to_wrap "
        "fsdp_config.auto_wrap_policy=TRANSFORMER_BASED_WRAP "
        "fsdp_config.state_dict_type=FULL_STATE_DICT|SHARDED_STATE_DICT "
        "fsdp_config.cpu_ram_efficient_loading=false|true fsdp_config.xla=false "
        "fsdp_config.fsdp_version=2|1 fsdp_config.fsdp_min_num_params=0 "
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap "
        "fsdp_config.fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP "
        "fsdp_config.fsdp_state_dict_type=FULL_STATE_DICT|SHARDED_STATE_DICT "
        "fsdp_config.fsdp_cpu_ram_efficient_loading=false|true fsdp_config.fsdp_xla=false",
    ),
    *leave(
        "`[validation]` has samples of the training text, and the loss decides which is best",
        "eval_delay=0 per_device_eval_batch_size=8 prediction_loss_only=false|true "
        "eval_on_start=false|true eval_do_concat_batches=true|false "
        "eval_use_gather_object=false|true eval_accumulation_steps include_for_metrics=[] "
        "batch_eval_metrics=false bf16_full_eval=false fp16_full_eval=false "
        "metric_for_best_model=null|loss|eval_loss greater_is_better=null|false label_names "
        "validation_file do_train=false|true do_eval=false|true do_predict=false",
    ),
    *leave(
        "a run resumes from its own folder, where it saves its whole state",
        "resume_from_checkpoint save_only_model=false save_on_each_node=false "
        "restore_callback_states_from_checkpoint=false enable_jit_checkpoint=false",
    ),
    *leave(
        "`metrics.jsonl` has every logged step",
        "logging_strategy=steps|no|epoch logging_first_step=false|true "
        "log_on_each_node=true|false logging_nan_inf_filter=true|false log_level=passive "
        "log_level_replica=warning disable_tqdm=null|false|true project=huggingface "
        "trackio_space_id trackio_bucket_id trackio_static_space_id "
        'skip_memory_metrics=true|false debug="" run_name',
    ),
    *leave(
        "nothing is uploaded",
        "push_to_hub=false hub_token hub_private_repo hub_model_id hub_strategy=every_save "
        "hub_always_push=false hub_revision",
    ),
    *leave(
        "batches need no worker processes",
        "dataloader_drop_last=false|true dataloader_num_workers=0 "
        "dataloader_pin_memory=true|false dataloader_persistent_workers=false|true "
        "dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order=true|false remove_unused_columns=true|false",
    ),
    *leave(
        "FSDP2 communicates here",
        "ddp_find_unused_parameters=null|false|true ddp_bucket_cap_mb "
        "ddp_broadcast_buffers=null|false|true ddp_static_graph=null|false|true "
        "ddp_backend=null|nccl|gloo local_rank=-1",
    ),
    *leave(
        "fields of version 4",
        "overwrite_output_dir=false|true save_safetensors=true|false logging_dir "
        "group_by_length=false no_cuda=false",
    ),
)
REMARKS = ("lr: the rate of step n there is that of step n - 1 here, so a warm-up begins with 0",)
TRAINER = Format("trainer", "TrainingArguments", "of transformers 5.23", ROWS, REMARKS)
