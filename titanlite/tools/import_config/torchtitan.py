"""Converts torchtitan's TOML of version 0.2; version 0.3 has some of its rows.

Read in torchtitan/config/job_config.py and torchtitan/models/{llama3,qwen3}/__init__.py, v0.2.2.
Older keys are refused: those of 2024 put degrees into [training] and [experimental].
"""

from __future__ import annotations

from titanlite.tools.import_config.common import set_batch
from titanlite.tools.import_config.draft import Draft
from titanlite.tools.import_config.table import Format, Row, by, leave, must

P = "parallelism."
DEBUG_MODEL = {
    "model.dim": 256,
    "model.num_layers": 6,
    "model.num_heads": 16,
    "model.num_kv_heads": 16,
    "model.ffn_dim": 768,
    "model.vocab_size": 2048,
    "model.embeddings": "untied",
    "model.rope_theta": 500000.0,
}
# Every llama3 scales RoPE there as Llama 3.1 does, by 8
SCALED = {
    "model.rope_scaling": "llama3",
    "model.rope_factor": 8.0,
    "model.rope_original_context": 8192,
}
FLAVORS: dict[tuple[str, str], dict[str, object]] = {
    ("llama3", "debugmodel"): {**DEBUG_MODEL, **SCALED},
    ("llama3", "8B"): {"model.flavor": "llama3_8b", **SCALED},
    ("llama3", "70B"): {"model.flavor": "llama3_70b", **SCALED},
    ("llama3", "405B"): {"model.flavor": "llama3_405b", **SCALED},
    ("qwen3", "0.6B"): {"model.flavor": "qwen3_0.6b"},
    ("qwen3", "1.7B"): {"model.flavor": "qwen3_1.7b"},
    ("qwen3", "8B"): {"model.flavor": "qwen3_8b"},
}
MASKED = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")  # flavors with a document mask


def _flavor(draft: Draft) -> None:
    name = str(draft.value("model.name"))
    flavor = str(draft.value("model.flavor"))
    names = "model.name model.flavor"
    for ending in MASKED:
        if flavor.endswith(ending):
            flavor = flavor.removesuffix(ending)
            draft.set("data.document_mask", True, names)
    if (name, flavor) not in FLAVORS:
        allowed = ", ".join(" ".join(known) for known in FLAVORS)
        draft.refuse(names, f"{name} {flavor}", f"expected one of {allowed}")
        return
    for key, value in FLAVORS[name, flavor].items():
        draft.set(key, value, names)


def _float8(draft: Draft) -> None:
    """The converters of the model: float8 of the blocks' linear layers, or none."""
    converters = draft.value("model.converters")
    if converters == ["quantize.linear.float8"]:
        draft.set("float8.enabled", True, "model.converters")
        reason = "float8.skip has parts of names; the output layer is never converted"
        names = "quantize.linear.float8.filter_fqns"
        draft.leave(names, draft.value(names), reason)
    elif converters:
        draft.refuse("model.converters", converters, "expected quantize.linear.float8 or none")


def words(value: object) -> list[str]:
    """The words of a list, or of a text with commas."""
    if isinstance(value, (list, tuple)):
        return [str(word) for word in value]
    return str(value).replace(",", " ").split()


def _betas(draft: Draft) -> None:
    betas = [draft.value("optimizer.beta1"), draft.value("optimizer.beta2")]
    draft.set("optimizer.betas", betas, "optimizer.beta1 optimizer.beta2")


def _schedule(draft: Draft) -> None:
    """With a ratio the decay is at the end; without one it begins after the warm-up."""
    shape = draft.value("lr_scheduler.decay_type")
    ratio = draft.value("lr_scheduler.decay_ratio")
    names = "lr_scheduler.decay_type lr_scheduler.decay_ratio"
    if ratio is None and shape in ("linear", "cosine"):
        draft.set("schedule.name", shape, "lr_scheduler.decay_type")
    else:
        draft.set("schedule.name", "wsd", names)
        draft.set("schedule.decay", shape, names)
        draft.set("schedule.decay_fraction", 1.0 if ratio is None else ratio, names)
    total = draft.value("lr_scheduler.total_steps")
    if total not in (None, draft.value("training.steps")):
        draft.leave("lr_scheduler.total_steps", total, "the decay ends with the last step")


def _batch(draft: Draft) -> None:
    local = draft.count("training.local_batch_size")
    total = draft.count("training.global_batch_size")  # -1: a local batch on each rank
    names = "training.local_batch_size training.global_batch_size"
    set_batch(draft, local, 0 if total else 1, total, names)


def _checkpointing(draft: Draft) -> None:
    """`selective` recomputes every n-th block as a whole, or all but expensive operators."""
    mode = draft.value("activation_checkpoint.mode")
    option = draft.value("activation_checkpoint.selective_ac_option")
    names = "activation_checkpoint.mode activation_checkpoint.selective_ac_option"
    if mode == "selective" and option != "op":
        draft.set("recompute.mode", "full", names)
        draft.set("recompute.every", option, names)
    else:
        draft.set("recompute.mode", mode, names)


def set_compile(draft: Draft) -> None:
    """Compiles the blocks and the loss if they are among the components."""
    parts = words(draft.value("compile.components")) if draft.on("compile.enable") else []
    names = "compile.enable compile.components"
    draft.set("compile.enabled", "model" in parts, names)
    draft.set("compile.loss", "loss" in parts, names)


def pipeline(draft: Draft) -> None:
    """The schedule, which has no effect without pipeline parallel."""
    if draft.get("parallel.pp") > 1:
        name = f"{P}pipeline_parallel_schedule"
        draft.set("parallel.pp_schedule", draft.value(name), name)


def _microbatch(draft: Draft) -> None:
    name = f"{P}pipeline_parallel_microbatch_size"
    if draft.get("parallel.pp") > 1:
        draft.set("parallel.pp_microbatch_size", draft.value(name), name)


def _saves(draft: Draft) -> None:
    names = "checkpoint.enable checkpoint.interval checkpoint.keep_latest_k checkpoint.async_mode"
    if not draft.on("checkpoint.enable"):
        draft.set("checkpoint.freq", 0, "checkpoint.enable")
        return
    draft.set("checkpoint.freq", draft.value("checkpoint.interval"), names)
    draft.set(
        "checkpoint.keep", draft.value("checkpoint.keep_latest_k"), "checkpoint.keep_latest_k"
    )
    mode = draft.value("checkpoint.async_mode")
    mode = "async_pinned" if mode == "async_with_pinned_mem" else mode
    draft.set("checkpoint.async_mode", mode, "checkpoint.async_mode")
    path = draft.value("checkpoint.initial_load_path")
    if path:
        draft.set("checkpoint.initial_load", path, "checkpoint.initial_load_path")
    if draft.number("checkpoint.load_step") > 0:
        step = draft.value("checkpoint.load_step")
        draft.set("checkpoint.load_step", step, "checkpoint.load_step")


def sinks(draft: Draft) -> None:
    """Where metrics are copied to."""
    pairs = (("metrics.enable_tensorboard", "tensorboard"), ("metrics.enable_wandb", "wandb"))
    names = [name for name, _ in pairs if draft.on(name)]
    chosen = [sink for name, sink in pairs if name in names]
    if chosen:
        draft.set("metrics.sinks", chosen, " ".join(names))


def _data(draft: Draft) -> None:
    found = draft.value("training.dataset_path") or draft.value("training.dataset")
    draft.decide(f"data.path: the data there is {found!r}; give a file, a folder or hf:NAME")
    found = draft.value("model.tokenizer_path") or draft.value("model.hf_assets_path")
    draft.decide(f"data.tokenizer: it is in {found!r} there")


# Fields with the same name, default and meaning in 0.2 and 0.3
DEGREES = (
    Row(f"{P}data_parallel_replicate_degree", "parallel.dp_replicate", 1),
    Row(f"{P}data_parallel_shard_degree", "parallel.dp_shard", -1),
    Row(f"{P}tensor_parallel_degree", "parallel.tp", 1),
    Row(f"{P}context_parallel_degree", "parallel.cp", 1),
    Row(f"{P}pipeline_parallel_degree", "parallel.pp", 1),
    *by(
        pipeline,
        "parallel.pp_schedule",
        "only with pp",
        "parallelism.pipeline_parallel_schedule=1F1B",
    ),
    *must("models are dense", "parallelism.expert_parallel_degree=1"),
    *must(
        "`parallel.pp_schedule` and `parallel.pp_split` say what a stage has",
        "pipeline_parallel_layers_per_stage module_fqns_per_model_part "
        'pipeline_parallel_schedule_csv=""|null',
        under="parallelism.",
    ),
    *leave(
        "stages are balanced by size",
        "parallelism.pipeline_parallel_first_stage_less_layers=1 "
        "parallelism.pipeline_parallel_last_stage_less_layers=1",
    ),
    *leave(
        "the order of the shards changes no number",
        "parallelism.context_parallel_load_balancer=headtail|ptrr|null",
    ),
    *must("a real run is needed", "comm.mode=default"),
)
COMMON = (
    Row(f"{P}fsdp_reshard_after_forward", "parallel.reshard_after_forward", "default"),
    Row("lr_scheduler.warmup_steps", "schedule.warmup_steps", 200),
    Row("lr_scheduler.min_lr_factor", "schedule.min_ratio", 0.0),
    *by(
        _schedule,
        "schedule.name schedule.decay schedule.decay_fraction",
        "with a ratio `wsd`",
        "decay_type=linear decay_ratio total_steps",
        under="lr_scheduler.",
    ),
    Row("training.steps", "training.steps", 10_000),
    Row("training.max_norm", "training.max_norm", 1.0),
    Row("training.dtype", "training.param_dtype", "float32"),
    Row("training.mixed_precision_param", "training.compute_dtype", "bfloat16"),
    Row("training.mixed_precision_reduce", "training.reduce_dtype", "float32"),
    Row("training.enable_cpu_offload", "parallel.cpu_offload", False),
    Row("training.gc_freq", "training.gc_freq", 50),
    Row("debug.seed", "run.seed", None, "absent: random there"),
    Row("debug.deterministic", "debug.deterministic", False),
    *by(
        set_compile,
        "compile.enabled compile.loss",
        "",
        'compile.enable=false compile.components=["model","loss"]',
    ),
    Row("compile.backend", "compile.backend", "inductor"),
    *by(
        _saves,
        "checkpoint.freq checkpoint.keep checkpoint.async_mode checkpoint.initial_load "
        "checkpoint.load_step",
        "not enabled: only the checkpoint at the end",
        "enable=false interval=500 keep_latest_k=10 async_mode=disabled initial_load_path "
        "load_step=-1",
        under="checkpoint.",
    ),
    *leave(
        "checkpoints are in the run's folder and whole; `checkpoint.initial_load` reads weights",
        "folder=checkpoint initial_load_model_only=true initial_load_in_hf=false|true "
        "initial_load_in_hf_quantized=false last_save_model_only=true|false "
        "last_save_in_hf=false export_dtype=float32 exclude_from_loading=[] "
        "enable_first_step_checkpoint=false create_seed_checkpoint=false load_only=false",
        under="checkpoint.",
    ),
    Row("metrics.log_freq", "metrics.log_freq", 10),
    *by(
        sinks,
        "metrics.sinks",
        "",
        "metrics.enable_tensorboard=false metrics.enable_wandb=false",
    ),
    *leave(
        "rank 0 writes `metrics.jsonl`; `NO_COLOR` switches colours off",
        "disable_color_printing=false|true save_tb_folder=tb save_for_all_ranks=false",
        under="metrics.",
    ),
    Row("comm.init_timeout_seconds", "comm.timeout_seconds", 300),
    Row("comm.train_timeout_seconds", "comm.step_timeout_seconds", 100),
    *leave(
        "the run names the rank that blocks the others by itself",
        "trace_buf_size=20000 save_traces_folder=comm_traces save_traces_file_prefix=rank_",
        under="comm.",
    ),
    *leave(
        "there is no key for it",
        "training.gc_debug=false debug.deterministic_warn_only=false "
        "debug.moe_force_load_balance=false",
    ),
)
ROWS = (
    *by(
        _flavor,
        "model.flavor model.rope_scaling data.document_mask",
        "`llama3` `8B` is `llama3_8b`, with RoPE scaled by 8 as there",
        "model.name=llama3 model.flavor=debugmodel",
    ),
    *DEGREES,
    *COMMON,
    *by(
        _float8,
        "float8.enabled",
        "only `quantize.linear.float8`",
        "model.converters=[] quantize.linear.float8.filter_fqns=[]",
    ),
    Row(
        "quantize.linear.float8.recipe_name",
        "float8.scaling",
        values={None: "tensorwise", "tensorwise": "tensorwise", "rowwise": "rowwise"},
    ),
    Row("quantize.linear.float8.emulate", "float8.emulate", False),
    *by(
        _data,
        "data.path data.tokenizer",
        "to decide",
        "training.dataset=c4_test training.dataset_path "
        "model.hf_assets_path=./tests/assets/tokenizer model.tokenizer_path",
    ),
    Row("job.dump_folder", "run.folder", "./outputs"),
    Row("optimizer.name", "optimizer.name", "AdamW", values={"AdamW": "adamw"}),
    Row("optimizer.lr", "optimizer.lr", 8e-4),
    *by(_betas, "optimizer.betas", "", "optimizer.beta1=0.9 optimizer.beta2=0.95"),
    Row("optimizer.eps", "optimizer.eps", 1e-8),
    Row("optimizer.weight_decay", "optimizer.weight_decay", 0.1),
    Row("optimizer.implementation", "optimizer.implementation", "fused"),
    Row("training.seq_len", "training.seq_len", 2048),
    *by(
        _batch,
        "training.local_batch_size training.global_batch_size",
        "-1 is one local batch on each data-parallel rank",
        "training.local_batch_size=8 training.global_batch_size=-1",
    ),
    Row(f"{P}enable_async_tensor_parallel", "parallel.async_tp", False),
    Row(
        f"{P}context_parallel_rotate_method",
        "parallel.cp_method",
        "allgather",
        values={"allgather": "all_gather", "alltoall": "ring"},
    ),
    *by(
        _microbatch,
        "parallel.pp_microbatch_size",
        "only with pp",
        "parallelism.pipeline_parallel_microbatch_size=1",
    ),
    *by(
        _checkpointing,
        "recompute.mode recompute.every",
        "`selective` with a number n is `full` with `every` = n; with `op` it is `selective`",
        'activation_checkpoint.mode=selective activation_checkpoint.selective_ac_option="2"',
    ),
    Row("activation_checkpoint.memory_budget", "recompute.budget", 0.5),
    *must(
        "models are dense",
        "parallelism.expert_tensor_parallel_degree=1 "
        "parallelism.expert_parallel_comm_backend=standard",
    ),
    *must("replica groups are fixed", "fault_tolerance.enable=false"),
    *must(
        "code of the user's is not run",
        'job.custom_config_module="" experimental.custom_import="" '
        'experimental.custom_args_module=""',
    ),
    *leave("gradients are clipped first", "optimizer.early_step_in_backward=false"),
    *leave("with tp the loss is always parallel", "parallelism.disable_loss_parallel=false"),
    *leave(
        "pipeline and expert parallel are not combined",
        "parallelism.pipeline_parallel_expert_parallel_overlap=true|false",
    ),
    *leave(
        "it has no effect on a dense model, or is chosen by the compiler",
        'activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=["moe.router.gate"] '
        "activation_checkpoint.early_stop=false|true "
        "activation_checkpoint.preserve_rng_state=true|false "
        "activation_checkpoint.visualize_memory_budget_pareto=false "
        "activation_checkpoint.determinism_check=default activation_checkpoint.debug=false "
        "quantize.linear.float8.enable_fsdp_float8_all_gather=false "
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp=false",
    ),
    *leave(
        "only `quantize.linear.float8` is built",
        "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice=triton "
        'quantize.linear.mx.recipe_name=mxfp8_cublas quantize.linear.mx.filter_fqns=["output"] '
        "quantize.grouped_mm.float8.fqns=[] quantize.grouped_mm.mx.recipe_name=mxfp8 "
        "quantize.grouped_mm.mx.fqns=[]",
    ),
    *leave(
        "`[validation]` has samples of the training text",
        "enable=false freq=10 steps=-1 local_batch_size=8 seq_len=2048 dataset=c4_validation "
        "dataset_path",
        under="validation.",
    ),
    *leave(
        "`[profiling]`",
        "enable_profiling=false profile_freq=10 profiler_active=1 profiler_warmup=3 "
        "enable_memory_snapshot=false",
        under="profiling.",
    ),
    *leave(
        "batches need no worker processes",
        "training.dataloader.num_workers=0 training.dataloader.persistent_workers=false "
        "training.dataloader.pin_memory=false training.dataloader.prefetch_factor "
        "validation.dataloader.num_workers=0 validation.dataloader.persistent_workers=false "
        "validation.dataloader.pin_memory=false validation.dataloader.prefetch_factor",
    ),
    *leave(
        "replica groups are fixed",
        "checkpoint.enable_ft_dataloader_checkpoints=true|false "
        "fault_tolerance.process_group=gloo fault_tolerance.process_group_timeout_ms=10000 "
        "fault_tolerance.replica_id=0 fault_tolerance.group_size=0 "
        "fault_tolerance.min_replica_size=1 fault_tolerance.semi_sync_method",
    ),
    *leave(
        "the run's folder has its config, traces and logs; its name is the config's",
        "job.config_file job.description=null|any job.print_config=false|true "
        "job.save_config_file model.print_after_conversion=false|true "
        "profiling.save_traces_folder=profile_traces "
        "profiling.save_memory_snapshot_folder=memory_snapshot memory_estimation.enable=false "
        "memory_estimation.disable_fake_mode=false",
    ),
)
LATE_DECAY = "lr_scheduler: the decay there ends one step after the last one, here with it"
TORCHTITAN = Format("torchtitan", "torchtitan", "0.2.2", ROWS, (LATE_DECAY,))
