"""TrainingArguments of Hugging Face's Trainer, and of TRL's SFTTrainer, as JSON or YAML."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.config.foreign import PROJECTIONS
from titanlite.config.keys import schema_keys
from titanlite.tools.import_config.common import batch_sizes, sharding_strategy
from titanlite.tools.import_config.mapping import OFF, Draft, Format, Row, nothing

KWARGS = "lr_scheduler_kwargs"
TO_ZERO = ("linear", "cosine", "cosine_with_restarts", "warmup_stable_decay")


def _length(draft: Draft) -> None:
    """`max_steps`, where it is above 0, counts more than epochs."""
    if draft.number("max_steps") > 0:
        draft.set("training.steps", draft.value("max_steps"), "max_steps")
    else:
        draft.set("training.epochs", draft.value("num_train_epochs"), "num_train_epochs")


def _betas(draft: Draft) -> None:
    betas = [draft.value("adam_beta1", 0.9), draft.value("adam_beta2", 0.999)]
    draft.set("optimizer.betas", betas, "adam_beta1 adam_beta2")


def _optimizer(draft: Draft) -> None:
    name = str(draft.value("optim")).lower()
    if "adamw" in name and name.endswith("_8bit"):
        draft.set("optimizer.name", "adamw", "optim")
        draft.set("optimizer.state_dtype", "bfloat16", "optim")
        draft.lack("optim", name, "moments of 8 bits are not built: bfloat16 was taken")
    else:
        draft.set("optimizer.name", draft.value("optim"), "optim")


def _schedule(draft: Draft) -> None:
    name = draft.value("lr_scheduler_type")
    names = f"lr_scheduler_type {KWARGS}"
    draft.set("schedule.name", name, "lr_scheduler_type")
    if name == "constant":  # which has no warmup there
        draft.set("schedule.warmup_steps", 0, "lr_scheduler_type")
    if draft.has(f"{KWARGS}.min_lr_rate"):
        draft.set(
            "schedule.min_ratio", draft.value(f"{KWARGS}.min_lr_rate"), f"{KWARGS}.min_lr_rate"
        )
    elif draft.has(f"{KWARGS}.min_lr"):
        ratio = draft.number(f"{KWARGS}.min_lr") / (draft.number("learning_rate") or 1)
        draft.set("schedule.min_ratio", ratio, f"{KWARGS}.min_lr learning_rate")
    elif name in TO_ZERO:
        draft.set("schedule.min_ratio", 0.0, names)
    if draft.has(f"{KWARGS}.num_decay_steps"):
        decay = f"{KWARGS}.num_decay_steps"
        draft.set("schedule.decay_steps", draft.value(decay), decay)
    if name == "cosine_with_restarts":
        draft.lack("lr_scheduler_type", name, "cosine was taken: there are no restarts")


def _warmup(draft: Draft) -> None:
    """Steps, where they are above 0, count more than the ratio; below 1 they are one."""
    if draft.get("schedule.name") == "constant" and draft.value("lr_scheduler_type") == "constant":
        return
    steps = draft.number("warmup_steps")
    if 0 < steps < 1:
        draft.set("schedule.warmup_ratio", steps, "warmup_steps")
    elif steps == 0 and draft.number("warmup_ratio") > 0:
        draft.set("schedule.warmup_ratio", draft.value("warmup_ratio"), "warmup_ratio")
    else:
        draft.set("schedule.warmup_steps", steps, "warmup_steps")


def _precision(draft: Draft) -> None:
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.on(name):
            draft.set("training.compute_dtype", dtype, name)


def _recompute(draft: Draft) -> None:
    if draft.on("gradient_checkpointing"):
        draft.set("recompute.mode", "full", "gradient_checkpointing")


def _validation(draft: Draft) -> None:
    name = "eval_strategy" if draft.has("eval_strategy") else "evaluation_strategy"
    strategy = draft.value(name)
    if strategy == "epoch":
        draft.set("validation.freq_epochs", 1, name)
    elif strategy == "steps":
        steps = draft.value("eval_steps") or draft.value("logging_steps")
        draft.set("validation.freq", steps, f"{name} eval_steps")


def _saves(draft: Draft) -> None:
    strategy = draft.value("save_strategy")
    if strategy == "epoch":
        draft.set("checkpoint.freq_epochs", 1, "save_strategy")
    elif strategy in ("no", False):
        draft.set("checkpoint.freq", 0, "save_strategy")
    elif strategy == "best":
        draft.set("checkpoint.keep_best", 1, "save_strategy")
    else:
        draft.set("checkpoint.freq", draft.value("save_steps"), "save_strategy save_steps")


def _best(draft: Draft) -> None:
    if draft.on("load_best_model_at_end"):
        draft.set("checkpoint.keep_best", 1, "load_best_model_at_end")


def _sinks(draft: Draft) -> None:
    asked = draft.value("report_to")
    names = asked if isinstance(asked, list) else [asked]
    if "all" in names:
        draft.lack("report_to", "all", "name them in metrics.sinks: tensorboard, wandb, mlflow")
        return
    allowed = schema_keys()["metrics.sinks"].choices
    names = [name for name in names if name not in OFF]
    kept = [name for name in names if name in allowed]
    for name in names:
        if name not in allowed:
            draft.lack(
                "report_to", name, f"metrics.sinks has {', '.join(str(sink) for sink in allowed)}"
            )
    if kept:
        draft.set("metrics.sinks", kept, "report_to")


def _compile(draft: Draft) -> None:
    if draft.on("torch_compile"):
        draft.set("compile.enabled", "true", "torch_compile")


def _fsdp(draft: Draft) -> None:
    """The strategy, `auto_wrap` and `offload`, with spaces between them, or a list of them."""
    asked = draft.value("fsdp")
    words = asked if isinstance(asked, list) else str(asked).split()
    if "offload" in words:
        draft.set("parallel.cpu_offload", True, "fsdp")
    strategies = [str(word) for word in words if word not in ("offload", "auto_wrap", "True")]
    if strategies:
        sharding_strategy(draft, "fsdp", strategies[0])


def _fsdp_options(draft: Draft) -> None:
    for prefix in ("fsdp_config.", "fsdp_config.fsdp_"):
        if draft.on(f"{prefix}activation_checkpointing"):
            draft.set("recompute.mode", "full", f"{prefix}activation_checkpointing")
        if draft.has(f"{prefix}reshard_after_forward"):
            name = f"{prefix}reshard_after_forward"
            draft.set("parallel.reshard_after_forward", str(draft.value(name)), name)


def _deepspeed(draft: Draft) -> None:
    draft.decide("deepspeed: import its JSON too, and put the two together")


def _batch(draft: Draft) -> None:
    batch_sizes(draft, "per_device_train_batch_size", "gradient_accumulation_steps", "")


def _packing(draft: Draft) -> None:
    if draft.on("packing"):
        draft.set("data.packing", "best_fit", "packing")
        draft.set("data.document_mask", True, "packing")


def _targets(draft: Draft) -> None:
    name = "lora_target_modules"
    asked = draft.value(name)
    modules = asked if isinstance(asked, list) else str(asked).replace(",", " ").split()
    modules = [str(module) for module in modules]
    if modules == ["all-linear"]:
        modules = list(PROJECTIONS)
    ours = [PROJECTIONS[module] for module in modules if module in PROJECTIONS]
    for module in modules:
        if module not in PROJECTIONS:
            draft.lack(name, module, f"expected some of {', '.join(PROJECTIONS)}")
    if ours:
        draft.set("lora.targets", ", ".join(ours), name)


def _device(draft: Draft) -> None:
    if draft.on("use_cpu") or draft.on("no_cuda"):
        draft.set("run.device", "cpu", "use_cpu no_cuda")


def _model(draft: Draft) -> None:
    found = draft.value("model_name_or_path")
    draft.set("model.flavor", "from_checkpoint", "model_name_or_path")
    draft.set("checkpoint.initial_load", found, "model_name_or_path")
    draft.decide(f"checkpoint.initial_load: the folder to which {found!r} was downloaded")


def _data(draft: Draft) -> None:
    found = draft.value("dataset_name") or draft.value("train_file")
    draft.decide(f"data.path: the data there is {found!r}; give a file, a folder or hf:NAME")


ROWS = (
    Row("output_dir", "run.folder"),
    Row("run_name", "run.name"),
    Row(
        "model_name_or_path",
        "model.flavor checkpoint.initial_load",
        "`from_checkpoint`",
        _model,
    ),
    Row("dataset_name train_file", "data.path", "to decide", _data),
    Row(
        "max_steps num_train_epochs",
        "training.steps training.epochs",
        "`max_steps` above 0 counts more",
        _length,
    ),
    Row("max_length max_seq_length", "training.seq_len"),
    Row("packing", "data.packing data.document_mask", "`best_fit`", _packing),
    Row(
        "per_device_train_batch_size gradient_accumulation_steps",
        "training.local_batch_size training.global_batch_size",
        "times accumulation and processes",
        _batch,
    ),
    Row("learning_rate", "optimizer.lr", "the default there is 5e-5"),
    Row(
        "optim",
        "optimizer.name optimizer.state_dtype",
        "every AdamW is `adamw`, with bfloat16 moments if there they have 8 bits",
        _optimizer,
    ),
    Row("adam_beta1 adam_beta2", "optimizer.betas", "the default there is 0.9 and 0.999", _betas),
    Row("adam_epsilon", "optimizer.eps"),
    Row("weight_decay", "optimizer.weight_decay", "the default there is 0"),
    Row("max_grad_norm", "training.max_norm"),
    Row(
        f"lr_scheduler_type {KWARGS}.min_lr {KWARGS}.min_lr_rate {KWARGS}.num_decay_steps",
        "schedule.name schedule.min_ratio schedule.decay_steps",
        "linear and cosine end at 0 there",
        _schedule,
    ),
    Row(
        "warmup_steps warmup_ratio",
        "schedule.warmup_steps schedule.warmup_ratio",
        "steps above 0 count more",
        _warmup,
    ),
    Row(f"{KWARGS}.*", "", "`[schedule]`"),
    Row("lora_r", "lora.rank"),
    Row("lora_alpha", "lora.alpha"),
    Row("lora_dropout", "lora.dropout"),
    Row("lora_target_modules", "lora.targets", "`q_proj` is `wq`", _targets),
    Row("beta", "", "of DPO: `dpo.beta`, on data of `prepare --chat --pairs`"),
    Row("use_peft", "", "adapters are on if `lora.rank` is above 0", nothing),
    Row("bf16 fp16", "training.compute_dtype", "", _precision),
    Row("gradient_checkpointing", "recompute.mode", "`full`", _recompute),
    Row("gradient_checkpointing_kwargs.*", "", "nothing to set", nothing),
    Row("torch_compile", "compile.enabled", "", _compile),
    Row("torch_compile_backend", "compile.backend"),
    Row(
        "fsdp",
        "parallel.reshard_after_forward parallel.cpu_offload",
        '`full_shard`: `"always"`; `shard_grad_op`: `"never"`; `offload`',
        _fsdp,
    ),
    Row(
        "fsdp_config.activation_checkpointing fsdp_config.fsdp_activation_checkpointing "
        "fsdp_config.reshard_after_forward fsdp_config.fsdp_reshard_after_forward",
        "recompute.mode parallel.reshard_after_forward",
        "",
        _fsdp_options,
    ),
    Row("fsdp_config.*", "", "a unit is a block; checkpoints are sharded", nothing),
    Row("deepspeed", "", "import its JSON too", _deepspeed),
    Row("seed", "run.seed"),
    Row("data_seed", "", "`run.seed`"),
    Row("full_determinism", "debug.deterministic"),
    Row(
        "eval_strategy evaluation_strategy eval_steps",
        "validation.freq validation.freq_epochs",
        "`epoch`: `freq_epochs = 1`",
        _validation,
    ),
    Row(
        "save_strategy save_steps",
        "checkpoint.freq checkpoint.freq_epochs",
        "`epoch`: `freq_epochs = 1`",
        _saves,
    ),
    Row("save_total_limit", "checkpoint.keep"),
    Row("load_best_model_at_end", "checkpoint.keep_best", "kept, not loaded", _best),
    Row("resume_from_checkpoint", "", "a run resumes from its own folder"),
    Row("logging_steps", "metrics.log_freq"),
    Row("report_to", "metrics.sinks", "", _sinks),
    Row("ddp_timeout", "comm.timeout_seconds"),
    Row("use_cpu no_cuda", "run.device", "`cpu`", _device),
    Row("per_device_eval_batch_size", "", "validation uses `training.local_batch_size`"),
    Row(
        "label_smoothing_factor neftune_noise_alpha group_by_length auto_find_batch_size",
        "",
        "not built",
    ),
    Row("metric_for_best_model greater_is_better", "", "the validation loss decides"),
    Row(
        "dataloader_num_workers dataloader_pin_memory dataloader_drop_last remove_unused_columns "
        "push_to_hub hub_model_id logging_dir logging_strategy overwrite_output_dir do_train "
        "do_eval do_predict logging_first_step disable_tqdm save_safetensors tf32 "
        "ddp_find_unused_parameters local_rank log_level prediction_loss_only "
        "eval_accumulation_steps save_only_model warmup_min_lr",
        "",
        "nothing to set",
        nothing,
    ),
)


def defaults(entries: Mapping[str, object]) -> dict[str, object]:
    """Of TrainingArguments, where they are not ours."""
    silent: dict[str, object] = {
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "per_device_train_batch_size": 8,
        "save_strategy": "steps",
        "save_steps": 500,
    }
    if "max_steps" not in entries:
        silent["num_train_epochs"] = 3.0
    return silent


TRAINER = Format(
    "trainer",
    "TrainingArguments",
    ROWS,
    defaults,
)
