"""Which picture is drawn from which records."""

from __future__ import annotations

from collections.abc import Callable

from docs.pictures import recorded
from docs.pictures.causal_triangle import draw_triangle
from docs.pictures.experts import draw_experts
from docs.pictures.fsdp_streams import draw_streams
from docs.pictures.pipelines import draw_all, draw_one_stage
from docs.pictures.sharding import draw_rows, draw_two_axes
from docs.pictures.step_memory import draw_memory
from docs.pictures.tensor_parallel_block import draw_block
from titanlite.tools.verify.pool import Pool


def _two_axes(pool: Pool) -> str:
    options = [*recorded.SMALL, "--parallel.dp_shard=2", "--parallel.tp=2"]
    return draw_two_axes(pool.run(4, recorded.held_by_rank, options))


def _rows(pool: Pool) -> str:
    options = [*recorded.SMALL, "--parallel.dp_shard=4"]
    return draw_rows(pool.run(4, recorded.held_by_rank, options))


def _streams(pool: Pool) -> str:
    options = [*recorded.SMALL, "--parallel.dp_shard=2", "--training.global_batch_size=4"]
    return draw_streams(pool.run(2, recorded.calls_of_fsdp, options)[0])


def _block(pool: Pool) -> str:
    options = [*recorded.SMALL, "--parallel.dp_shard=1", "--parallel.tp=2"]
    events = pool.run(2, recorded.forward_of_block, options)
    return draw_block(events, pool.run(2, recorded.held_by_rank, options))


def _experts(pool: Pool) -> str:
    options = [
        *recorded.SMALL,
        "--model.num_experts=4",
        "--model.experts_per_token=2",
        "--model.expert_ffn_dim=24",
        "--parallel.dp_shard=4",
        "--parallel.ep=2",
    ]
    return draw_experts(pool.run(4, recorded.mixture_of_rank, options))


def _triangle(pool: Pool) -> str:
    options = [*recorded.SMALL, "--parallel.dp_shard=1", "--parallel.cp=2"]
    consecutive, balanced = (
        pool.run(2, recorded.positions, [*options, f"--parallel.cp_method={method}"])
        for method in ("ulysses", "all_gather")
    )
    return draw_triangle(consecutive, balanced)


def _memory(pool: Pool) -> str:
    steps = []
    for title, mode in [("recompute.mode = none", "none"), ("recompute.mode = full", "full")]:
        options = [*recorded.LLAMA_1B, f"--recompute.mode={mode}"]
        (step,) = pool.run(1, recorded.memory_of_step, options, 8, timeout=600, joins=False)
        steps.append((title, step))
    return draw_memory(steps)


# The name of the file -> what draws it
PICTURES: dict[str, Callable[[Pool], str]] = {
    "sharding_2d": _two_axes,
    "fsdp_rows": _rows,
    "fsdp_streams": _streams,
    "tp_block": _block,
    "experts": _experts,
    "cp_triangle": _triangle,
    "pipeline_one_stage": lambda pool: draw_one_stage(),
    "pipeline_schedules": lambda pool: draw_all(),
    "step_memory": _memory,
}
