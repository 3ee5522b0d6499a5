"""The YAML of `accelerate config`, with its options of FSDP, DeepSpeed and Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.tools.import_config.common import (
    data_parallel,
    offload,
    sharding_strategy,
    whole,
    zero_stage,
)
from titanlite.tools.import_config.mapping import Draft, Format, Row, nothing

FSDP = "fsdp_config."
ZERO = "deepspeed_config."
MEGATRON = "megatron_lm_config.megatron_lm_"
DEGREES = "parallelism_config.parallelism_config_"


def _processes(draft: Draft) -> None:
    if not draft.processes:
        draft.processes = whole(draft.number("num_processes"))
    draft.decide(
        "training.local_batch_size, training.global_batch_size: the script has the batch size"
    )


def _kind(draft: Draft) -> None:
    """Several GPUs without FSDP, DeepSpeed or Megatron-LM are DDP."""
    if draft.value("distributed_type") in ("MULTI_GPU", "MULTI_CPU"):
        data_parallel(draft, "distributed_type")


def _precision(draft: Draft) -> None:
    word = draft.value("mixed_precision")
    if word == "fp8":
        draft.set("training.compute_dtype", "bfloat16", "mixed_precision")
        draft.set("float8.enabled", True, "mixed_precision")
    else:
        draft.set("training.compute_dtype", word, "mixed_precision")


def _strategy(draft: Draft) -> None:
    sharding_strategy(draft, f"{FSDP}fsdp_sharding_strategy")


def _reshard(draft: Draft) -> None:
    """A boolean with FSDP2; with FSDP1 it has the names of the strategies."""
    name = f"{FSDP}fsdp_reshard_after_forward"
    if isinstance(draft.value(name), bool):
        draft.set("parallel.reshard_after_forward", str(draft.value(name)), name)
    else:
        sharding_strategy(draft, name)


def _recompute(draft: Draft) -> None:
    for name in (f"{FSDP}fsdp_activation_checkpointing", f"{MEGATRON}recompute_activations"):
        if draft.on(name):
            mode = "full" if name.startswith(FSDP) else "selective"
            draft.set("recompute.mode", mode, name)


def _prefetch(draft: Draft) -> None:
    if draft.on(f"{FSDP}fsdp_forward_prefetch"):
        draft.set("parallel.prefetch", 1, f"{FSDP}fsdp_forward_prefetch")


def _stage(draft: Draft) -> None:
    zero_stage(draft, f"{ZERO}zero_stage")


def _offload_optimizer(draft: Draft) -> None:
    offload(draft, f"{ZERO}offload_optimizer_device", "parallel.optimizer_offload")


def _offload_param(draft: Draft) -> None:
    offload(draft, f"{ZERO}offload_param_device", "parallel.cpu_offload")
    if draft.get("parallel.cpu_offload"):  # which includes the moments
        draft.settings.pop("parallel.optimizer_offload", None)


def _accumulation(draft: Draft) -> None:
    for name in ("gradient_accumulation_steps", f"{ZERO}gradient_accumulation_steps"):
        if draft.number(name) > 1:
            draft.decide(
                f"training.global_batch_size: {name} = {draft.value(name)} times the batch size of "
                "the script, times the number of processes"
            )


def _clip(draft: Draft) -> None:
    for name in (f"{ZERO}gradient_clipping", f"{MEGATRON}gradient_clipping"):
        if draft.has(name):
            draft.set("training.max_norm", draft.value(name), name)


def _compile(draft: Draft) -> None:
    backend = str(draft.value("dynamo_config.dynamo_backend")).lower()
    if backend not in ("no", "none"):
        draft.set("compile.enabled", "true", "dynamo_config.dynamo_backend")
        draft.set("compile.backend", backend, "dynamo_config.dynamo_backend")


def _device(draft: Draft) -> None:
    if draft.on("use_cpu"):
        draft.set("run.device", "cpu", "use_cpu")


ROWS = (
    Row("num_processes", "", "`NGPU`, or torchrun's `--nproc-per-node`", _processes),
    Row(
        "num_machines machine_rank main_process_ip main_process_port rdzv_backend same_network",
        "",
        "torchrun's arguments (`docs/multinode.md`)",
        nothing,
    ),
    Row(
        "distributed_type",
        "parallel.dp_replicate parallel.dp_shard",
        "`MULTI_GPU` is DDP: `dp_replicate = -1`, `dp_shard = 1`",
        _kind,
    ),
    Row("mixed_precision", "training.compute_dtype float8.enabled", "", _precision),
    Row(
        f"{FSDP}fsdp_sharding_strategy",
        "parallel.reshard_after_forward parallel.dp_replicate parallel.dp_shard",
        '`FULL_SHARD` or 1: `"always"`; `SHARD_GRAD_OP` or 2: `"never"`; `NO_SHARD`: replicas',
        _strategy,
    ),
    Row(
        f"{FSDP}fsdp_reshard_after_forward",
        "parallel.reshard_after_forward",
        'true: `"always"`; false: `"never"`',
        _reshard,
    ),
    Row(f"{FSDP}fsdp_offload_params", "parallel.cpu_offload"),
    Row(
        f"{FSDP}fsdp_activation_checkpointing {MEGATRON}recompute_activations",
        "recompute.mode",
        "`full`; `selective` for Megatron-LM's",
        _recompute,
    ),
    Row(f"{FSDP}fsdp_forward_prefetch", "parallel.prefetch", "1", _prefetch),
    Row(
        f"{FSDP}*",
        "",
        "a unit is a block; weights are loaded in parts; checkpoints are sharded",
        nothing,
    ),
    Row(f"{DEGREES}dp_replicate_size", "parallel.dp_replicate"),
    Row(f"{DEGREES}dp_shard_size", "parallel.dp_shard"),
    Row(f"{DEGREES}tp_size", "parallel.tp"),
    Row(f"{DEGREES}cp_size", "parallel.cp"),
    Row(
        f"{ZERO}zero_stage",
        "parallel.reshard_after_forward parallel.dp_replicate parallel.dp_shard",
        "as DeepSpeed's",
        _stage,
    ),
    Row(
        f"{ZERO}offload_optimizer_device", "parallel.optimizer_offload", "`cpu`", _offload_optimizer
    ),
    Row(f"{ZERO}offload_param_device", "parallel.cpu_offload", "`cpu`", _offload_param),
    Row(f"{ZERO}gradient_clipping {MEGATRON}gradient_clipping", "training.max_norm", "", _clip),
    Row(
        f"gradient_accumulation_steps {ZERO}gradient_accumulation_steps",
        "training.global_batch_size",
        "to decide: the batch size is the script's",
        _accumulation,
    ),
    Row(f"{ZERO}deepspeed_config_file", "", "import that file too"),
    Row(f"{ZERO}*", "", "nothing to set", nothing),
    Row(f"{MEGATRON}tp_degree", "parallel.tp"),
    Row(f"{MEGATRON}pp_degree", "parallel.pp"),
    Row(
        f"{MEGATRON}*", "", "sequence parallel is part of tp; optimizer states are sharded", nothing
    ),
    Row("dynamo_config.dynamo_backend", "compile.enabled compile.backend", "", _compile),
    Row("dynamo_config.*", "", "`[compile]`", nothing),
    Row("use_cpu", "run.device", "`cpu`", _device),
    Row(
        "debug downcast_bf16 main_training_function compute_environment gpu_ids tpu_* "
        "enable_cpu_affinity ipex_config.* mpirun_config.*",
        "",
        "nothing to set",
        nothing,
    ),
)


def defaults(entries: Mapping[str, object]) -> dict[str, object]:
    """The file names what it needs."""
    return {}


ACCELERATE = Format(
    "accelerate",
    "accelerate",
    ROWS,
    defaults,
)
