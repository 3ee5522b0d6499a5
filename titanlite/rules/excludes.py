"""Rules about settings that exclude each other.

What it is: one function for each technique, with what it does not support and why. Sizes are in
`divides.py`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from titanlite.config.schema import PP_SCHEDULES, SPLIT_BACKWARD, Config
from titanlite.model.flavors import LlamaConfig, family_of
from titanlite.rules.compiled import reason_not_compiled
from titanlite.rules.degrees import needs_fsdp, num_processes
from titanlite.runtime.errors import ConfigError


def compiler(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires torch.compile for `parallel.async_tp` and `recompute.mode = memory_budget`."""
    device = config.run.device
    if device == "auto":
        device = "cuda"
    compiled = reason_not_compiled(config, degrees, llama.dim, device) == ""
    inductor = compiled and config.compile.backend == "inductor" and device == "cuda"
    if config.parallel.async_tp and not (degrees["tp"] > 1 and inductor):
        yield (
            "parallel.async_tp = true: the compiler overlaps it on GPUs; expected parallel.tp > 1, "
            "compile.enabled = true, compile.backend = inductor and not run.device = cpu"
        )
    without_compiler = config.compile.enabled == "false" or config.compile.backend == "eager"
    if config.recompute.mode == "memory_budget" and without_compiler:
        yield (
            "recompute.mode = memory_budget needs the compiler; expected compile.enabled = auto or "
            "true, and compile.backend not eager"
        )


def pipeline_reduction(
    config: Config, llama: LlamaConfig, degrees: dict[str, int]
) -> Iterator[str]:
    """Refuses `reduce_every_microbatch = false` in a pipeline, which reduces per local batch."""
    if degrees["pp"] > 1 and not config.parallel.reduce_every_microbatch:
        yield (
            "parallel.reduce_every_microbatch = false: a pipeline sums gradients once per local "
            "batch; leave it true"
        )


def split_backward(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Refuses settings that schedules with two separate gradient calls do not support."""
    schedule = config.parallel.pp_schedule
    if degrees["pp"] == 1 or schedule not in SPLIT_BACKWARD:
        return
    others = ", ".join(name for name in PP_SCHEDULES if name not in SPLIT_BACKWARD)
    reason = (
        f"parallel.pp_schedule = {schedule} computes a layer's two gradients in separate calls, "
        "which"
    )
    compiles_for = ""
    if config.compile.enabled == "true":
        compiles_for = "compile.enabled = true"
    elif config.compile.enabled == "auto" and config.recompute.mode == "memory_budget":
        compiles_for = "recompute.mode = memory_budget"
    if compiles_for:
        yield f"{reason} compiled blocks do not support; with {compiles_for} use one of {others}"
    if config.recompute.mode == "selective":
        yield (
            f"{reason} recompute.mode = selective does not support; use recompute.mode = full, "
            f"or one of {others}"
        )
    if config.parallel.reshard_after_forward == "always":
        yield (
            f"{reason} needs weights that stay gathered, also in between; with "
            "parallel.reshard_after_forward = always the gradients of weights would be lost. Use "
            f"default or never, or one of {others}"
        )


def stability(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires an optimizer that can withhold an update, and checkpoints for a rollback."""
    section = config.stability
    if section.action == "stop" and not section.threshold:
        return
    implementation = config.optimizer.implementation
    # With bfloat16 the key has no effect: that optimizer can withhold an update
    bfloat16 = "bfloat16" in (config.optimizer.state_dtype, config.training.param_dtype)
    if implementation in ("foreach", "for-loop") and not bfloat16:
        yield (
            f"optimizer.implementation = {implementation} cannot withhold the update of a bad "
            "step; with [stability] expected auto or fused"
        )
    checkpoint = config.checkpoint
    saves = checkpoint.freq or checkpoint.freq_epochs or checkpoint.freq_minutes
    if section.action == "rollback" and not saves:
        yield (
            "stability.action = rollback, and checkpoint.freq = 0: expected checkpoint.freq or "
            "freq_epochs or freq_minutes above 0, since a run rolls back to a checkpoint"
        )


def noise_scale(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires a reduced gradient after the first local batch for `metrics.noise_scale_freq`."""
    freq = config.metrics.noise_scale_freq
    fsdp = needs_fsdp(config.parallel, num_processes(degrees))
    if freq and fsdp and not config.parallel.reduce_every_microbatch:
        yield (
            f"metrics.noise_scale_freq = {freq} needs the gradient of the first local batch; "
            "expected parallel.reduce_every_microbatch = true"
        )


def experts(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Refuses what is not made for a mixture of experts."""
    if not llama.num_experts:
        return
    if config.float8.enabled:
        yield (
            f"float8.enabled = true with model.num_experts = {llama.num_experts}: products of "
            "experts in float8 are not supported; expected float8.enabled = false"
        )
    if config.lora.drops and config.recompute.mode == "selective":
        yield (
            f"lora.dropout = {config.lora.dropout:g} with model.num_experts = {llama.num_experts} "
            "and recompute.mode = selective: the block holds the dropout mask, and selective "
            "recomputes attention without the block; expected recompute.mode = full or none"
        )
    frozen = config.training.frozen_patterns
    if frozen and config.loss.router_aux_loss:
        yield (
            f"loss.router_aux_loss = {config.loss.router_aux_loss:g} with training.frozen: it "
            "counts in the backward, which frozen blocks do not have; expected 0"
        )


def float8(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires bfloat16 for float8 with one scale per row, whose products are bfloat16."""
    section = config.float8
    rowwise = section.enabled and section.scaling == "rowwise" and not section.emulate
    if rowwise and config.training.compute_dtype == "float32":
        yield (
            "float8.scaling = rowwise with training.compute_dtype = float32: the hardware returns "
            "bfloat16; expected training.compute_dtype = bfloat16, or float8.scaling = tensorwise"
        )


def float16(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Applies the rules of float16 if the config sets it."""
    if config.training.compute_dtype == "float16":
        yield from float16_problems(config)


def float16_problems(config: Config) -> Iterator[str]:
    """Requires fp32 beside the computation, updates that can be withheld, a power-of-two scale."""
    training = config.training
    optimizer = config.optimizer
    for key, dtype in (
        ("param_dtype", training.param_dtype),
        ("reduce_dtype", training.reduce_dtype),
    ):
        if dtype != "float32":
            yield (
                f"training.{key} = {dtype} with training.compute_dtype = float16: it would lose "
                f"the bits that float16 keeps; expected training.{key} = float32, or "
                "training.compute_dtype = bfloat16"
            )
    if config.float8.enabled:
        yield (
            "float8.enabled = true with training.compute_dtype = float16: devices with float8 have "
            "bfloat16; expected training.compute_dtype = bfloat16, or float8.enabled = false"
        )
    if optimizer.implementation not in ("auto", "fused") and optimizer.state_dtype == "float32":
        yield (
            f"optimizer.implementation = {optimizer.implementation} with training.compute_dtype = "
            "float16: it cannot withhold an update on the device; expected auto or fused"
        )
    scale = training.loss_scale
    mantissa, _ = math.frexp(scale)
    if mantissa != 0.5:
        power = 2 ** round(math.log2(scale))
        yield (
            f"training.loss_scale = {scale:g} is not a power of two, so scaling would round; "
            f"nearest: {power}"
        )


def require_float16(config: Config) -> None:
    """Raises ConfigError if `auto` has chosen float16 and it does not fit the other settings."""
    problems = [
        f"compute_dtype = auto is float16 on this GPU: {problem}"
        for problem in float16_problems(config)
    ]
    if problems:
        raise ConfigError(problems)


def offloading(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Refuses offloading that would have no effect, happen twice, or does not work."""
    mode = config.recompute.mode
    parallel = config.parallel
    if config.recompute.offload and mode != "full":
        yield (
            f"recompute.offload = true with recompute.mode = {mode}: it copies the inputs of "
            "blocks, which are all that is kept with recompute.mode = full; expected that"
        )
    if parallel.optimizer_offload and parallel.cpu_offload:
        yield (
            "parallel.optimizer_offload = true and parallel.cpu_offload = true: the latter keeps "
            "the moments in CPU memory too, and computes the update there; expected only one of "
            "them"
        )
    if parallel.optimizer_offload and config.optimizer.name == "muon":
        yield (
            "parallel.optimizer_offload = true with optimizer.name = muon: offloading updates some "
            "parameters at a time, and Muon's matrices are divided over ranks; expected "
            "optimizer.name = adamw, or parallel.cpu_offload = true"
        )


def export(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires adapters for `checkpoint.export = peft`, and for hf a model of transformers."""
    form = config.checkpoint.export
    if form == "peft" and config.lora.rank == 0:
        yield "checkpoint.export = peft: expected lora.rank > 0, or another format"
    if form == "hf":
        try:
            family_of(llama)
        except ConfigError as error:
            yield f"checkpoint.export = hf: {error}"
