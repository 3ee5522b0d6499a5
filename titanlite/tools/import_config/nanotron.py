"""nanotron's YAML (src/nanotron/config/config.py)."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.tools.import_config.common import (
    batch_sizes,
    data_parallel,
    decide_flavor,
    min_ratio,
    whole,
)
from titanlite.tools.import_config.mapping import Draft, Format, Row, nothing

SCHEDULE = "optimizer.learning_rate_scheduler"
FACTORY = "optimizer.optimizer_factory"
SHAPE = "model.model_config"


def _processes(draft: Draft) -> None:
    """dp x tp x pp x cp is the number of processes."""
    axes = ("dp", "tp", "pp", "context_parallel_size")
    product = 1
    for axis in axes:
        product *= whole(draft.number(f"parallelism.{axis}")) or 1
    draft.processes = product


def _stage(draft: Draft) -> None:
    """Stage 0 has whole parameters and moments, stage 1 shards the moments."""
    if draft.value("optimizer.zero_stage") == 0:
        data_parallel(draft, "optimizer.zero_stage")
    else:
        draft.set("parallel.reshard_after_forward", "never", "optimizer.zero_stage")


def _tying(draft: Draft) -> None:
    name = f"{SHAPE}.tie_word_embeddings"
    draft.set("model.embeddings", "tied" if draft.on(name) else "untied", name)


def _width(draft: Draft) -> None:
    decide_flavor(draft)
    draft.set("model.dim", draft.value(f"{SHAPE}.hidden_size"), f"{SHAPE}.hidden_size")


def _betas(draft: Draft) -> None:
    betas = [draft.value(f"{FACTORY}.adam_beta1", 0.9), draft.value(f"{FACTORY}.adam_beta2", 0.95)]
    draft.set("optimizer.betas", betas, f"{FACTORY}.adam_beta1 {FACTORY}.adam_beta2")


def _decay(draft: Draft) -> None:
    style = draft.value(f"{SCHEDULE}.lr_decay_style")
    names = f"{SCHEDULE}.lr_decay_style {SCHEDULE}.lr_decay_starting_step {SCHEDULE}.lr_decay_steps"
    start = draft.number(f"{SCHEDULE}.lr_decay_starting_step")
    warmup = draft.number(f"{SCHEDULE}.lr_warmup_steps")
    steps = draft.number(f"{SCHEDULE}.lr_decay_steps")
    if start > warmup:
        shape = "sqrt" if style == "1-sqrt" else style
        draft.set("schedule.name", "wsd", names)
        draft.set("schedule.decay", shape, names)
        draft.set(
            "schedule.decay_steps", steps or draft.number("tokens.train_steps") - start, names
        )
    else:
        draft.set("schedule.name", style, names)
        if steps and warmup + steps != draft.number("tokens.train_steps"):
            draft.lack(f"{SCHEDULE}.lr_decay_steps", steps, "the decay ends with the last step")


def _lowest(draft: Draft) -> None:
    min_ratio(draft, f"{SCHEDULE}.min_decay_lr", f"{SCHEDULE}.learning_rate")


def _batch(draft: Draft) -> None:
    size = "tokens.micro_batch_size"
    accumulation = "tokens.batch_accumulation_per_replica"
    batch_sizes(draft, size, accumulation, "")
    if draft.get("parallel.pp") > 1:
        # A pipeline's microbatches are parts of one local batch
        local = draft.number(size) * (draft.number(accumulation) or 1)
        draft.set("training.local_batch_size", local, f"{size} {accumulation}")
        draft.set("parallel.pp_microbatch_size", draft.value(size), size)


def _schedule_of_pipeline(draft: Draft) -> None:
    if draft.number("parallelism.pp") > 1:
        draft.set(
            "parallel.pp_schedule", draft.value("parallelism.pp_engine"), "parallelism.pp_engine"
        )


def _recompute(draft: Draft) -> None:
    if draft.on("parallelism.recompute_layer"):
        draft.set("recompute.mode", "full", "parallelism.recompute_layer")


def _interval(draft: Draft) -> None:
    if draft.number("tokens.val_check_interval") > 0:
        name = "tokens.val_check_interval"
        draft.set("validation.freq", draft.value(name), name)


def _name(draft: Draft) -> None:
    """The name, without nanotron's placeholders for the date and the job."""
    name = str(draft.entries["general.run"])
    if "%" in name:
        draft.decide(f"run.name: there it is {name!r}; %date and %jobid are not replaced here")
    else:
        draft.set("run.name", name, "general.run")


def _data(draft: Draft) -> None:
    draft.decide(
        "data.path: data_stages there; give files, folders or hf:NAME, as [[data.sources]] with "
        "[[data.phases]] if the mixture changes"
    )


def _tokenizer(draft: Draft) -> None:
    found = draft.value("tokenizer.tokenizer_name_or_path")
    draft.decide(f"data.tokenizer: there it is {found!r}; give its tokenizer.json")


ROWS = (
    Row("parallelism.dp", "", "`parallel.dp_shard`: what remains of the processes", _processes),
    Row("parallelism.tp", "parallel.tp"),
    Row("parallelism.pp", "parallel.pp"),
    Row("parallelism.context_parallel_size", "parallel.cp"),
    Row(
        "parallelism.pp_engine", "parallel.pp_schedule", "`afab` is `GPipe`", _schedule_of_pipeline
    ),
    Row(
        "parallelism.tp_mode parallelism.tp_linear_async_communication",
        "",
        "with tp the sequence is divided too; `parallel.async_tp` overlaps",
        nothing,
    ),
    Row("parallelism.recompute_layer", "recompute.mode", "`full`", _recompute),
    Row("parallelism.expert_parallel_size parallelism.*", "", "models are dense", nothing),
    Row(
        "optimizer.zero_stage",
        "parallel.reshard_after_forward parallel.dp_replicate parallel.dp_shard",
        '0: `dp_replicate = -1`, `dp_shard = 1`; 1: `"never"`',
        _stage,
    ),
    Row(f"{SHAPE}.hidden_size", "model.dim", "", _width),
    Row(f"{SHAPE}.num_hidden_layers", "model.num_layers"),
    Row(f"{SHAPE}.num_attention_heads", "model.num_heads"),
    Row(f"{SHAPE}.num_key_value_heads", "model.num_kv_heads"),
    Row(f"{SHAPE}.intermediate_size", "model.ffn_dim"),
    Row(f"{SHAPE}.vocab_size", "model.vocab_size"),
    Row(f"{SHAPE}.rms_norm_eps", "model.norm_eps"),
    Row(f"{SHAPE}.rope_theta", "model.rope_theta"),
    Row(f"{SHAPE}.tie_word_embeddings", "model.embeddings", "", _tying),
    Row(f"{SHAPE}.*", "", "the block is Llama's", nothing),
    Row("model.dtype", "training.compute_dtype"),
    Row(
        "model.ddp_bucket_cap_mb model.init_method.std model.make_vocab_size_divisible_by",
        "",
        "nothing to set",
        nothing,
    ),
    Row(
        "optimizer.accumulate_grad_in_fp32",
        "",
        "gradients are float32 by default (`training.param_dtype`)",
        nothing,
    ),
    Row(f"{FACTORY}.name", "optimizer.name"),
    Row(f"{FACTORY}.adam_beta1 {FACTORY}.adam_beta2", "optimizer.betas", "", _betas),
    Row(f"{FACTORY}.adam_eps", "optimizer.eps"),
    Row(
        f"{FACTORY}.torch_adam_is_fused",
        "",
        "`optimizer.implementation`: fused by default",
        nothing,
    ),
    Row("optimizer.weight_decay", "optimizer.weight_decay"),
    Row("optimizer.clip_grad", "training.max_norm"),
    Row(f"{SCHEDULE}.learning_rate", "optimizer.lr"),
    Row(f"{SCHEDULE}.lr_warmup_steps", "schedule.warmup_steps"),
    Row(
        f"{SCHEDULE}.lr_decay_style {SCHEDULE}.lr_decay_starting_step {SCHEDULE}.lr_decay_steps",
        "schedule.name schedule.decay schedule.decay_steps",
        "`wsd` if the decay starts after the warmup",
        _decay,
    ),
    Row(
        f"{SCHEDULE}.min_decay_lr",
        "schedule.min_ratio",
        "`min_decay_lr` / `learning_rate`",
        _lowest,
    ),
    Row(f"{SCHEDULE}.lr_warmup_style", "", "linear", nothing),
    Row("tokens.train_steps", "training.steps"),
    Row("tokens.sequence_length", "training.seq_len"),
    Row(
        "tokens.micro_batch_size tokens.batch_accumulation_per_replica",
        "training.local_batch_size training.global_batch_size parallel.pp_microbatch_size",
        "times dp",
        _batch,
    ),
    Row("tokens.val_check_interval", "validation.freq", "-1 there is never", _interval),
    Row("tokens.limit_val_batches tokens.limit_test_batches", "", "`validation.samples`"),
    Row("checkpoints.checkpoint_interval", "checkpoint.freq"),
    Row("checkpoints.checkpoints_path", "run.folder"),
    Row("checkpoints.resume_checkpoint_path", "", "a run resumes from its own folder"),
    Row("checkpoints.*", "", "nothing to set", nothing),
    Row("general.run", "run.name", "a folder's name: `%date` and `%jobid` are not replaced", _name),
    Row("general.project", "metrics.project"),
    Row("general.seed", "run.seed"),
    Row("general.*", "", "nothing to set", nothing),
    Row("logging.iteration_step_info_interval", "metrics.log_freq"),
    Row("logging.*", "", "the environment variable `LOG_RANK`", nothing),
    Row("data_stages", "data.path data.sources data.phases", "to decide", _data),
    Row("tokenizer.tokenizer_name_or_path tokenizer.*", "data.tokenizer", "to decide", _tokenizer),
    Row("lighteval", "", "`titanlite evaluate --tasks`"),
    Row("profiler.*", "", "`profiling.enabled`"),
)


def defaults(entries: Mapping[str, object]) -> dict[str, object]:
    """The file names what it needs."""
    return {}


NANOTRON = Format(
    "nanotron",
    "nanotron",
    ROWS,
    defaults,
)
