"""The settings that `run.device = mps`, the GPU of an Apple computer, supports.

What it is: one process, computing in fp32, with the settings in the table below. In 16 bits,
attention with a causal mask lets tokens see later ones in some releases of torch, without an error
(pytorch#195910); in others the fused AdamW ignores a request to withhold an update
(pytorch#186360). Other settings need float64, which the device lacks, or CUDA, or have not been
tried. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.config.keys import setting
from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.degrees import num_processes

ALLOWED = {
    "training.compute_dtype": ("auto", "float32"),
    "training.param_dtype": ("float32",),
    "optimizer.state_dtype": ("float32",),
    "optimizer.name": ("adamw",),
    "optimizer.implementation": ("auto", "fused", "for-loop"),
    "float8.enabled": (False,),
    "compile.enabled": ("auto", "false"),
    "compile.loss": ("auto", "false"),
    "loss.num_chunks": (0, 1),
    "recompute.mode": ("none", "full", "selective"),
    "recompute.offload": (False,),
    "parallel.cpu_offload": (False,),
    "parallel.optimizer_offload": (False,),
    "parallel.reshard_after_forward": ("default",),
    "stability.action": ("stop",),
    "stability.threshold": (0,),
    "metrics.noise_scale_freq": (0,),
    "metrics.layer_norms_freq": (0,),
    "metrics.activations_freq": (0,),
}


def apple_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires one process, float32 and only the plain techniques."""
    if config.run.device != "mps":
        return
    processes = num_processes(degrees)
    if processes > 1:
        yield (
            f"run.device = mps with {processes} processes: torch cannot connect Apple's GPUs; "
            "expected NGPU=1"
        )
    for key, allowed in ALLOWED.items():
        value = setting(config, key)
        if value not in allowed:
            expected = " or ".join(str(choice).lower() for choice in allowed)
            yield (
                f"{key} = {str(value).lower()} is not supported with run.device = mps; "
                f"expected {expected}"
            )
