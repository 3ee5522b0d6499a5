"""Finds settings that have no effect, because the technique they belong to is not used.

What it is: a table with one row per technique. The start of a run logs a line for each key that was
changed without effect; it is not an error, since a config may keep the settings of a technique that
is switched off. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.degrees import needs_fsdp, num_processes


class Technique(NamedTuple):
    """Keys that have an effect only if a technique is used."""

    used: bool
    reason: str  # why the keys have no effect if it is not used
    section: str
    keys: str  # with spaces between them


def unused_settings(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> list[str]:
    """Writes a message for each key that was changed although its technique is not used."""
    defaults = Config()
    messages = []
    for technique in _techniques(config, llama, degrees):
        if technique.used:
            continue
        for name in technique.keys.split():
            value = getattr(getattr(config, technique.section), name)
            default = getattr(getattr(defaults, technique.section), name)
            if value != default:
                messages.append(
                    f"{technique.section}.{name} = {value} has no effect: {technique.reason}"
                )
    return messages


def _techniques(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> list[Technique]:
    """Lists the techniques that have their own keys, in the order of the messages."""
    fsdp = needs_fsdp(config.parallel, num_processes(degrees))
    optimizer = config.optimizer
    stability = config.stability
    mode = config.recompute.mode
    shape = config.schedule.name
    dtype = config.training.compute_dtype
    fp32_state = optimizer.state_dtype == config.training.param_dtype == "float32"
    servers = "wandb" in config.metrics.sinks or "mlflow" in config.metrics.sinks
    prompts = len(config.validation.prompts) > 0
    pp_keys = " ".join(name for name in vars(config.parallel) if name.startswith("pp_"))
    muon_keys = " ".join(name for name in vars(optimizer) if name.startswith("muon_"))
    decay_keys = "decay decay_fraction"
    if config.schedule.decay_steps or config.schedule.decay_tokens:
        decay_keys = "decay decay_steps decay_tokens"  # if set, decay_fraction is 0
    dense = llama.num_experts == 0
    adopted = config.model.flavor == FROM_CHECKPOINT  # which sets all keys of the model itself
    row = Technique
    return [
        row(degrees["pp"] > 1, "parallel.pp = 1", "parallel", pp_keys),
        row(not dense, "a dense model", "loss", "router_aux_loss"),
        row(not dense, "a dense model", "model", "experts_per_token expert_ffn_dim"),
        row(dense or adopted, "a mixture has model.expert_ffn_dim", "model", "ffn_dim"),
        row(degrees["cp"] > 1, "parallel.cp = 1", "parallel", "cp_method"),
        row(mode in ("full", "selective"), f"recompute.mode = {mode}", "recompute", "every"),
        row(mode == "memory_budget", "recompute.mode is not memory_budget", "recompute", "budget"),
        row(fsdp, "one process does not use FSDP", "parallel", "prefetch reduce_every_microbatch"),
        row(fsdp, "one process does not use FSDP", "training", "reduce_dtype"),
        row(
            dtype == "float16",
            f"training.compute_dtype = {dtype}",
            "training",
            "loss_scale loss_scale_growth",
        ),
        row(config.float8.enabled, "float8.enabled = false", "float8", "skip scaling emulate"),
        row(config.lora.rank > 0, "lora.rank = 0", "lora", "alpha rslora dropout targets layers"),
        row(shape == "wsd", "schedule.name is not wsd", "schedule", decay_keys),
        row(shape == "step", "schedule.name is not step", "schedule", "milestones"),
        row(shape != "constant", "schedule.name = constant", "schedule", "min_ratio"),
        row(fp32_state, "moments or parameters are bfloat16", "optimizer", "implementation"),
        row(optimizer.name == "muon", "optimizer.name = adamw", "optimizer", muon_keys),
        row(optimizer.clip == "agc", "optimizer.clip = norm", "optimizer", "agc_factor"),
        row(optimizer.clip == "norm", "optimizer.clip = agc", "training", "max_norm"),
        row(stability.threshold > 0, "stability.threshold = 0", "stability", "window warmup_steps"),
        row(stability.action == "skip", "stability.action is not skip", "stability", "max_skips"),
        row(
            stability.action == "rollback",
            "stability.action is not rollback",
            "stability",
            "max_rollbacks",
        ),
        row(config.ema.decay > 0, "ema.decay = 0", "ema", "validate"),
        row(
            prompts,
            "validation.prompts is empty",
            "validation",
            "prompt_tokens prompt_temperature",
        ),
        row(config.metrics.step_times, "metrics.step_times = false", "metrics", "rank_waits"),
        row(
            servers,
            "metrics.sinks has neither wandb nor mlflow",
            "metrics",
            "project wandb_mode mlflow_uri",
        ),
    ]
