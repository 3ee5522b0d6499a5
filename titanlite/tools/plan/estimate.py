"""Estimates by arithmetic what a step of a layout holds, computes and sends.

What it is: `StepCounts` by the formulas of `estimate_memory.py`, `estimate_compute.py` and
`estimate_traffic.py`, for a CUDA device. `trace.py` counts the same in the real program.
Why it is here: a search tries thousands of layouts, and an estimate takes milliseconds. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import replace

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.check import check_layout
from titanlite.rules.compiled import reason_not_compiled
from titanlite.rules.degrees import data_ranks
from titanlite.rules.loss_chunks import loss_chunks
from titanlite.tools.plan.counts import RankCounts, StepCounts
from titanlite.tools.plan.estimate_compute import attention_flops, pointwise_bytes, products
from titanlite.tools.plan.estimate_experts import expert_bytes
from titanlite.tools.plan.estimate_memory import memory, states
from titanlite.tools.plan.estimate_traffic import collectives
from titanlite.tools.plan.layout import Layout


def estimate(
    config: Config, llama: LlamaConfig, world_size: int, device_type: str = "cuda"
) -> StepCounts:
    """The counts of a step on `world_size` ranks.

    Raises ConfigError for a layout that is not allowed.
    """
    layout = layout_of(config, llama, world_size, device_type)
    training = config.training
    ranks = []
    for pp_rank in range(layout.pp):
        stages = layout.stages_of(pp_rank)
        stored = states(layout, stages)
        never_compiled = 0 if layout.compiles_experts else expert_bytes(layout, stages)
        ranks.append(
            RankCounts(
                pp_rank=pp_rank,
                stages=tuple(stage.index for stage in stages),
                num_parameters=stored.num_parameters,
                num_trained=stored.num_trained,
                memory=memory(layout, stages, pp_rank),
                products=products(layout, stages),
                attention_flops=attention_flops(layout, stages),
                pointwise_bytes=pointwise_bytes(layout, stages),
                never_compiled_bytes=never_compiled,
                collectives=collectives(layout, stages, pp_rank),
            )
        )
    sequences = layout.local_batches * training.local_batch_size * data_ranks(layout.degrees)
    return StepCounts(
        source="estimated",
        degrees=layout.degrees,
        local_batches=layout.local_batches,
        tokens=sequences * training.seq_len,
        ranks=tuple(ranks),
    )


def layout_of(
    config: Config, llama: LlamaConfig, world_size: int, device_type: str = "cuda"
) -> Layout:
    """The layout of a config. Raises ConfigError."""
    degrees = check_layout(config, llama, world_size)
    compiled = not reason_not_compiled(config, degrees, llama.dim, device_type)
    loss = replace(config.loss, num_chunks=loss_chunks(config, llama.vocab_size, degrees))
    return Layout(replace(config, loss=loss), llama, degrees, compiled)
