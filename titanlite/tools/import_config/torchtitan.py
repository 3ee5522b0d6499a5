"""torchtitan's TOML, as it was until 0.2 (torchtitan/config/job_config.py)."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.tools.import_config.common import batch_sizes
from titanlite.tools.import_config.mapping import Draft, Format, Row, nothing

FLAVORS = {
    ("llama3", "8b"): "llama3_8b",
    ("llama3", "70b"): "llama3_70b",
    ("llama3", "405b"): "llama3_405b",
    ("llama3", "debugmodel"): "debug",
    ("qwen3", "0.6b"): "qwen3_0.6b",
    ("qwen3", "1.7b"): "qwen3_1.7b",
    ("qwen3", "8b"): "qwen3_8b",
}
COMMUNICATION = {"allgather": "all_gather", "alltoall": "ring"}


def _flavor(draft: Draft) -> None:
    name = str(draft.value("model.name", "llama3")).lower()
    flavor = str(draft.value("model.flavor")).lower()
    ours = FLAVORS.get((name, flavor))
    if ours is None:
        draft.lack("model.flavor", f"{name} {flavor}", "set model.flavor, or the keys of [model]")
        draft.decide("model: this flavor is not among ours (docs/models.md)")
    else:
        draft.set("model.flavor", ours, "model.name model.flavor")


def _converters(draft: Draft) -> None:
    for converter in words(draft.value("model.converters")):
        if "float8" in converter:
            draft.set("float8.enabled", True, "model.converters")
        else:
            draft.lack("model.converters", converter, "only float8 can be chosen here")


def words(value: object) -> list[str]:
    """The words of a list, or of a text with commas."""
    if isinstance(value, (list, tuple)):
        return [str(word) for word in value]
    return str(value).replace(",", " ").split()


def _float8_skip(draft: Draft) -> None:
    """The output layer, which is usually named there, is never converted here."""
    for name in ("float8.filter_fqns", "quantize.linear.float8.filter_fqns"):
        skipped = [word for word in words(draft.value(name, [])) if word != "output"]
        if skipped:
            draft.set("float8.skip", ", ".join(skipped), name)


def _betas(draft: Draft) -> None:
    betas = [draft.value("optimizer.beta1", 0.9), draft.value("optimizer.beta2", 0.95)]
    draft.set("optimizer.betas", betas, "optimizer.beta1 optimizer.beta2")


def _decay(draft: Draft) -> None:
    shape = draft.value("lr_scheduler.decay_type")
    ratio = draft.value("lr_scheduler.decay_ratio")
    if ratio is None and shape in ("linear", "cosine"):
        draft.set("schedule.name", shape, "lr_scheduler.decay_type")
    else:
        # Without a ratio the decay begins after the warmup
        names = "lr_scheduler.decay_ratio lr_scheduler.decay_type"
        draft.set("schedule.name", "wsd", names)
        draft.set("schedule.decay", shape, names)
        draft.set("schedule.decay_fraction", 1.0 if ratio is None else ratio, names)


def _lowest(draft: Draft) -> None:
    for name in ("lr_scheduler.lr_min", "lr_scheduler.min_lr_factor"):
        if draft.has(name):
            draft.set("schedule.min_ratio", draft.value(name), name)


def _batch(draft: Draft) -> None:
    batch_sizes(draft, "training.local_batch_size", "", "training.global_batch_size")


def _seed(draft: Draft) -> None:
    for name in ("training.seed", "debug.seed"):
        if draft.has(name):
            draft.set("run.seed", draft.value(name), name)


def _checkpointing(draft: Draft) -> None:
    """`selective` recomputes whole blocks, every n-th of them, or all but expensive operators."""
    mode = draft.value("activation_checkpoint.mode")
    option = draft.value("activation_checkpoint.selective_ac_option")
    names = "activation_checkpoint.mode activation_checkpoint.selective_ac_option"
    if mode == "selective" and option != "op":
        draft.set("recompute.mode", "full", names)
        draft.set("recompute.every", option, names)
    else:
        draft.set("recompute.mode", mode, names)


def _compile(draft: Draft) -> None:
    for name in ("training.compile", "compile.enable"):
        if draft.has(name):
            draft.set("compile.enabled", "true" if draft.on(name) else "false", name)
    names = "compile.components"
    if draft.has("compile.enable"):
        with_loss = draft.on("compile.enable") and "loss" in words(draft.value(names, []))
        draft.set("compile.loss", "true" if with_loss else "false", names)


def _rotation(draft: Draft) -> None:
    name = "parallelism.context_parallel_rotate_method"
    if draft.number("parallelism.context_parallel_degree") > 1:
        draft.set("parallel.cp_method", COMMUNICATION.get(str(draft.value(name))), name)


def _split(draft: Draft) -> None:
    name = "parallelism.pipeline_parallel_split_points"
    if draft.on(name):
        draft.set("parallel.pp_split", ", ".join(words(draft.value(name))), name)


def _interval(draft: Draft) -> None:
    on = draft.on("checkpoint.enable") or draft.on("checkpoint.enable_checkpoint")
    names = "checkpoint.interval checkpoint.enable checkpoint.enable_checkpoint"
    draft.set("checkpoint.freq", draft.value("checkpoint.interval") if on else 0, names)


def _keep(draft: Draft) -> None:
    draft.set(
        "checkpoint.keep", draft.value("checkpoint.keep_latest_k"), "checkpoint.keep_latest_k"
    )


def _load_step(draft: Draft) -> None:
    if draft.number("checkpoint.load_step") > 0:
        name = "checkpoint.load_step"
        draft.set("checkpoint.load_step", draft.value(name), name)


def _validation(draft: Draft) -> None:
    if not draft.on("validation.enable") and not draft.on("validation.enabled"):
        return
    draft.set("validation.freq", draft.value("validation.freq"), "validation.freq")
    steps = draft.number("validation.steps")
    if steps > 0:
        samples = steps * max(1, draft.number("validation.local_batch_size"))
        draft.set("validation.samples", samples, "validation.steps validation.local_batch_size")
        draft.decide("validation.samples: of one process there; multiply it by their number")


def _sinks(draft: Draft) -> None:
    pairs = (("metrics.enable_tensorboard", "tensorboard"), ("metrics.enable_wandb", "wandb"))
    names = [name for name, _ in pairs if draft.on(name)]
    if names:
        sinks = [sink for name, sink in pairs if name in names]
        draft.set("metrics.sinks", sinks, " ".join(names))


def _data(draft: Draft) -> None:
    found = draft.value("training.dataset_path") or draft.value("training.dataset")
    draft.decide(f"data.path: the data there is {found!r}; give a file, a folder or hf:NAME")


def _tokenizer(draft: Draft) -> None:
    found = draft.value("model.hf_assets_path") or draft.value("model.tokenizer_path")
    draft.decide(f"data.tokenizer: there it is in {found!r}")


P = "parallelism."
ROWS = (
    Row("job.dump_folder", "run.folder"),
    Row("job.description", "run.name", "a folder's name, by default the config's", nothing),
    Row("model.name model.flavor", "model.flavor", "`llama3` `8B` is `llama3_8b`", _flavor),
    Row("model.converters", "float8.enabled", "", _converters),
    Row("model.hf_assets_path model.tokenizer_path", "data.tokenizer", "to decide", _tokenizer),
    Row("optimizer.name", "optimizer.name"),
    Row("optimizer.lr", "optimizer.lr"),
    Row("optimizer.beta1 optimizer.beta2", "optimizer.betas", "", _betas),
    Row("optimizer.eps", "optimizer.eps"),
    Row("optimizer.weight_decay", "optimizer.weight_decay"),
    Row("optimizer.implementation", "optimizer.implementation"),
    Row("optimizer.early_step_in_backward", "", "gradients are clipped first"),
    Row("lr_scheduler.warmup_steps", "schedule.warmup_steps"),
    Row(
        "lr_scheduler.decay_type lr_scheduler.decay_ratio",
        "schedule.name schedule.decay schedule.decay_fraction",
        "with a ratio `wsd`",
        _decay,
    ),
    Row("lr_scheduler.min_lr_factor lr_scheduler.lr_min", "schedule.min_ratio", "", _lowest),
    Row("training.steps", "training.steps"),
    Row("training.seq_len", "training.seq_len"),
    Row("training.max_norm", "training.max_norm"),
    Row("training.dataset training.dataset_path", "data.path", "to decide", _data),
    Row("training.dtype", "training.param_dtype"),
    Row("training.mixed_precision_param", "training.compute_dtype"),
    Row("training.mixed_precision_reduce", "training.reduce_dtype"),
    Row("training.enable_cpu_offload", "parallel.cpu_offload"),
    Row("training.gc_freq", "training.gc_freq"),
    Row("training.seed debug.seed", "run.seed", "", _seed),
    Row("training.deterministic debug.deterministic", "debug.deterministic"),
    Row(f"{P}data_parallel_replicate_degree", "parallel.dp_replicate"),
    Row(f"{P}data_parallel_shard_degree", "parallel.dp_shard"),
    Row(f"{P}fsdp_reshard_after_forward", "parallel.reshard_after_forward"),
    Row(f"{P}tensor_parallel_degree", "parallel.tp"),
    Row(f"{P}enable_async_tensor_parallel", "parallel.async_tp"),
    Row(f"{P}context_parallel_degree", "parallel.cp"),
    Row(
        f"{P}context_parallel_rotate_method",
        "parallel.cp_method",
        "`alltoall` passes keys and values around a ring: `ring`",
        _rotation,
    ),
    Row(f"{P}pipeline_parallel_degree", "parallel.pp"),
    Row(f"{P}pipeline_parallel_schedule", "parallel.pp_schedule"),
    Row(f"{P}pipeline_parallel_microbatch_size", "parallel.pp_microbatch_size"),
    Row(f"{P}pipeline_parallel_split_points", "parallel.pp_split", "", _split),
    Row(
        f"{P}pipeline_parallel_layers_per_stage {P}module_fqns_per_model_part",
        "",
        "stages are balanced by size; `parallel.pp_split` names the first module of each",
    ),
    Row(f"{P}disable_loss_parallel", "", "with tp the loss is always parallel"),
    Row(
        "training.local_batch_size training.global_batch_size",
        "training.local_batch_size training.global_batch_size",
        "-1 there is one local batch on each data-parallel process",
        _batch,
    ),
    Row(
        "activation_checkpoint.mode activation_checkpoint.selective_ac_option",
        "recompute.mode recompute.every",
        "`selective` with a number n: `full` with `every` = n; with `op`: `selective`",
        _checkpointing,
    ),
    Row("activation_checkpoint.memory_budget", "recompute.budget"),
    Row(
        "compile.enable training.compile compile.components",
        "compile.enabled compile.loss",
        "",
        _compile,
    ),
    Row("compile.backend", "compile.backend"),
    Row("quantize.linear.float8.recipe_name float8.recipe_name", "float8.scaling"),
    Row(
        "quantize.linear.float8.filter_fqns float8.filter_fqns",
        "float8.skip",
        "`output` is never converted",
        _float8_skip,
    ),
    Row("quantize.linear.float8.emulate float8.emulate", "float8.emulate"),
    Row("quantize.linear.float8.* float8.*", "", "weights are gathered in the compute dtype"),
    Row(
        "checkpoint.interval checkpoint.enable checkpoint.enable_checkpoint",
        "checkpoint.freq",
        "0 if it is not enabled: a checkpoint at the end is always written",
        _interval,
    ),
    Row("checkpoint.keep_latest_k", "checkpoint.keep", "", _keep),
    Row("checkpoint.async_mode", "checkpoint.async_mode"),
    Row("checkpoint.initial_load_path", "checkpoint.initial_load"),
    Row("checkpoint.load_step", "checkpoint.load_step", "", _load_step),
    Row(
        "checkpoint.last_save_model_only checkpoint.last_save_in_hf checkpoint.export_dtype",
        "",
        '`checkpoint.export = "hf"` also writes the model; the last checkpoint is always whole',
    ),
    Row(
        "checkpoint.folder checkpoint.initial_load_model_only",
        "",
        "checkpoints are in the run's folder; `checkpoint.initial_load` reads weights alone",
    ),
    Row(
        "validation.enable validation.enabled validation.freq validation.steps "
        "validation.local_batch_size",
        "validation.freq validation.samples",
        "",
        _validation,
    ),
    Row(
        "validation.dataset validation.dataset_path validation.seq_len",
        "",
        "a held-out part of the training text, or `validation` of a source",
    ),
    Row("metrics.log_freq", "metrics.log_freq"),
    Row("metrics.enable_tensorboard metrics.enable_wandb", "metrics.sinks", "", _sinks),
    Row("metrics.disable_color_printing", "", "the environment variable `NO_COLOR`"),
    Row(
        "metrics.save_tb_folder metrics.save_for_all_ranks",
        "",
        "rank 0 writes into the run's folder",
    ),
    Row("profiling.enable_profiling", "profiling.enabled"),
    Row("profiling.profile_freq", "profiling.freq"),
    Row("profiling.enable_memory_snapshot", "profiling.memory"),
    Row(
        "profiling.save_traces_folder profiling.save_memory_snapshot_folder",
        "",
        "traces are in the run's folder",
    ),
    Row("comm.init_timeout_seconds", "comm.timeout_seconds"),
    Row("comm.train_timeout_seconds", "comm.step_timeout_seconds"),
    Row(
        "comm.trace_buf_size comm.save_traces_folder",
        "",
        "the run names the rank that blocks the others by itself",
    ),
    Row(f"{P}expert_parallel_degree {P}expert_tensor_parallel_degree", "", "models are dense"),
    Row(
        "job.print_args job.print_config model.print_after_conversion",
        "",
        "the run's `config.toml` has every key",
    ),
)


def defaults(entries: Mapping[str, object]) -> dict[str, object]:
    """Of job_config.py, where they are not ours."""
    silent: dict[str, object] = {
        "optimizer.lr": 8e-4,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
        "training.steps": 10_000,
        "training.seq_len": 2048,
        "training.local_batch_size": 8,
        "checkpoint.interval": 500,
        "checkpoint.keep_latest_k": 10,
    }
    if "lr_scheduler.min_lr_factor" not in entries:
        silent["lr_scheduler.lr_min"] = 0.0
    if any(name.startswith("activation_checkpoint.") for name in entries):
        silent["activation_checkpoint.mode"] = "selective"
        silent["activation_checkpoint.selective_ac_option"] = "2"
    return silent


TORCHTITAN = Format(
    "torchtitan",
    "torchtitan 0.2",
    ROWS,
    defaults,
)
